"""The interleaved rounds, in which the systems of one model take turns. Only they give ratios.

Invariant: in each round every cell that takes part has one turn, so that what slows the machine for a while slows
all of them. A round goes the other way than the one before, so that a cell is not always behind the same one.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from uuid import uuid4

from results.calls import Comparison
from results.cell import Cell
from results.comparison import UNSOUND, has_sound_rounds
from results.record import Record, now
from results.statistics import Samples
from results.store import Store
from results.warning import Warning
from runners.cell.messages import Answer, Failed, Turn
from runners.machine.cpu_load import CpuLoad
from runners.machine.environment import cores
from runners.measurements.registry import plan

from .cell_process import CellProcess
from .lane import Lane
from .parked import Parked

APART = 1.25  # a cell whose time in the rounds differs by more from that alone is doubtful
OF_ROUNDS = ("differs_in_rounds", "no_margin", *UNSOUND)  # warnings of the rounds, which the next ones take the place of
NO_RATIO = "no_ratio"  # the warning of a cell that could not take part
NO_MARGIN = "no_margin"  # that of one whose second process could not


@dataclass
class Rounds:
    """Turns of cells that are prepared.

    Attributes:
        turns: Host milliseconds of each cell's turns so far.
        left_out: What the processes of cells answered that failed.
        again: Host milliseconds of the turns of a second process of one cell.
        no_margin: What that process answered where it failed.
        load: The share of the cores that other processes took, on a CPU.
    """

    lane: Lane
    parked: Parked
    turns: dict[Cell, list[Samples]] = field(default_factory=dict)
    left_out: dict[Cell, Failed] = field(default_factory=dict)
    again: list[Samples] = field(default_factory=list)
    no_margin: Failed | None = None
    load: float = 0.0

    def run(self, cells: list[Cell], count: int, twin: Cell | None = None) -> None:
        """Have each cell take `count` turns. One that fails is left out from then on, with what its process answered.

        twin: the cell of which a second process takes its turns too.
        """
        for cell in cells:
            ready = self.parked.ready(cell, "preparing again for the rounds")
            if isinstance(ready, CellProcess):
                self.turns[cell] = []
            else:
                self._leave_out(cell, ready)
        second = Parked(self.lane)
        if twin is not None:
            ready = second.ready(twin, "preparing a second process for the rounds")
            if isinstance(ready, Failed):
                self._end_second(second, twin, ready)
        with self.lane.rounds(cells[0]):
            cpu_load = CpuLoad(os.getpid())
            for number in range(count):
                self._round(number, f"round {number + 1} of {count}", second, twin)
            self.load = cpu_load.share_of_others()
        second.close_all()

    def _round(self, number: int, phase: str, second: Parked, twin: Cell | None) -> None:
        """One turn of each cell that has not failed."""
        places = [(self.parked, cell) for cell in self.turns]
        places += [(second, twin)] if twin is not None and self.no_margin is None else []
        for parked, cell in places if number % 2 == 0 else reversed(places):
            if parked is second and self.no_margin is not None:
                continue
            self.lane.progress.phase(self.lane.gpu, cell, phase)
            answer = parked.turn(cell)
            if parked is second:
                self._take_again(answer, second, cell)
                continue
            if twin is not None and self.no_margin is None and is_out_of_memory(answer):
                self._end_second(second, twin, Failed("out_of_memory", f"{cell.system.label} had too little beside it"))
                answer = parked.turn(cell)
            if isinstance(answer, Turn):
                self.turns[cell].append(answer.host_ms)
            else:
                self._leave_out(cell, answer)

    def _take_again(self, answer: Answer, second: Parked, twin: Cell) -> None:
        """A turn of the second process."""
        if isinstance(answer, Turn):
            self.again.append(answer.host_ms)
        else:
            assert isinstance(answer, Failed)
            self._end_second(second, twin, answer)

    def _end_second(self, second: Parked, twin: Cell, why: Failed) -> None:
        """Give the second process's memory back, and remember why there is no margin."""
        self.no_margin = why
        second.close(twin)

    def _leave_out(self, cell: Cell, answer: Answer) -> None:
        assert isinstance(answer, Failed)
        self.turns.pop(cell, None)
        self.left_out[cell] = answer
        self.parked.close(cell)


def is_out_of_memory(answer: Answer) -> bool:
    """Whether a process has ended for want of memory."""
    return isinstance(answer, Failed) and answer.status == "out_of_memory"


def taking_part(records: Mapping[Cell, Record]) -> list[Cell]:
    """The cells that ran, whose runner is compared, and that no rounds have failed."""
    return [
        cell
        for cell, record in records.items()
        if record.is_ok and plan(cell.runner).is_compared and not any(w.kind == NO_RATIO for w in record.warnings)
    ]


def sharing_rounds(records: Mapping[Cell, Sequence[Record]]) -> dict[Cell, Record]:
    """The record of each cell whose rounds all of them share, on a machine that did nothing else; {} where there are none.

    records: a cell's of one measurement, the one that counts first.
    """
    by_group = [
        {record.comparison.group: record for record in reversed(of_cell) if record.comparison and has_sound_rounds(record)}
        for of_cell in records.values()
    ]
    shared = [group for group in reversed(by_group[0]) if all(group in groups for groups in by_group)]
    return {cell: groups[shared[0]] for cell, groups in zip(records, by_group, strict=True)} if shared else {}


def in_shared_rounds(store: Store, records: Mapping[Cell, Record]) -> dict[Cell, Record]:
    """As `sharing_rounds`, of the cells that take part, with what other sweeps have kept in the store."""
    cells = taking_part(records)
    return sharing_rounds({cell: store.of_measurement(records[cell]) for cell in cells}) if len(cells) > 1 else {}


def compared(
    records: Mapping[Cell, Record], turns: Mapping[Cell, list[Samples]], load: float, max_load: float
) -> dict[Cell, Record]:
    """The records with their rounds, and with what speaks against those.

    A GPU runs nothing but the cell whose turn it is. On a CPU a cell whose rounds differ from what was measured alone had
    other work beside it in one of the two, and gives no ratio.

    Args:
        records: Of the cells, measured alone.
        turns: Host milliseconds of each cell's turns.
        load: The share of the cores that other processes took meanwhile.
        max_load: The share that they may take; 1 gives ratios whatever else runs.
    """
    group, ids = uuid4().hex[:16], tuple(records[cell].id for cell in turns)
    with_rounds = {}
    for cell, host_ms in turns.items():
        comparison = Comparison(group, ids, now(), tuple(host_ms))
        warnings = [warning for warning in records[cell].warnings if warning.kind not in OF_ROUNDS]
        alone_ms = records[cell].host_ms
        ratio = comparison.median_ms / alone_ms if alone_ms else 1.0
        if not 1 / APART < ratio < APART:
            kind = "apart_in_rounds" if cell.device == "cpu" and max_load < 1 else "differs_in_rounds"
            warnings.append(Warning(kind, {"ratio": ratio}))
        if cell.device == "cpu" and load > max_load:
            warnings.append(Warning("busy_rounds", {"load": load, "cores": cores()}))
        with_rounds[cell] = replace(records[cell], comparison=comparison, warnings=tuple(warnings))
    return with_rounds


def twin_of(records: Mapping[Cell, Record]) -> Cell | None:
    """Of the cells that take part the one that a second process is prepared of in the least time; eager's, whose calls are
    the host's and vary otherwise, only where there is no other.
    """
    cells = taking_part(records)
    return min(cells, key=lambda cell: (cell.system.name == "eager", records[cell].preparation_s or 0.0), default=None)


def with_margin(record: Record, rounds: Rounds) -> Record:
    """The record of the twin: with its second process's turns, or with why it has none."""
    assert record.comparison is not None
    if rounds.no_margin is None:
        return replace(record, comparison=replace(record.comparison, again=tuple(rounds.again)))
    values: dict[str, str | int | float | bool | None] = {
        "status": rounds.no_margin.status,
        "reason": rounds.no_margin.reason,
    }
    return replace(record, warnings=(*record.warnings, Warning(NO_MARGIN, values)))


def without_ratio(record: Record, answer: Failed) -> Record:
    """The record of a cell that was left out."""
    values: dict[str, str | int | float | bool | None] = {"status": answer.status, "reason": answer.reason}
    return replace(record, warnings=(*record.warnings, Warning(NO_RATIO, values)))
