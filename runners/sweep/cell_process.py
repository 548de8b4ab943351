"""A cell's own process, as the sweep sees it."""

import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from runners.machine.environment import ROOT

LOOK_SECONDS = 0.25  # between two looks at the memory of a process that has a limit
GIB = 2**30


class CellProcess:
    """Starts the worker of one cell; `ask` sends it a command and waits for its answer.

    The worker leads a process group of its own, so that what it has started ends with it, even where its parent has ended.
    """

    def __init__(self, device: str, visible_device: str, cores: Collection[int] = ()):
        """cores: of the machine's, those that the worker and all it starts may use; every one if empty."""
        self.visible_device = visible_device
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.getcwd(), environment.get("PYTHONPATH")]))
        environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # NVML's order, so that both mean the same GPU by a number
        environment["CUDA_VISIBLE_DEVICES"] = visible_device if device == "cuda" else ""
        self.output = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed by close
        read_end, write_end = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "runners.cell.worker", str(write_end), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=self.output,
            pass_fds=[write_end],
            env=environment,
            start_new_session=True,
        )
        if cores:
            os.sched_setaffinity(self.process.pid, cores)  # long before it imports what starts threads
        os.close(write_end)
        self.answers = read_end
        self.pending = b""
        self.open = True
        self.killed_before = out_of_memory_kills()

    def ask(
        self,
        command: dict[str, Any],
        timeout: float,
        memory_gib: float | None = None,
        phase: Callable[[str], object] = lambda _: None,
    ) -> dict[str, Any]:
        """The worker's answer, or the status that stands for its end: {"status": "timeout" | "failed" | "out_of_memory",
        "reason": ...}. After any of these the process is gone.

        memory_gib: GiB of host memory that the worker may take with all that it starts. Where it took more, the answer has
        this limit as "memory_gib". It is looked at now and then, so that less than a look apart more may be taken.
        """
        deadline, now = time.monotonic() + timeout, "starting"
        look = math.inf if memory_gib is None else time.monotonic()
        if not self.tell(command):
            return self._ended()
        with selectors.DefaultSelector() as selector:
            selector.register(self.answers, selectors.EVENT_READ)
            while True:
                line, separator, rest = self.pending.partition(b"\n")
                if separator:
                    self.pending = rest
                    answer: dict[str, Any] = json.loads(line)
                    if "phase" not in answer:
                        # A compiler, say, whose end it was told as an error like others.
                        if answer.get("status") == "failed" and out_of_memory_kills() > self.killed_before:
                            answer["reason"] += "; meanwhile the kernel killed a process of this machine for want of memory"
                        return answer
                    now = answer["phase"]
                    phase(now)
                    continue
                if memory_gib is not None and time.monotonic() >= look:
                    taken = host_memory(self._tree(), memory_gib * GIB)
                    if taken > memory_gib * GIB:
                        self.close()
                        told = f"{taken / GIB:.2f} GiB of host memory, with all that it started, at: {now}"
                        reason = f"took more than memory_gib={memory_gib:g}: {told}"
                        return {"status": "out_of_memory", "reason": reason, "memory_gib": memory_gib}
                    look = time.monotonic() + LOOK_SECONDS
                if not selector.select(max(0.0, min(deadline, look) - time.monotonic())):
                    if time.monotonic() < deadline:
                        continue
                    self.close()
                    return {"status": "timeout", "reason": f"no result after {timeout:g} s, at: {now}"}
                received = os.read(self.answers, 1 << 16)
                if not received:
                    return self._ended()
                self.pending += received

    def kill(self) -> None:
        """End the process and all that it has started; whoever waits for its answer hears of its end."""
        tree = self._tree()  # while it can be told: children that lead groups of their own are found by their parents alone
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()
        for process in tree[1:]:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended, or is another user's
                process.kill()

    def tell(self, command: dict[str, Any]) -> bool:
        """Send a command; False where the worker is no more."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({**command, "visible_device": self.visible_device}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def close(self) -> None:
        """End the process and all that it has started, and let go of it."""
        if not self.open:
            return
        self.open = False
        self.kill()
        self.process.wait()
        if self.process.stdin is not None:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                self.process.stdin = None  # what was not yet sent goes to nobody
        os.close(self.answers)
        self.output.close()

    def _tree(self) -> list[psutil.Process]:
        """The worker, then its descendants; none once it has ended, when its number may be another's."""
        if self.process.poll() is not None:
            return []
        try:
            worker = psutil.Process(self.process.pid)
            return [worker, *worker.children(recursive=True)]
        except psutil.NoSuchProcess:  # another thread has closed it meanwhile
            return []

    def _ended(self) -> dict[str, Any]:
        """What stands for the answer of a process that ended without one, with its last words."""
        code = self.process.wait()
        self.output.seek(0)
        said = [line.strip() for line in self.output.read().splitlines() if line.strip()]
        last = f"; its last words: {said[-1][:300]}" if said else ""
        memory = code == -signal.SIGKILL and out_of_memory_kills() > self.killed_before
        self.close()
        if memory:
            return {"status": "out_of_memory", "reason": f"the kernel killed its process for want of memory{last}"}
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return {"status": "failed", "reason": f"its process {how}{last}"}


def host_memory(processes: Sequence[psutil.Process], limit: float) -> int:
    """Bytes of host memory that these processes take: the sum of their resident sets, where it is within `limit`.

    That counts a page once for each process that has it. Where it is above the limit, a page is divided among those that
    have it (Linux's proportional set size). Only then, since reading it goes through all page tables, which takes tens of
    milliseconds and holds up what the process would map meanwhile. What is swapped out is not counted.
    """

    def total(bytes_of: Callable[[psutil.Process], int]) -> int:
        taken = 0
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
                taken += bytes_of(process)
        return taken

    def proportional(process: psutil.Process) -> int:
        try:
            return getattr(process.memory_full_info(), "pss", resident(process))
        except psutil.AccessDenied:  # another user's
            return resident(process)

    def resident(process: psutil.Process) -> int:
        return process.memory_info().rss

    taken = total(resident)
    return total(proportional) if taken > limit else taken


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed for want of memory since the machine started; 0 where it does not say."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(counters.get("oom_kill", 0))
