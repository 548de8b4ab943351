"""The records of one setting, by model, batch and system."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

from .calls import Latency
from .cell import Choice
from .comparison import UNSOUND, Speedup, over_processes, speedup
from .quantity import Quantity
from .record import Record
from .setting import Setting
from .store import Store, why_no_records

Row: TypeAlias = tuple[str, int]  # the label of a model, and a batch
Place: TypeAlias = tuple[str, int, Choice]  # a row, and the key of a system
Order: TypeAlias = Callable[[Iterable[Choice]], list[Choice]]
Part = TypeVar("Part")

NOT_MEASURED = "not measured"
WITHOUT_RATIO = (*UNSOUND, "no_ratio", "profiled_before_timing")  # warnings of a cell that has no ratio from rounds
# What stands in the place of a number, by status.
WORDS = {
    "unsupported": "unsupported",
    "incorrect": "incorrect",
    "unchecked": "unchecked",
    "failed": "failed",
    "out_of_memory": "out of memory",
    "timeout": "timed out",
}


class NoResults(Exception):
    """There is nothing to show; the message is one line."""


def read(folders: Iterable[Path]) -> list[Record]:
    """Every record under these folders, or in these packs, the newest of an id and its rounds: a cell that several processes
    measured, each in rounds of its own, is there as often. Files and lines that hold none are named on standard error.

    Raises:
        NoResults: a folder does not exist, or none holds a record.
    """
    newest: dict[tuple[str, str], Record] = {}
    folders = list(folders)
    for folder in folders:
        if (reason := why_no_records(folder)) is not None:
            raise NoResults(reason)
        for part in Store(folder).parts():
            for line in part.skipped:
                print(line, file=sys.stderr)
            for record in part.all:
                key = record.id, record.comparison.group if record.comparison is not None else ""
                if key not in newest or newest[key].when <= record.when:
                    newest[key] = record
    if not newest:
        raise NoResults(f"no record in {', '.join(map(str, folders))}")
    return list(newest.values())


def by_label(systems: Iterable[Choice]) -> list[Choice]:
    """The order of systems where none other is asked for."""
    return sorted(set(systems), key=lambda system: system.label)


def by_setting(records: Iterable[Record], order: Order = by_label) -> "dict[Setting, Selection]":
    """The records of each setting, settings in the order of their names."""
    groups: dict[Setting, list[Record]] = {}
    for record in records:
        groups.setdefault(Setting.of(record), []).append(record)
    return {setting: Selection(groups[setting], order) for setting in sorted(groups)}


def _last_measured(record: Record) -> str:
    """When, in its rounds where it took part in any: another set of rounds leaves the rest of a record as it was."""
    return record.when if record.comparison is None else max(record.when, record.comparison.when)


class Selection:
    """Records of one setting.

    Attributes:
        records: the newest first.
        setting: what they share.
        models: labels, sorted.
        systems: keys, in the order that was given.
        among: the systems of all that this is a part of, so that a system looks the same in each part.
        batches: ascending.
        rows: each (model, batch) that has a record, by batch and model.
    """

    def __init__(self, records: Sequence[Record], order: Order = by_label, among: Sequence[Choice] = ()):
        """Raises NoResults for no records."""
        if not records:
            raise NoResults("no record is left to show")
        self.order = order
        self.records = sorted(records, key=_last_measured, reverse=True)
        self.setting = Setting.of(self.records[0])
        self._cells: dict[Place, list[Record]] = {}
        ran = {(place_of(record), record.cell.runner.name) for record in self.records if record.is_ok}
        ran_at_all = {place for place, _ in ran}
        for record in self.records:
            place = place_of(record)
            # That a system lacks one measurement says nothing of what another has measured.
            is_of_another = (place, record.cell.runner.name) not in ran and place in ran_at_all
            if not (record.status == "unsupported" and is_of_another):
                self._cells.setdefault(place, []).append(record)
        self.models = sorted({model for model, _, _ in self._cells})
        self.systems = order(system for _, _, system in self._cells)
        self.among = order([*among, *self.systems])
        self.batches = sorted({batch for _, batch, _ in self._cells})
        self.rows: list[Row] = sorted({(model, batch) for model, batch, _ in self._cells}, key=lambda row: (row[1], row[0]))

    def only(
        self,
        models: Sequence[str] = (),
        systems: Sequence[str] = (),
        batches: Sequence[int] = (),
        always: Sequence[str] = (),
    ) -> "Selection":
        """A part of it.

        Args:
            models, systems: labels, as a person asks for them; all where none is named.
            batches: all where none is named.
            always: labels of systems to keep beside `systems`.

        Raises:
            NoResults: a name has no record.
        """
        labels = [system.label for system in self.systems]
        for what, wanted, existing in (
            ("model", models, self.models),
            ("system", systems, labels),
            ("batch", batches, self.batches),
        ):
            for one in wanted:
                if one not in existing:
                    raise NoResults(f"no record of the {what} {one}: there is {', '.join(map(str, existing))}")
        part = [
            record
            for (model, batch, system), records in self._cells.items()
            for record in records
            if (not models or model in models)
            and (not systems or system.label in (*systems, *always))
            and (not batches or batch in batches)
        ]
        return Selection(part, self.order, self.among)

    def system(self, label: str) -> Choice:
        """The system of a label; one of that name alone where no record has it."""
        return next((system for system in self.among if system.label == label), Choice(label, label))

    def records_of(self, row: Row, system: Choice) -> list[Record]:
        """All of a cell's, the newest first."""
        return self._cells.get((*row, system.key), [])

    def record(self, row: Row, system: Choice, part: Callable[[Record], object]) -> Record | None:
        """The newest record of a cell that has a part, or that is not ok and so says why it has none."""
        for record in self.records_of(row, system):
            if not record.is_ok or part(record):
                return record
        return None

    def part(self, row: Row, system: Choice, part: Callable[[Record], Part | None]) -> Part | None:
        """A part of a cell's newest record that has it; None where a newer one is not ok: it has no speed now."""
        record = self.record(row, system, part)
        return part(record) if record is not None and record.is_ok else None

    def over(self, row: Row, system: Choice, baseline: Choice) -> Speedup | None:
        """How many times faster than `baseline`, over all rounds that the two shared while their code was the newest's."""
        return over_processes(self.pairs(row, system, baseline))

    def pairs(self, row: Row, system: Choice, baseline: Choice) -> list[tuple[Record, Record]]:
        """The two systems' records of each set of rounds that they shared while their code was the newest's."""
        pairs: list[tuple[Record, Record]] = []
        for record in self.records_of(row, system):
            if not record.is_ok:
                break  # an incorrect system has no speed, whatever it had before
            for other in self.records_of(row, baseline):
                if not other.is_ok:
                    break
                if speedup(record, other) is not None and (not pairs or _same_code(pairs[0], (record, other))):
                    pairs.append((record, other))
                    break
        return pairs

    def why_not_in_turn(self, row: Row, system: Choice, baseline: Choice) -> str | None:
        """Why two systems have no ratio from rounds in turn, as their warnings say; None where they have one."""
        ratio = self.over(row, system, baseline)
        if ratio is not None and ratio.is_in_turn:
            return None
        newest = [record for one in (system, baseline) if (record := self.record(row, one, latency_of)) is not None]
        warnings = [warning for record in newest for warning in record.warnings if warning.kind in WITHOUT_RATIO]
        return warnings[0].sentence.removeprefix("no ratio: ") if warnings else "the systems did not take turns"

    def missing(self, row: Row, system: Choice, part: Callable[[Record], object]) -> str:
        """Why a cell lacks a part, in a word or two."""
        record = self.record(row, system, part)
        return WORDS.get(record.status, NOT_MEASURED) if record is not None else NOT_MEASURED

    def quantities(self) -> dict[str, Quantity]:
        """An example of each quantity without a type of its own, by "MEASUREMENT.NAME"."""
        examples: dict[str, Quantity] = {}
        for record in self.records:
            for measurement, measured in record.described.items():
                for quantity in measured.quantities:
                    examples.setdefault(f"{measurement}.{quantity.name}", quantity)
        return dict(sorted(examples.items()))

    def reasons_without(self, name: str) -> list[str]:
        """Why records have no value of a quantity, by "MEASUREMENT.NAME"; each reason once, sorted."""
        measurement, _, key = name.partition(".")
        parts = [part for record in self.records if (part := record.measured.get(measurement)) is not None]
        quantities = [quantity for part in parts if (quantity := part.quantity(key)) is not None]
        return sorted({q.reason for q in quantities if q.value is None and q.reason is not None})

    def title_of(self, rows: Sequence[Row], with_model: bool = False) -> str:
        """The setting, and the batch if it is one that a model runs; of several batches the model if that is one.

        Args:
            rows: those of a chart.
            with_model: whether one model is named beside one batch too, as its chart says it nowhere else.
        """
        models, batches = sorted({model for model, _ in rows}), sorted({batch for _, batch in rows})
        if all(record.serving is not None for record in self.records):  # an engine makes its batches of what comes
            return self.setting.label
        model = models if len(models) == 1 and (with_model or len(batches) > 1) else []
        batch = [f"batch {batches[0]}"] if len(batches) == 1 else []
        return ", ".join([self.setting.label, *model, *batch])

    def row_labels(self, rows: Sequence[Row], among: Sequence[Row] = ()) -> list[str]:
        """What the title leaves open of each row: the model, the batch or both.

        Args:
            rows: those to name.
            among: all that the chart has; `rows` where it is empty.
        """
        models, batches = ({part[i] for part in among or rows} for i in range(2))
        if len(batches) == 1:
            return [model for model, _ in rows]
        return [f"batch {batch}" if len(models) == 1 else f"{model}\nbatch {batch}" for model, batch in rows]


def _same_code(one: tuple[Record, Record], other: tuple[Record, Record]) -> bool:
    return all(a.environment.code == b.environment.code for a, b in zip(one, other, strict=True))


def latency_of(record: Record) -> Latency | None:
    return record.latency


def place_of(record: Record) -> Place:
    """What tells a record's cell from the others of its setting."""
    return record.cell.model.label, record.cell.batch, record.cell.system.key


def quantity_of(name: str) -> Callable[[Record], Quantity | None]:
    """What reads a quantity from a record by "MEASUREMENT.NAME"; None where it has no value."""
    measurement, _, key = name.partition(".")

    def read_quantity(record: Record) -> Quantity | None:
        measured = record.described.get(measurement)
        quantity = measured.quantity(key) if measured is not None else None
        return quantity if quantity is not None and quantity.value is not None else None

    return read_quantity
