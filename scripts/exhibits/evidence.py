"""What was measured for an exhibit: records, schedules and timelines."""

import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import yaml

from results.cell import Cell, Choice, Conditions, named, plain
from results.files import read_json, stored
from results.record import Record
from results.schedule_file import ScheduleFile
from results.selection import Place, Row, Selection, by_setting
from results.setting import LOAD
from results.timeline import Timeline, from_trace, shared_of
from scripts.charts.style import order

USUAL = Conditions(1, "cuda")  # where a sweep names none


@dataclass(frozen=True)
class Evidence:
    """What there is of an exhibit.

    Args:
        measured: the records of one setting; None for none.
        schedules: schedule files by cell.
        timelines: in the order of their traces.
    """

    measured: Selection | None = None
    schedules: Mapping[Cell, ScheduleFile] = field(default_factory=dict)
    timelines: Sequence[Timeline] = ()

    @property
    def place(self) -> str:
        """The GPU, or the CPU, that all of it was measured on; "" where there is none of it."""
        if self.measured is not None:
            return self.measured.setting.place
        machines = {timeline.machine.split(", ")[0] for timeline in self.timelines} - {""}
        return ", ".join(sorted(machines or self._devices))

    @property
    def setting(self) -> str:
        """The machine, the arithmetic, the model if it is one and the batch if it is one, as far as they are known."""
        if self.measured is not None:
            return self.measured.title_of(self.measured.rows)
        if self.timelines:
            return ", ".join(shared_of(self.timelines))
        batches = {cell.batch for cell in self.schedules}
        return ", ".join([*sorted(self._devices), *(f"batch {batch}" for batch in batches if len(batches) == 1)])

    @property
    def on_gpu(self) -> bool:
        return self._devices | ({self.measured.setting.device} if self.measured is not None else set()) == {"cuda"}

    @property
    def _devices(self) -> set[str]:
        """Of schedules and timelines."""
        return {cell.device for cell in self.schedules} | {timeline.cell.device for timeline in self.timelines}

    def schedule(self, row: Row, system: Choice) -> ScheduleFile | None:
        """The schedule file of a cell, made under the device and the precision of the records where there are any."""

        def suits(cell: Cell) -> bool:
            setting = self.measured.setting if self.measured is not None else cell.conditions
            is_alike = (cell.device, cell.conditions.precision) == (setting.device, setting.precision)
            return is_alike and place_in(cell) == (*row, system.key)

        return next((file for cell, file in self.schedules.items() if suits(cell)), None)

    def timeline(self, row: Row, system: Choice) -> Timeline | None:
        """The timeline of a model under a system, at any batch."""
        wanted = row[0], system.key
        return next((t for t in self.timelines if (t.cell.model.label, t.cell.system.key) == wanted), None)


def place_in(cell: Cell) -> Place:
    """Where a cell stands among those of an exhibit."""
    return cell.model.label, cell.batch, cell.system.key


def select(
    records: Sequence[Record], sweeps: Sequence[Mapping[str, str]], beside: Collection[Choice] = ()
) -> Selection | None:
    """The records that sweeps ask for, of one setting: of this host where it has any, and then the one with the most cells,
    then the newest.

    beside: further systems, by their keys.
    """
    requests = [_Request(sweep, beside) for sweep in sweeps]
    matching = [record for record in records if any(request.asks_for(record.cell) for request in requests)]
    if not matching:
        return None

    def rank(measured: Selection) -> tuple[bool, int, str]:
        is_here = measured.setting.host == platform.node()
        return is_here, len(measured.rows) * len(measured.systems), measured.records[0].when

    return max(by_setting(matching, order).values(), key=rank)


class _Request:
    """What one sweep asks for."""

    def __init__(self, sweep: Mapping[str, str], beside: Collection[Choice]):
        self.sweep = sweep
        self.models, self.systems = (choices(group, sweep) for group in ("model", "system"))
        self.systems |= set(beside)

    def asks_for(self, cell: Cell) -> bool:
        sweep = self.sweep
        if cell.runner.name != sweep.get("runner", "bench"):
            return False
        if str(cell.batch) not in parts(sweep.get("batch", "1")):
            return False
        arithmetic = {key: sweep.get(key, getattr(USUAL, key)) for key in ("precision", "layout")}
        if any(getattr(cell.conditions, key) not in parts(text) for key, text in arithmetic.items()):
            return False
        if "algorithms" in sweep and cell.conditions.algorithms not in parts(sweep["algorithms"]):
            return False
        if not all(self._has_load(cell.runner, key) for key in LOAD):
            return False
        if sweep.get("device", "auto") not in ("auto", cell.device):
            return False
        return cell.model.key in self.models and cell.system.key in self.systems

    def _has_load(self, runner: Choice, key: str) -> bool:
        """Whether an option of the load is as asked, or its runner's own. A trace is told by its file's name."""
        asked = self.sweep.get(f"runner.{key}")
        if asked is None:
            return key not in runner.changed
        values = {plain(yaml.safe_load(text)) for text in parts(asked)}
        value = plain(runner.get(key))
        return value in values or (key == "trace" and Path(value).name in {Path(one).name for one in values})


def choices(group: str, sweep: Mapping[str, str]) -> set[Choice]:
    """The keys of the models or systems that a sweep asks for, with every combination of their options."""
    options = [key for key in sweep if key.startswith(f"{group}.")]
    keys = set()
    for choice in parts(sweep.get(group, "")):
        for values in product(*(parts(sweep[key]) for key in options)):
            changes = {key.partition(".")[2]: yaml.safe_load(value) for key, value in zip(options, values, strict=True)}
            keys.add(named(group, choice, **changes))
    return keys


def parts(text: str) -> list[str]:
    """ "a,b" as a list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def read_timelines(file: Path) -> list[Timeline]:
    """Those of a trace, which may be compressed. Raises ValueError where it is none, OSError where it cannot be read."""
    file = stored(file)
    return from_trace(read_json(file)) if file.exists() else []
