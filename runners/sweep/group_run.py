"""One group of cells on one device: measured one after another, then in interleaved rounds, then with a profiler.

Invariant: a record is written as soon as its cell is measured, and again with what is added to it. So a sweep that ends
early loses at most the cell in flight, and the next one finds what is owed.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from results.cell import Cell
from results.document import to_json
from results.environment import Environment
from results.files import parsed
from results.limits import Limits
from results.pack import sound_record
from results.record import Record, now
from results.store import Store
from results.warning import Warning
from runners.cell.messages import Answer, Done, Failed, Learn, Learned, Measure, Profile, Refused
from runners.checks import not_writable
from runners.measurements.parts import limits_of_model, without
from runners.measurements.registry import plan

from .cell_process import CellProcess
from .lane import Lane
from .parked import Parked
from .rounds import Rounds, compared, in_shared_rounds, is_out_of_memory, taking_part, twin_of, with_margin, without_ratio

UNRUN = "failed", "it has not run"  # status and reason of a record until its cell has run


class CellRefused(Exception):
    """Measuring a cell has shown that an option of it is wrong: it has no record."""


class GroupRun:
    """Runs the cells of one group on one lane."""

    def __init__(
        self,
        lane: Lane,
        cells: Sequence[Cell],
        store: Store,
        place_of: Callable[[Cell], tuple[str, Environment]],
        following: Callable[[], Sequence[Cell]],
    ):
        """Nothing runs yet.

        Args:
            lane: the device.
            cells: that differ in their system alone.
            store: of the records.
            place_of: a cell's id, and the environment that decides it.
            following: the cells that come after this group.
        """
        self.lane, self.cells, self.store = lane, tuple(cells), store
        self.place_of, self.following = place_of, following
        self.records: dict[Cell, Record] = {}
        self.refused: dict[Cell, str] = {}  # why, of those whose options measuring them has shown to be wrong
        self.parked = Parked(lane)

    def run(self) -> None:
        """Measure what has no record, compare, profile. Raises BadRequest, and Ended where the sweep ends."""
        with self.lane.exclusive(self.cells[0]):
            self.warnings = tuple(
                Warning("not_alone", {"process": process.id, "mebibytes": process.mebibytes})
                for process in self.lane.others()
            )
            try:
                self.unmeasured = [cell for cell in self.cells if self._recorded(cell) is None]
                for cell in self.cells:
                    self._run_cell(cell)
                self._compare()
                self._profile()
            finally:
                self.parked.close_all()
                self.lane.progress.rest(self.lane.gpu)

    @property
    def _has_rounds(self) -> bool:
        return len(self.cells) > 1 and self.lane.options.rounds > 0 and plan(self.cells[0].runner).is_compared

    def _recorded(self, cell: Cell) -> Record | None:
        """The record that spares measuring the cell. Read with the lock held: another sweep may have just written it."""
        record = None if self.lane.options.force else self.store.find(self.place_of(cell)[0])
        return record if record is not None and record.is_final else None

    def _run_cell(self, cell: Cell) -> None:
        if (record := self._recorded(cell)) is not None:
            self.records[cell] = record
            self.lane.progress.skip(cell)
            return
        try:
            record = self._measured(cell)
        except CellRefused as error:
            self.refused[cell] = str(error)
            self.lane.progress.refuse(cell, str(error))
            return
        self._write(cell, record)
        self.lane.progress.done(cell, self.records[cell])

    def _measured(self, cell: Cell) -> Record:
        """The record; one that lacks memory is measured again where parked processes can make room. Raises CellRefused."""
        record = self._measure(cell)
        # What the parked ones hold, of the GPU's memory and of the host's, the cell may have lacked, so each further time it
        # has more. Its own limit it has exceeded without them. The slowest makes room first: the rounds can do without that
        # best, and each of the others would have to be prepared again. A cell that had all the memory lacks it for good.
        for make_room in (self._close_slowest, self.parked.close_all):
            if record.status == "out_of_memory" and record.memory_limit_gib is None and len(self.parked):
                make_room()
                record = self._measure(cell)
        return record

    def _measure(self, cell: Cell) -> Record:
        """Learn in a process that is thrown away, where the system learns; then measure in a clean one."""
        self.unmeasured = [other for other in self.unmeasured if other != cell]
        process = self._process()
        self.lane.progress.start(cell, self.lane.gpu)
        identifier, environment = self.place_of(cell)
        status, reason = UNRUN
        record = Record(identifier, cell, environment, status, reason, now(), warnings=self.warnings)
        learned = self.lane.ask(process, Learn(cell), cell)
        if not isinstance(learned, Learned):
            self.lane.close(process)
            return _failed(record, learned)
        if learned.seconds is not None:
            seconds = learned.seconds - process.paused_s
            record = replace(record, learning_s=seconds, warnings=(*record.warnings, *learned.warnings))
            self.lane.close(process)
            process = self._process()
        # What takes a profiler waits until after the rounds.
        command = Measure(record, self._limits(), is_profiled=not self._has_rounds)
        answer = self.lane.ask(process, command, cell)
        record = answer.record if isinstance(answer, Done) else _failed(record, answer)
        if record.is_ok and self._has_rounds:
            self.parked.park(cell, process)
        else:
            self.lane.close(process)
        return record

    def _close_slowest(self) -> None:
        self.parked.close(max(self.parked, key=self._milliseconds))

    def _milliseconds(self, cell: Cell) -> float:
        """Of a call that was measured alone."""
        return self.records[cell].host_ms or math.inf

    def _process(self) -> CellProcess:
        return self.lane.start_or_take([*self.unmeasured, *self.following()])

    def _limits(self) -> Limits | None:
        """The model's, if a cell of this group has measured them: they are the same for every system."""
        return next(filter(None, map(limits_of_model, self.records.values())), None)

    def _compare(self) -> None:
        """Interleaved rounds over the cells that ran, unless they share some already."""
        # What is no longer parked is prepared in this order: where memory is short, the slowest are left out.
        cells = sorted(taking_part(self.records), key=self._milliseconds)
        if len(cells) < 2 or not self.lane.options.rounds:
            return
        if shared := in_shared_rounds(self.store, self.records):
            self.records |= shared
            return
        rounds, options = Rounds(self.lane, self.parked), self.lane.options
        has_margin = options.margin if options.margin is not None else cells[0].device == "cuda"
        twin = twin_of(self.records) if has_margin else None
        rounds.run(cells, options.rounds, twin)
        for cell, answer in rounds.left_out.items():
            self._write(cell, without_ratio(self.records[cell], answer))
        if len(rounds.turns) > 1:
            for cell, record in compared(self.records, rounds.turns, rounds.load, options.max_load).items():
                self._write(cell, with_margin(record, rounds) if cell == twin else record)

    def _profile(self) -> None:
        """What takes a profiler, of the cells that have waited with it, or that an earlier sweep left without it.

        A cell whose process is parked comes first and gives its memory back: the profiler takes some, and so does a cell
        that is prepared again.
        """
        for cell in sorted(self.records, key=lambda cell: cell not in self.parked):
            record = self.records[cell]
            if record.is_ok and record.pending:
                answer = self._profiled(cell, record)
                if is_out_of_memory(answer) and len(self.parked) > 1:
                    self.parked.close_all()
                    answer = self._profiled(cell, record)
                if isinstance(answer, Done):
                    record = answer.record
                else:
                    assert isinstance(answer, Failed)
                    reason = f"measuring it ended as {answer.status} ({answer.reason})"
                    record = without(record, record.pending, reason)
                self._write(cell, record)
            self.parked.close(cell)

    def _profiled(self, cell: Cell, record: Record) -> Answer:
        ready = self.parked.ready(cell, "preparing again for the profiler")
        return self.lane.ask(ready, Profile(record, self._limits()), cell) if isinstance(ready, CellProcess) else ready

    def _write(self, cell: Cell, record: Record) -> None:
        """Keep the record, or one that says why no reader would take it. Raises BadRequest."""
        try:
            sound_record(parsed(json.dumps(to_json(record)).encode()))
        except ValueError as error:
            reason = f"what was measured makes no record: {error}"
            record = Record(record.id, cell, record.environment, "failed", reason, record.when, warnings=self.warnings)
        try:
            self.store.write(record)
        except OSError as error:
            raise not_writable("results", self.store.folder, error) from error
        self.records[cell] = record


def _failed(record: Record, answer: Answer) -> Record:
    """The record of a cell whose process gave no result. Raises CellRefused where an option of the cell is wrong."""
    if isinstance(answer, Refused):
        raise CellRefused(answer.reason)
    assert isinstance(answer, Failed)
    return replace(record, status=answer.status, reason=answer.reason, memory_limit_gib=answer.memory_limit_gib)
