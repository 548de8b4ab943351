"""How far a sweep is: a bar on a terminal; elsewhere a line a cell, and one in ten seconds for what goes on meanwhile."""

import threading
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from results.cell import Cell
from results.record import Record

SILENCE = 10.0  # seconds without a line, where there is no terminal


class Progress:
    """Told by the groups what they do; may be called from several threads."""

    def __init__(self, cells: int):
        self.console = Console(stderr=True)
        self.total, self.finished = cells, 0
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self.bars = Bars(*columns, console=self.console, transient=True) if self.console.is_terminal else None
        self.since: dict[Cell, float] = {}
        self.waited: set[str] = set()  # GPUs
        self.phases: dict[str, tuple[str, str, float]] = {}  # on each GPU: the cell's label, what it is at, since when
        self.ended = threading.Event()
        self.teller = threading.Thread(target=self._tell, daemon=True)

    def __enter__(self) -> "Progress":
        if self.bars is not None:
            self.bars.start()
            self.task = self.bars.add_task("starting", total=self.total)
        else:
            self.teller.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bars is not None:
            self.bars.stop()
        else:
            self.ended.set()
            self.teller.join()

    def start(self, cell: Cell, gpu: str) -> None:
        self.since[cell] = time.monotonic()
        self.phases.pop(gpu, None)
        self.phase(gpu, cell, "starting")

    def _tell(self) -> None:
        """What goes on, a line in SILENCE, until all is done."""
        while not self.ended.wait(SILENCE):
            for label, phase, begin in list(self.phases.values()):
                self._print(f"[{self.finished}/{self.total}] {label}: {phase}, {time.monotonic() - begin:.0f} s")

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def phase(self, gpu: str, cell: Cell, phase: str) -> None:
        """What goes on there. A cell that is done comes again in rounds, and for what would disturb them: it begins anew."""
        label, _, begin = self.phases.get(gpu, ("", "", 0.0))
        if label != cell.label:
            begin = self.since.get(cell, time.monotonic())
        self.phases[gpu] = cell.label, phase, begin
        if self.bars is not None:
            self.bars.update(self.task, description=f"{cell.label}: {phase}")

    def wait(self, gpu: str, cell: Cell) -> None:
        """Another sweep measures on this device, for minutes perhaps: without a terminal it is said once."""
        waiting = "waiting for another sweep on this device"
        self.phase(gpu, cell, waiting)
        if self.bars is None and gpu not in self.waited:
            self._print(f"{cell.label}: {waiting}")
        self.waited.add(gpu)

    def rest(self, gpu: str) -> None:
        """A group ended there, and nothing goes on until another begins."""
        self.phases.pop(gpu, None)

    def skip(self, cell: Cell) -> None:
        self._finish(f"{cell.label}: measured before")

    def done(self, cell: Cell, record: Record) -> None:
        reason = f" ({record.reason})" if record.reason else ""
        self._finish(f"{cell.label}: {record.status}{reason}, {self._end(cell):.0f} s")

    def refuse(self, cell: Cell, reason: str) -> None:
        """An option of it is wrong. Of a cell that is alone the command's last line says so."""
        seconds = self._end(cell)
        if self.total > 1:
            self._finish(f"{cell.label}: refused ({reason}), {seconds:.0f} s")

    def _end(self, cell: Cell) -> float:
        """Nothing goes on in a cell any more; returns the seconds that it took."""
        seconds = time.monotonic() - self.since.pop(cell)
        for gpu in [gpu for gpu, (label, _, _) in list(self.phases.items()) if label == cell.label]:
            self.rest(gpu)
        return seconds

    def _finish(self, line: str) -> None:
        self.finished += 1
        if self.bars is not None:
            self.bars.advance(self.task)
        if self.total > 1 or self.bars is None:
            self._print(f"[{self.finished}/{self.total}] {line}")
