"""Models of which some go wrong, in a file that sweeps of tests import."""

from pathlib import Path

MODEL = '''
import os, signal, subprocess, sys, time
import torch
from torch import nn


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x).relu() + self.b(x).tanh()


class Killed(Branches):
    """Ends its process as the kernel does for want of memory, after some calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


class Exits(Branches):
    def forward(self, x):
        print("the model's last words", flush=True)
        os._exit(7)


class Hangs(Branches):
    """Never returns, and neither does what it starts."""

    def forward(self, x):
        child = subprocess.Popen(["sleep", "600"])
        with open("hanging", "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        time.sleep(600)


class Frozen(Branches):
    """Tracing keeps one of two branches."""

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else super().forward(x) + 1


class Takes(Branches):
    """Takes 1.25 GiB when TorchScript traces it, unless a file says that it was given enough, and then waits for its end."""

    def forward(self, x):
        if torch.jit.is_tracing() and not os.path.exists("enough"):
            self.take()
            time.sleep(600)
        return super().forward(x)

    def take(self):
        self.taken = b"x" * (5 << 28)


class HasTaken(Takes):
    """Half of it by each of two processes, the second of which leads a session of its own."""

    def take(self):
        program = [sys.executable, "-c", "import time; x = b'x' * (5 << 27); time.sleep(600)"]
        children = [subprocess.Popen(program, start_new_session=own) for own in (False, True)]
        with open("taking", "w") as file:
            file.write(" ".join(str(child.pid) for child in children))


MODELS = {1: Branches, 2: Killed, 3: Exits, 4: Hangs, 5: Frozen, 6: Takes, 7: HasTaken}


def make(batch):
    with open("made", "a") as file:
        file.write(f"{os.getpid()}\\n")
    return MODELS[batch](), (torch.randn(batch, 8),)
'''


def working_directory(folder: Path) -> Path:
    """The folder with MODEL in zoo.py. Sweeps in it, whose TMPDIR is tmp, wait for no other's turn on the CPU."""
    (folder / "zoo.py").write_text(MODEL)
    (folder / "tmp").mkdir()
    return folder
