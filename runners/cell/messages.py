"""What a sweep and a cell's process say to each other: one JSON object a line, which names its type."""

import json
from dataclasses import dataclass
from struct import Struct

from results.cell import Cell, Choice
from results.document import part_from_json, part_to_json
from results.limits import Limits
from results.record import Record
from results.statistics import Samples
from results.warning import Warning
from results.words import one_line

SECONDS = Struct("d")  # as the file says it that tells a process for how long it was made to stand still


class NoMessage(ValueError):
    """A line holds no message, or none that is due; the error's text is its beginning."""


# Commands


@dataclass(frozen=True)
class Ahead:
    """Import and build what a cell will need. There is no answer."""

    cell: Cell


@dataclass(frozen=True)
class Check:
    """Try the options of a choice of `group`, "model" or "system". Answer: Checked."""

    group: str
    choice: Choice
    batch: int


@dataclass(frozen=True)
class Learn:
    """Have the system search, tune, profile or choose. Answer: Learned."""

    cell: Cell


@dataclass(frozen=True)
class Measure:
    """Prepare and measure. Answer: Done.

    Args:
        record: what is known before: cell, environment, id.
        limits: the model's, if a sibling has measured them.
        is_profiled: False leaves what needs a profiler pending.
    """

    record: Record
    limits: Limits | None
    is_profiled: bool


@dataclass(frozen=True)
class Prepare:
    """Make a cell ready for rounds or for a profiler. Answer: Ready."""

    cell: Cell


@dataclass(frozen=True)
class Round:
    """One turn of the cell that is prepared. Answer: Turn."""


@dataclass(frozen=True)
class Profile:
    """Measure what a record owes, all of which needs a profiler. Answer: Done. Nothing is timed in the process after it."""

    record: Record
    limits: Limits | None


@dataclass(frozen=True)
class Show:
    """What a runner without a record shows of a cell. Answer: Shown."""

    cell: Cell


# Answers


@dataclass(frozen=True)
class Phase:
    """What is being done now. It comes before the answer."""

    name: str


@dataclass(frozen=True)
class Checked:
    """sources: a digest of the files that a custom model came from."""

    sources: str | None


@dataclass(frozen=True)
class Learned:
    """seconds: of learning; None where the system has nothing to learn, and the process is as clean as before."""

    seconds: float | None
    warnings: tuple[Warning, ...] = ()


@dataclass(frozen=True)
class Ready:
    """The cell is prepared."""


@dataclass(frozen=True)
class Turn:
    """host_ms: of each call."""

    host_ms: Samples


@dataclass(frozen=True)
class Done:
    """The record with what was measured."""

    record: Record


@dataclass(frozen=True)
class Shown:
    """document: data for JSON, as the runner makes it."""

    document: object


@dataclass(frozen=True)
class Failed:
    """No answer came, for this reason.

    Args:
        status: one of a record's.
        reason: one line.
        memory_limit_gib: the limit on host memory that was exceeded.
    """

    status: str
    reason: str
    memory_limit_gib: float | None = None


@dataclass(frozen=True)
class Refused:
    """The request is wrong, in a way that only the model or the system could tell."""

    reason: str


Command = Ahead | Check | Learn | Measure | Prepare | Round | Profile | Show
Answer = Checked | Learned | Ready | Turn | Done | Shown | Failed | Refused
ANSWERS: dict[type, type] = {
    **{Check: Checked, Learn: Learned, Measure: Done, Prepare: Ready},
    **{Round: Turn, Profile: Done, Show: Shown},
}
TYPES = {kind.__name__: kind for kind in (*Command.__args__, *Answer.__args__, Phase)}


def encoded(message: Command | Answer | Phase) -> str:
    """One line, with its end."""
    return json.dumps({"type": type(message).__name__, "message": part_to_json(message)}) + "\n"


def decoded(line: str | bytes) -> Command | Answer | Phase:
    """Raises NoMessage for what is none."""
    try:
        document = json.loads(line)
        message: Command | Answer | Phase = part_from_json(document["message"], TYPES[document["type"]])
    except (LookupError, TypeError, ValueError, RecursionError) as error:  # as NotARecord is
        raise NoMessage(one_line(line.decode(errors="replace") if isinstance(line, bytes) else line, 100)) from error
    return message


def answer_to(command: Command, line: bytes) -> Answer | Phase:
    """The message of a line that a cell's process wrote in reply. Raises NoMessage for what is no answer to the command."""
    message = decoded(line)
    if not isinstance(message, Phase | Failed | Refused | ANSWERS[type(command)]):
        raise NoMessage(type(message).__name__)
    return message  # type: ignore[return-value]
