"""What a measurement is. Adding one is a file in this folder and a file in conf/runner/; README.md says how.

A file of this folder imports torch within functions alone: the process that reads the command line asks each measurement for
its options and its columns, and never imports torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, TypeAlias, TypeVar

from results.accuracy import Accuracy
from results.calls import Correctness, Latency, Memory, Throughput
from results.cell import Choice
from results.limits import Limits
from results.occupation import ActiveWarps, Kernels, SmEfficiency
from results.quantity import Measured, Quantity
from results.record import Record
from results.serving import Serving
from results.warning import Warning

from .subject import Subject

Part: TypeAlias = (
    Accuracy
    | Memory
    | Correctness
    | Latency
    | Throughput
    | SmEfficiency
    | ActiveWarps
    | Kernels
    | Limits
    | Serving
    | Measured
)  # of a record
Text: TypeAlias = Callable[[Record], str]
Of = TypeVar("Of")

DASH = "–"  # in a table, where a record says nothing
MOST_LAG_MS = 2.0  # of a load generator, beyond which a trace is not the one that was asked for
NOT_YET = "the sweep ended before it was measured"


@dataclass(frozen=True)
class Column:
    """A column of the table at the end of a sweep.

    Args:
        heading: at its top.
        detail: 0 where every table shows it, up to 4 where only a wide one does.
        text: what a record says there, DASH for nothing.
        note: what the heading means.
        long_text: the same where the table is wide.
    """

    heading: str
    detail: int
    text: Text
    note: str = ""
    long_text: Text | None = None


@dataclass(frozen=True)
class Row:
    """A row of the table of a single cell. text: what its record says there, DASH for nothing."""

    heading: str
    text: Text


@dataclass(frozen=True)
class RunnerOptions:
    """What a runner's file has beside its name: here nothing. Those of a composition are a dataclass of this kind."""

    @property
    def unread(self) -> dict[str, str]:
        """Keys that nothing reads beside the others, each with its reason."""
        return {}


class Measurement(ABC):
    """One measurement of a prepared cell, with the options that conf/runner/ gives it.

    name: that of its file in conf/runner/, and of its field in a record.
    Options: a frozen dataclass. Its fields are keys of the runner's file; it raises BadRequest for a wrong value.
    needs_profiler: it comes after the interleaved rounds, since a profiler slows all later launches of its process.
    is_first: it comes right after preparation, before correctness and before anything is warm.
    is_compared: cells that make it take part in the interleaved rounds, from which ratios come.
    place: of its columns among those of others; they stand in ascending order.
    """

    name: ClassVar[str] = ""
    Options: ClassVar[type] = RunnerOptions
    needs_profiler: ClassVar[bool] = False
    is_first: ClassVar[bool] = False
    is_compared: ClassVar[bool] = False
    place: ClassVar[int] = 100
    columns: ClassVar[tuple[Column, ...]] = ()
    rows: ClassVar[tuple[Row, ...] | None] = None  # None: those of `columns`

    def __init__(self, runner: Choice):
        """Take the options from the runner's. Raises BadRequest for a wrong value."""
        self.options: object = options_of(self.Options, runner)

    def before_preparing(self, session: Subject) -> None:
        """Note what can be noted only before the system is prepared."""

    def before_profiling(self, session: Subject) -> None:
        """Note what can be noted only before any profiler is in the process."""

    @abstractmethod
    def measure(self, session: Subject) -> Part:
        """Measure a session that is prepared: its part of the record."""

    def doubts(self, session: Subject, part: Part) -> tuple[Warning, ...]:
        """What speaks against trusting the part."""
        return ()

    def missing(self, reason: str) -> Part:
        """What stands in the record where it could not be measured, or not yet."""
        return Measured((Quantity(self.name, self.name, "", None, reason=reason),))


class Composition:
    """A runner that makes several measurements: those that the option `measurements` of its file names, in that order.

    Options: those that are no measurement's.
    session: the class of its session, as module:class.
    possible: names of the measurements that it can make; none where they are all that its options suffice for.
    shown_first: headings of columns that every table of it shows.
    learns: may its systems learn, in a process of their own, before it measures?
    builds_on_cpu: is the network built there first, so that the next cell's may be built while one is measured?
    """

    name: ClassVar[str] = ""
    Options: ClassVar[type[RunnerOptions]] = RunnerOptions
    session: ClassVar[str] = "runners.cell.session:Session"
    possible: ClassVar[tuple[str, ...]] = ()
    shown_first: ClassVar[tuple[str, ...]] = ()
    learns: ClassVar[bool] = True
    builds_on_cpu: ClassVar[bool] = True


class ServingComposition(Composition):
    """A runner of cells that serve: their models are made on the device, and their systems learn nothing beforehand."""

    learns = False
    builds_on_cpu = False


def late_load(lags_ms: Sequence[float]) -> tuple[Warning, ...]:
    """The doubt in traces of which any was sent late. lags_ms: of each, its p99."""
    lag_ms = max(lags_ms, default=0.0)
    return (Warning("late_load", {"lag_ms": lag_ms}),) if lag_ms > MOST_LAG_MS else ()


def names_of(kind: type) -> set[str]:
    """The names of an options' dataclass."""
    return {field.name for field in fields(kind)}


def options_of(kind: type[Of], runner: Choice) -> Of:
    """An options' dataclass with the values of a runner. Raises BadRequest as the dataclass does."""
    return kind(**{name: runner.options[name] for name in names_of(kind)})


def number_or_dash(value: float | None, form: str) -> str:
    """A number in the form of str.format, DASH for None."""
    return DASH if value is None else form.format(value)


def sourced(part: SmEfficiency | ActiveWarps | None, form: str, *, is_long: bool) -> str:
    """A value and its source, or the reason why there is none where there is room for it."""
    if part is None:
        return DASH
    if part.value is None or part.source is None:
        return f"none: {part.reason}" if is_long else DASH
    return f"{form.format(part.value)} ({part.source if is_long else part.source[0]})"
