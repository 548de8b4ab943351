"""A cell's own process, as the sweep sees it."""

import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import suppress

import psutil

from runners.cell.messages import Answer, Command, Failed, Phase, decoded, encoded
from runners.machine.installation import IMPORT_PATH, module_name

from .host_memory import GIB, host_memory, out_of_memory_kills

LOOK_SECONDS = 0.25  # between two looks at the memory of a process that has a limit


class CellProcess:
    """Starts the worker of one cell; `ask` sends it a command and waits for its answer.

    The worker leads a process group of its own, so that what it has started ends with it, even where its parent has ended.
    """

    def __init__(self, device: str, visible_device: str, cores: Collection[int] = ()):
        """cores: of the machine's, those that the worker and all it starts may use; every one if empty."""
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*IMPORT_PATH, os.getcwd(), environment.get("PYTHONPATH")]))
        environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # NVML's order, so that both mean the same GPU by a number
        environment["CUDA_VISIBLE_DEVICES"] = visible_device if device == "cuda" else ""
        self.output = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed by close
        read_end, write_end = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module_name("runners.cell.worker"), str(write_end), str(os.getpid()), visible_device],
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
        command: Command,
        timeout: float,
        memory_gib: float | None = None,
        phase: Callable[[str], object] = lambda _: None,
    ) -> Answer:
        """The worker's answer, or Failed for its end: "timeout", "failed" or "out_of_memory". After that it is gone.

        Args:
            command: what it is to do.
            timeout: seconds.
            memory_gib: host memory that the worker may take with all that it starts. It is looked at now and then, so that
                for less than a look more may be taken.
            phase: told what the worker is at.
        """
        watch = _Watch(time.monotonic() + timeout, memory_gib)
        if not self.tell(command):
            return self._ended()
        with selectors.DefaultSelector() as selector:
            selector.register(self.answers, selectors.EVENT_READ)
            while True:
                if (line := self._line()) is not None:
                    message = decoded(line)
                    if not isinstance(message, Phase):
                        return self._completed(message)  # type: ignore[arg-type]
                    watch.phase = message.name
                    phase(message.name)
                elif (exceeded := watch.exceeded(self._tree)) is not None:
                    self.close()
                    return exceeded
                elif not selector.select(watch.seconds()):
                    if watch.is_over():
                        self.close()
                        return Failed("timeout", f"no result after {timeout:g} s, at: {watch.phase}")
                elif not self._received():
                    return self._ended()

    def _line(self) -> bytes | None:
        """The next whole line that has come."""
        line, separator, rest = self.pending.partition(b"\n")
        if not separator:
            return None
        self.pending = rest
        return line

    def _received(self) -> bool:
        """Take what has come; False where the worker has closed its end."""
        received = os.read(self.answers, 1 << 16)
        self.pending += received
        return bool(received)

    def _completed(self, answer: Answer) -> Answer:
        """The answer, and what the worker cannot know: that the kernel has killed a compiler of its, say."""
        if isinstance(answer, Failed) and answer.status == "failed" and out_of_memory_kills() > self.killed_before:
            reason = f"{answer.reason}; meanwhile the kernel killed a process of this machine for want of memory"
            return Failed(answer.status, reason)
        return answer

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

    def tell(self, command: Command) -> bool:
        """Send a command; False where the worker is no more."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(encoded(command).encode())
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

    def _ended(self) -> Failed:
        """What stands for the answer of a process that ended without one, with its last words."""
        code = self.process.wait()
        self.output.seek(0)
        lines = [line.strip() for line in self.output.read().splitlines() if line.strip()]
        last = f"; its last words: {lines[-1][:300]}" if lines else ""
        is_out_of_memory = code == -signal.SIGKILL and out_of_memory_kills() > self.killed_before
        self.close()
        if is_out_of_memory:
            return Failed("out_of_memory", f"the kernel killed its process for want of memory{last}")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return Failed("failed", f"its process {how}{last}")


class _Watch:
    """The deadline of a command, and the limit on memory until then."""

    def __init__(self, deadline: float, memory_gib: float | None):
        self.deadline, self.memory_gib = deadline, memory_gib
        self.look = math.inf if memory_gib is None else time.monotonic()
        self.phase = "starting"

    def seconds(self) -> float:
        """Until there is something to see to."""
        return max(0.0, min(self.deadline, self.look) - time.monotonic())

    def is_over(self) -> bool:
        return time.monotonic() >= self.deadline

    def exceeded(self, processes: Callable[[], list[psutil.Process]]) -> Failed | None:
        """What stands for the answer where the processes take more memory than they may. Looks only when it is time to."""
        if self.memory_gib is None or time.monotonic() < self.look:
            return None
        taken_bytes = host_memory(processes(), self.memory_gib * GIB)
        if taken_bytes <= self.memory_gib * GIB:
            self.look = time.monotonic() + LOOK_SECONDS
            return None
        amount = f"{taken_bytes / GIB:.2f} GiB of host memory, with all that it started, at: {self.phase}"
        return Failed("out_of_memory", f"took more than memory_gib={self.memory_gib:g}: {amount}", self.memory_gib)
