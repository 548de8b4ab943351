"""A machine of a cluster, played by processes of this one. All of them are killed at once, as when the power fails."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

# What it starts, and whatever loses its own parent below it, is a descendant of this process for as long as it runs.
HOLDER = """
import contextlib, ctypes, os, subprocess, sys
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
for command in sys.argv[1:]:
    subprocess.Popen(command, shell=True)
with contextlib.suppress(ChildProcessError):
    while True:
        os.wait()
"""


class Machine:
    """Programs that run until the machine is killed.

    Args:
        commands: the programs, each a line for a shell.
        variables: their environment.
        log: a file that gets their output.
    """

    def __init__(self, *commands: str, variables: Mapping[str, str], log: Path):
        with log.open("a") as file:
            holder = [sys.executable, "-c", HOLDER, *(f"exec {command}" for command in commands)]
            self.process = subprocess.Popen(holder, env=dict(variables), stdout=file, stderr=file, start_new_session=True)

    def kill(self) -> None:
        """Kill all that runs on it; returns when nothing does."""
        while self.process.poll() is None:  # the holder ends with the last of them
            for process in self.processes():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.02)

    def processes(self) -> list[psutil.Process]:
        """All that runs on it."""
        return psutil.Process(self.process.pid).children(recursive=True)


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def until(is_so: Callable[[], bool], what: str, logs: Iterable[Path], within: float = 90.0) -> None:
    """Wait.

    Args:
        is_so: what is waited for.
        what: the same, in words.
        logs: files that tell why it is not so.
        within: seconds.

    Raises:
        AssertionError: it is not so in time.
    """
    deadline = time.monotonic() + within
    while not is_so():
        if time.monotonic() > deadline:
            raise AssertionError("\n".join([f"not within {within} s: {what}", *(file.read_text()[-2000:] for file in logs)]))
        time.sleep(0.2)
