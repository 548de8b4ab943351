"""One GPU (or the CPU) of a sweep: its lock, the processes of its cells, and what is imported ahead of them."""

import errno
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from results.cell import Cell
from runners.cell.messages import Ahead, Answer, Command
from runners.checks import BadRequest, not_writable
from runners.machine import card
from runners.request.request import SweepOptions

from .cell_process import CellProcess
from .progress import Progress
from .quiet import Quiet

MOST_TAKEN = 100  # names for a folder of locks
IDLE_CORES = 8  # a GPU: with so many, one that imports does not disturb the one that launches


def lock_folder() -> Path:
    """This user's own folder in the temporary folder, in which nobody else can put or take anything.

    A name that somebody else has taken, or that is no folder, is passed over. Raises BadRequest where no name is left.
    """
    temporary = Path(tempfile.gettempdir())
    try:
        for number in range(MOST_TAKEN):
            folder = temporary / f"opweave-{os.getuid()}-locks{f'-{number}' if number else ''}"
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            state = folder.lstat()
            if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o022:
                return folder
    except OSError as error:
        raise not_writable("TMPDIR", temporary, error) from error
    raise BadRequest(f"{folder} and {MOST_TAKEN - 1} names like it are taken: set TMPDIR to a folder of your own")


class Ended(Exception):
    """The sweep ends, and the answer that a group waited for with it."""


class Processes:
    """Every process that any lane of a sweep has open, so that a sweep that ends early can end them all."""

    def __init__(self) -> None:
        self.alive: set[CellProcess] = set()
        self.is_ending = False

    def start(self, device: str, gpu: str, cores: Sequence[int]) -> CellProcess:
        process = CellProcess(device, gpu, cores)
        self.add(process)
        return process

    def add(self, process: CellProcess) -> None:
        self.alive.add(process)
        if self.is_ending:  # set before the others were killed, so this one is either among those or seen here
            process.kill()

    def close(self, process: CellProcess) -> None:
        process.close()
        self.alive.discard(process)

    def end(self) -> None:
        """Kill all; the groups that wait for them see it and end too."""
        self.is_ending = True
        for process in list(self.alive):
            process.kill()


class Lane:
    """Starts the processes of one device, asks them, and keeps one ready for the next cell."""

    def __init__(
        self,
        device: str,
        gpu: str,
        cores: Sequence[int],
        num_lanes: int,
        options: SweepOptions,
        processes: Processes,
        progress: Progress,
        quiet: Quiet,
        ahead: CellProcess | None = None,
    ):
        """Nothing is started yet.

        Args:
            device: "cpu" or "cuda".
            gpu: as CUDA_VISIBLE_DEVICES and NVML name it; several with commas between them.
            cores: those that its processes may use; every one if empty.
            num_lanes: devices that the sweep measures on at once.
            options: of the sweep.
            processes: those of all lanes.
            progress: told what the cells are at.
            quiet: of all lanes.
            ahead: a process for the first cell; one is started if None.
        """
        self.device, self.gpu, self.cores, self.num_lanes = device, gpu, cores, num_lanes
        self.options, self.processes, self.progress, self.quiet = options, processes, progress, quiet
        self._ahead = ahead

    @contextmanager
    def exclusive(self, cell: Cell) -> Iterator[None]:
        """The devices for one group alone: sweeps that run at once take turns. cell: named while it waits."""
        names = sorted(card.uuid(gpu) for gpu in self.gpu.split(",")) if self.device == "cuda" else ["cpu"]
        with ExitStack() as stack:
            for name in names:  # in one order, so that no two sweeps wait for each other
                stack.enter_context(self._locked(name, cell))
            yield

    @contextmanager
    def _locked(self, name: str, cell: Cell) -> Iterator[None]:
        """One device. name: its UUID, or cpu."""
        file = lock_folder() / f"{name}.lock"
        lock = FileLock(file)
        while not lock.is_locked:
            try:
                if file.is_symlink():
                    raise FileExistsError(errno.ELOOP, "it is a link", str(file))
                lock.acquire(timeout=1.0)
            except Timeout:
                self.progress.wait(self.gpu, cell)
                if self.processes.is_ending:
                    raise Ended from None
            except OSError as error:
                raise BadRequest(f"the lock {file} cannot be taken: {error.strerror or error}") from error
        try:
            yield
        finally:
            lock.release()

    def others(self) -> list[card.Process]:
        """What computes on the GPU before anything of ours does."""
        return card.processes(self.gpu) if self.device == "cuda" else []

    def start(self) -> CellProcess:
        return self.processes.start(self.device, self.gpu, self.cores)

    def start_or_take(self, following: Sequence[Cell]) -> CellProcess:
        """A process for a cell: the one that was begun ahead of time, where there is one.

        Where cores enough are idle beside the cell that measures, another is begun. It imports what the first of the
        `following` cells needs, and builds its network on the CPU.
        """
        process, self._ahead = self._ahead or self.start(), None
        if following and self.has_idle_cores():
            self._ahead = self.start()
            self._ahead.tell(Ahead(following[0]))
        return process

    def has_idle_cores(self) -> bool:
        return self.device == "cuda" and (os.cpu_count() or 1) >= IDLE_CORES * self.num_lanes

    def ask(self, process: CellProcess, command: Command, cell: Cell) -> Answer:
        """Raises Ended where the sweep ends meanwhile."""

        def tell(phase: str) -> None:
            self.progress.phase(self.gpu, cell, phase)

        with self.quiet.work(process, command, lambda: self._wait(cell)):
            answer = process.ask(command, self.options.timeout, self.options.memory_gib, tell)
        if self.processes.is_ending:
            raise Ended
        return answer

    def rounds(self, cell: Cell) -> AbstractContextManager[None]:
        """For rounds: nothing runs on any other lane meanwhile. Raises Ended. cell: named while it waits."""
        return self.quiet.rounds(lambda: self._wait(cell))

    def _wait(self, cell: Cell) -> None:
        self.progress.phase(self.gpu, cell, "waiting for what another GPU measures")
        if self.processes.is_ending:
            raise Ended

    def close(self, process: CellProcess | None = None) -> None:
        """End a process; the one that was begun ahead, without an argument."""
        if process is None:
            process, self._ahead = self._ahead, None
        if process is not None:
            self.processes.close(process)
