"""A sweep of small models through a launcher, whose jobs can be held while they measure, and found."""

import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import psutil
from conftest import command, environment, heed_interrupts

from results.comparison import speedup
from results.document import from_json

MODEL = """
import os, time
import torch
from torch import nn


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x).relu() + self.b(x).tanh()


def make(batch):
    with open("made", "a") as file:
        file.write(f"{batch} {os.getpid()} {os.environ.get('OMP_NUM_THREADS')}\\\\n")
    while os.path.exists("wait"):
        time.sleep(0.05)
    return Branches(), (torch.randn(batch, 8),)
""".replace("\\\\", "\\")
ASKED = [
    "-m",
    "model=custom",
    "model.factory=zoo:make",
    "device=cpu",
    "results=r",
    "runner=latency",
    "runner.samples=5",
    "max_load=1",
]


def prepare(folder: Path) -> Path:
    """A working directory with MODEL in zoo.py. No model is made while a file `wait` is in it."""
    (folder / "zoo.py").write_text(MODEL)
    (folder / "tmp").mkdir()
    return folder


def shell_of(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a sweep in that directory; only a launcher sets OMP_NUM_THREADS in it."""
    return environment(TMPDIR=str(folder / "tmp"), OMP_NUM_THREADS="", **more)


@contextmanager
def begun(folder: Path, shell: Mapping[str, str], *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """A sweep over ASKED, which goes on meanwhile. It waits for models while there is a file `wait`, which there is now."""
    (folder / "wait").touch()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    sweep_command = command(*ASKED, *arguments)
    with subprocess.Popen(sweep_command, cwd=folder, env=dict(shell), preexec_fn=heed_interrupts, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def records_by_cell(folder: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """The records by batch and system."""
    records = [json.loads(file.read_text()) for file in (folder / "r").glob("*.json")]
    return {(r["cell"]["conditions"]["batch"], r["cell"]["system"]["name"]): r for r in records}


def _job_above(cell: psutil.Process) -> psutil.Process | None:
    """The process that started the keeper of a cell's process, or of a fork of that; None where it has ended."""
    ancestors = cell.parents()
    keepers = [i for i, p in enumerate(ancestors) if any("runners.machine.keeper" in part for part in p.cmdline())]
    return next(iter(ancestors[keepers[0] + 1 :]), None) if keepers else None


def jobs_of_cells(folder: Path, count: int = 1, within: float = 120.0) -> dict[int, psutil.Process]:
    """By batch, the launcher's process that makes its model, or made it last.

    Args:
        count: of batches, to wait for.
        within: seconds.
    """
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        lines = (folder / "made").read_text().splitlines() if (folder / "made").exists() else []
        cells = {int(line.split()[0]): int(line.split()[1]) for line in lines}
        if len(cells) >= count:
            jobs = {batch: _job_above(psutil.Process(cell)) for batch, cell in cells.items()}
            return {batch: job for batch, job in jobs.items() if job}
        time.sleep(0.05)
    raise AssertionError(f"models of {count} batches were not made")


def ended(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """What a sweep that went well has printed: its table, and what it told meanwhile."""
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    return out, err


def complete(folder: Path, batches: Sequence[int]) -> None:
    """Both systems of each batch were measured, in turn, by one job; and the launch has left nothing else."""
    records = records_by_cell(folder)
    assert set(records) == set(product(batches, ("eager", "torchscript")))
    assert {r["status"] for r in records.values()} == {"ok"}
    for batch in batches:
        assert speedup(from_json(records[batch, "torchscript"]), from_json(records[batch, "eager"])) is not None
    assert len({r["comparison"]["group"] for r in records.values()}) == len(batches)
    assert not any((folder / "r" / ".launches").iterdir())
    threads = {line.split()[2] for line in (folder / "made").read_text().splitlines()}
    assert threads == {"None"}  # Ray would set OMP_NUM_THREADS
