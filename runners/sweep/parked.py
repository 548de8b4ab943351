"""Processes whose cells are prepared, and wait for the rounds and for the profiler."""

from collections.abc import Iterator

from results.cell import Cell
from runners.cell.messages import Answer, Failed, Prepare, Ready, Refused, Round

from .cell_process import CellProcess
from .lane import Lane


class Parked:
    """At most one process a cell of one group."""

    def __init__(self, lane: Lane):
        self.lane = lane
        self._processes: dict[Cell, CellProcess] = {}

    def __len__(self) -> int:
        return len(self._processes)

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._processes)

    def park(self, cell: Cell, process: CellProcess) -> None:
        self._processes[cell] = process

    def ready(self, cell: Cell, phase: str) -> CellProcess | Failed:
        """The cell's process; one that prepares it again, where it has none. phase: what people are told meanwhile."""
        if cell not in self._processes:
            self._processes[cell] = self.lane.start()
            self.lane.progress.phase(self.lane.gpu, cell, phase)
            answer = self.lane.ask(self._processes[cell], Prepare(cell), cell)
            if isinstance(answer, Refused):
                return Failed("failed", answer.reason)
            if not isinstance(answer, Ready):
                assert isinstance(answer, Failed)
                return answer
        return self._processes[cell]

    def turn(self, cell: Cell) -> Answer:
        """One turn of a cell that is ready."""
        return self.lane.ask(self._processes[cell], Round(), cell)

    def close(self, cell: Cell) -> None:
        if (process := self._processes.pop(cell, None)) is not None:
            self.lane.close(process)

    def close_all(self) -> None:
        for cell in list(self._processes):
            self.close(cell)
