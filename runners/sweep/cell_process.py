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

from results.words import one_line
from runners.cell.messages import SECONDS, Answer, Command, Failed, NoMessage, Phase, answer_to, encoded
from runners.machine.installation import IMPORT_PATH, module_name

from .host_memory import GIB, host_memory, out_of_memory_kills

MOST_BYTES = 2**30  # of an answer
TAIL_BYTES, MOST_LAST_WORDS = 2**16, 300  # of what a process has printed, and letters of it in a reason
MOST_SILENCE = 1.0  # seconds of waiting before the process is looked after
MOST_LAST_SECONDS = 10.0  # from the end of the answers to that of the process
MOST_STOPPING, STOPPING_S = 5.0, 0.002  # until a process stands still, and between two looks at whether it does
LOOK_SECONDS = 0.25  # between two looks at the memory of a process that has a limit


class CellProcess:
    """Starts the worker of one cell; `ask` sends it a command and waits for its answer.

    `process` is the worker's keeper, by which the worker and what it has started end with this process, and by whatever end.
    """

    def __init__(self, device: str, visible_device: str, cores: Collection[int] = ()):
        """cores: of the machine's, those that the worker and all it starts may use; every one if empty."""
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*IMPORT_PATH, os.getcwd(), environment.get("PYTHONPATH")]))
        environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # NVML's order, so that both mean the same GPU by a number
        environment["CUDA_VISIBLE_DEVICES"] = visible_device if device == "cuda" else ""
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        self.stood_still = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        read_end, write_end = os.pipe()
        descriptors = write_end, self.stood_still.fileno()
        # Safe paths: modules of the working directory may have names of ours.
        python, numbers = [sys.executable, "-P"], ",".join(map(str, cores))
        keeper = [*python, "-m", module_name("runners.machine.keeper"), str(os.getpid()), numbers]
        self.process = subprocess.Popen(
            [*keeper, *python, "-m", module_name("runners.cell.worker"), visible_device, *map(str, descriptors)],
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=self.output,
            pass_fds=descriptors,
            env=environment,
            start_new_session=True,
        )
        os.close(write_end)
        self.answers = read_end
        self.pending, self.num_searched = bytearray(), 0
        self.open = True
        self.paused_s, self._paused_since = 0.0, math.inf
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
        watch = _Watch(self.seconds, timeout, memory_gib)
        if not self.tell(command):
            return self._ended()
        with selectors.DefaultSelector() as selector:
            selector.register(self.answers, selectors.EVENT_READ)
            while True:
                if (line := self._line()) is not None:
                    try:
                        message = answer_to(command, line)
                    except NoMessage as error:
                        return self._strange(str(error))
                    if not isinstance(message, Phase):
                        return self._completed(message)
                    watch.phase = message.name
                    phase(message.name)
                elif (exceeded := watch.exceeded(self._tree)) is not None:
                    self.close()
                    return exceeded
                elif not selector.select(min(watch.seconds(), MOST_SILENCE)):
                    if watch.is_over():
                        self.close()
                        return Failed("timeout", f"no result after {timeout:g} s, at: {watch.phase}")
                    if self.process.poll() is not None:  # a fork of it may hold the pipe open
                        return self._ended()
                elif not self._received():
                    return self._ended()
                elif len(self.pending) > MOST_BYTES:
                    return self._strange(one_line(self.pending[:100].decode(errors="replace")))

    def seconds(self) -> float:
        """A clock that stands still while the worker does."""
        now = time.monotonic()
        return now - self.paused_s - max(0.0, now - self._paused_since)

    def pause(self) -> None:
        """Have the worker and all that it has started stand still, until resume. May be called while another thread asks."""
        self._paused_since = time.monotonic()
        is_over = self._paused_since + MOST_STOPPING
        while time.monotonic() < is_over and (running := [p for p in self._tree() if _is_running(p)]):
            for process in running:
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    process.suspend()
            time.sleep(STOPPING_S)

    def resume(self) -> None:
        """Have it go on. The time since pause counts towards no deadline, and towards no budget of its own."""
        with suppress(ValueError):  # another thread has closed it meanwhile
            os.pwrite(self.stood_still.fileno(), SECONDS.pack(self.paused_s + time.monotonic() - self._paused_since), 0)
        for process in self._tree():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.resume()
        self.paused_s += max(0.0, time.monotonic() - self._paused_since)
        self._paused_since = math.inf  # in this order: to the thread that asks, the clock may stand still, but not leap

    def _line(self) -> bytes | None:
        """The next whole line that has come."""
        end = self.pending.find(b"\n", self.num_searched)
        if end < 0:
            self.num_searched = len(self.pending)
            return None
        line = bytes(self.pending[:end])
        del self.pending[: end + 1]
        self.num_searched = 0
        return line

    def _received(self) -> bool:
        """Take what has come; False where the worker has closed its end."""
        received = os.read(self.answers, 1 << 16)
        self.pending += received
        return bool(received)

    def _strange(self, beginning: str) -> Failed:
        """What stands for an answer where something else came through the pipe; nothing after it can be trusted."""
        self.close()
        return Failed("failed", f"its process wrote to the descriptor of its answers what is no answer: {beginning}")

    def _completed(self, answer: Answer) -> Answer:
        """The answer, and what the worker cannot know: that the kernel has killed a compiler of its, say."""
        if isinstance(answer, Failed) and answer.status == "failed" and out_of_memory_kills() > self.killed_before:
            reason = f"{answer.reason}; meanwhile the kernel killed a process of this machine for want of memory"
            return Failed(answer.status, reason)
        return answer

    def kill(self) -> None:
        """Have the worker end with all that it has started; whoever waits for its answer hears of its end."""
        self.process.terminate()

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
        self.stood_still.close()

    def _tree(self) -> list[psutil.Process]:
        """The worker and what it has started; nothing once it has ended, when its keeper's number may be another's."""
        if self.process.poll() is not None:
            return []
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:  # another thread has closed it meanwhile
            return []

    def _ended(self) -> Failed:
        """What stands for the answer of a process that ended without one, with its last words."""
        try:
            code = self.process.wait(MOST_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self.close()
            return Failed("failed", "its process closed the descriptor of its answers")
        size = os.fstat(self.output.fileno()).st_size
        tail = os.pread(self.output.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")
        words = next(filter(None, (one_line(line, MOST_LAST_WORDS) for line in reversed(tail.splitlines()))), "")
        last = f"; its last words: {words}" if words else ""
        is_out_of_memory = code == -signal.SIGKILL and out_of_memory_kills() > self.killed_before
        self.close()
        if is_out_of_memory:
            return Failed("out_of_memory", f"the kernel killed its process for want of memory{last}")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return Failed("failed", f"its process {how}{last}")


def _is_running(process: psutil.Process) -> bool:
    """Neither stopped nor ended, nor another user's."""
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


class _Watch:
    """The deadline of a command, and the limit on memory until then."""

    def __init__(self, clock: Callable[[], float], timeout: float, memory_gib: float | None):
        """clock: seconds, by which `timeout` is counted from now on."""
        self.clock, self.deadline, self.memory_gib = clock, clock() + timeout, memory_gib
        self.look = math.inf if memory_gib is None else time.monotonic()
        self.phase = "starting"

    def seconds(self) -> float:
        """Until there is something to see to."""
        return max(0.0, min(self.deadline - self.clock(), self.look - time.monotonic()))

    def is_over(self) -> bool:
        return self.clock() >= self.deadline

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
