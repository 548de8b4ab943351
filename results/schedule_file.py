"""The schedule file of `runner=schedule`: the schedule itself, operator by operator, with its cell."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from .cell import Cell
from .document import NotARecord, cell_from_json, part_from_json
from .files import COMPRESSED, read_json, stored
from .limits import Limits
from .older import cell_of_schedule_file
from .schedule import DecisionRow, Search

REQUIRED = ("model", "system", "batch", "device", "operators", "edges", "waits", "streams", "width")
OPTIONAL = ("search", "stages", "merges", "convolution_macs", "decisions", "limits")
ENDING = ".schedule.json"

Pair: TypeAlias = tuple[int, int]
Groups: TypeAlias = tuple[tuple[int, ...], ...]


class NoSchedule(ValueError):
    """A file holds no schedule; the message is one line."""


@dataclass(frozen=True)
class Operator:
    """One operator of a schedule.

    Args:
        id: of the operator in its graph.
        name: for people ("conv2d").
        target: of PyTorch ("aten.conv2d.default").
        stream: the logical stream that it is launched on.
        position: its place in the order of launches.
    """

    id: int
    name: str
    target: str
    stream: int
    position: int


@dataclass(frozen=True)
class ScheduleFile:
    """A schedule file; keys that are not listed here are passed over.

    Args:
        model, system, batch, device: what it was made for, as labels.
        operators: in the order of their ids.
        edges: (producer, consumer), ids of operators.
        waits: (operator, operator that waits for it), on different streams.
        streams: their number.
        width: the largest number of operators that do not depend on each other.
        search: what finding it took.
        stages: of IOS, each a list of groups of operators; empty where it has none.
        merges: operators that run as one; empty where there are none.
        convolution_macs: multiply-accumulates of a call's convolutions; None of a custom model, and in older files.
        decisions: what passes decided, and then the scheduler itself.
        limits: of the operators; None where the scheduler runs none of them.
        cell: what it was made for; None in files of older versions.
    """

    model: str
    system: str
    batch: int
    device: str
    operators: tuple[Operator, ...]
    edges: tuple[Pair, ...]
    waits: tuple[Pair, ...]
    streams: int
    width: int
    search: Search = field(default_factory=Search)
    stages: tuple[Groups, ...] = ()
    merges: Groups = ()
    convolution_macs: int | None = None
    decisions: tuple[DecisionRow, ...] = ()
    limits: Limits | None = None
    cell: Cell | None = field(default=None, compare=False)

    @classmethod
    def from_json(cls, document: object) -> "ScheduleFile":
        """Raises NoSchedule."""
        if not isinstance(document, dict):
            raise NoSchedule("not a JSON object")
        known = {key: document[key] for key in REQUIRED if key in document}
        if missing := [key for key in REQUIRED if key not in known]:
            raise NoSchedule(f"it lacks {', '.join(missing)}")
        known |= {key: document[key] for key in OPTIONAL if document.get(key)}
        try:
            cell = cell_from_json(document["cell"]) if "cell" in document else None
            schedule: ScheduleFile = part_from_json(known, cls, is_strict=False)
        except NotARecord as error:
            raise NoSchedule(str(error)) from error
        ids = {operator.id for operator in schedule.operators}
        named = {v for pair in (*schedule.edges, *schedule.waits) for v in pair}
        named |= {v for stage in schedule.stages for group in stage for v in group}
        if strange := named - ids:
            raise NoSchedule(f"it names the operator {min(strange)}, which it does not have")
        return replace(schedule, cell=cell)

    @classmethod
    def read(cls, file: Path) -> "ScheduleFile":
        """Raises NoSchedule where the file cannot be read or is none; the message names it."""
        try:
            return cls.from_json(read_json(file))
        except NoSchedule as error:
            raise NoSchedule(f"{file} is no schedule: {error}") from error
        except (OSError, ValueError) as error:
            raise NoSchedule(f"{file}: {(isinstance(error, OSError) and error.strerror) or error}") from error


def read_cells(folder: Path) -> dict[Cell, ScheduleFile]:
    """The schedule files (*.schedule.json, or compressed) of a folder by their cells.

    Raises NoSchedule, and ValueError for a bad name.
    """
    schedules = {}
    files = (file for end in (ENDING, ENDING + COMPRESSED) for file in folder.glob(f"*{end}"))
    for name in sorted({file.name.removesuffix(COMPRESSED) for file in files}):
        schedule = ScheduleFile.read(stored(folder / name))
        schedules[schedule.cell or cell_of_schedule_file(name, schedule.device)] = schedule
    return schedules
