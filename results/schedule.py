"""What a record keeps of a schedule and of the decisions behind it: plain data, which knows no scheduler."""

from collections.abc import Iterable
from dataclasses import dataclass, field

BEFORE, AFTER = "before", "after"  # what a decision's alternatives are called where the whole graph was measured


@dataclass(frozen=True)
class DecisionRow:
    """Equal decisions among measured alternatives.

    Args:
        kind: what decided: a rewriting pass, IOS, torch_compile.
        pattern: what matched, in words.
        count: how often it matched.
        chosen: the alternative that was taken.
        milliseconds: what each alternative took; None where it failed. Empty where nothing was measured.
        num_operators: the operators that all matches cover; None where the record does not say.
        reasons: why an alternative has no time.
    """

    kind: str
    pattern: str
    count: int
    chosen: str
    milliseconds: dict[str, float | None] = field(default_factory=dict)
    num_operators: int | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def gain(self) -> float | None:
        """How many times as fast as the first alternative, the model as captured, the chosen one is."""
        first, chosen = next(iter(self.milliseconds.values()), None), self.milliseconds.get(self.chosen)
        return first / chosen if first is not None and chosen else None


def gained_in_whole(decisions: Iterable[DecisionRow]) -> tuple[DecisionRow, ...]:
    """Those for which the whole graph was measured, without them and with them."""
    return tuple(row for row in decisions if {*row.milliseconds} == {BEFORE, AFTER} and all(row.milliseconds.values()))


@dataclass(frozen=True)
class BlockSearch:
    """IOS's search of one block: its units and width, and milliseconds of its stages and of its units in turn."""

    units: int
    width: int
    transitions: int | None = None
    milliseconds: float | None = None
    sequential_milliseconds: float | None = None


@dataclass(frozen=True)
class Search:
    """What finding a schedule took. Fields that a scheduler has nothing to say of are None.

    Args:
        seconds: of the search, without profiling.
        states, transitions: of IOS's dynamic programme.
        measured: stages that were measured, and not read from the cache.
        simulated: stages or candidates that were simulated, and for that not measured.
        units, blocks, largest_block, splits: how IOS cut the model.
        parts: each block of IOS.
        allocation_seconds: of Opara's stream allocation, its waits included.
        profile_seconds: of Opara's profiler.
        occupancy: mean achieved occupancy of the kernels, 0 to 1.
    """

    seconds: float | None = None
    states: int | None = None
    transitions: int | None = None
    measured: int | None = None
    simulated: int | None = None
    units: int | None = None
    blocks: int | None = None
    largest_block: int | None = None
    splits: int | None = None
    parts: tuple[BlockSearch, ...] = ()
    allocation_seconds: float | None = None
    profile_seconds: float | None = None
    occupancy: float | None = None


@dataclass(frozen=True)
class ScheduleSummary:
    """The schedule that ran, in numbers.

    Args:
        system: the scheduler's name.
        operators, edges: of the graph that was scheduled.
        streams, waits: of the schedule.
        width: the largest number of operators that do not depend on each other.
        search: what finding it took.
        decisions: what rewriting passes decided before it, in their order; then what the scheduler itself did, of its kind.
    """

    system: str
    operators: int
    edges: int
    streams: int
    waits: int
    width: int
    search: Search = Search()
    decisions: tuple[DecisionRow, ...] = ()

    def decided(self, kind: str) -> tuple[DecisionRow, ...]:
        """The decisions of one pass, or of the scheduler."""
        return tuple(row for row in self.decisions if row.kind == kind)


@dataclass(frozen=True)
class Compilation:
    """What a compiler says of its work. Fields that do not apply are None.

    Args:
        mode, layout, freezing: of torch.compile.
        num_cached_graphs: graphs that Inductor read from its cache.
        export_s, exported_now: seconds of exporting, and whether that was now or before.
        compile_s, compiled_now: the same of compiling.
        functions, tuned: functions of TVM's module, and those of them that tuning improved.
        trials, tuning_s: candidates that tuning measured, and its seconds.
        operators, error: of an exported ONNX file, and its relative error against eager.
        not_compared: why there is no such error.
        providers: operators by ONNX Runtime's provider.
        search_s, num_untried: seconds of a search among ways to compile, and the ways that it did not reach.
        decisions: what such a search measured.
        handed_over: the system that executes the model in the place of the cell's.
    """

    mode: str | None = None
    layout: str | None = None
    freezing: bool | None = None
    num_cached_graphs: int | None = None
    export_s: float | None = None
    exported_now: bool | None = None
    compile_s: float | None = None
    compiled_now: bool | None = None
    functions: int | None = None
    tuned: int | None = None
    trials: int | None = None
    tuning_s: float | None = None
    operators: int | None = None
    error: float | None = None
    not_compared: str | None = None
    providers: dict[str, int] | None = None
    search_s: float | None = None
    num_untried: int | None = None
    decisions: tuple[DecisionRow, ...] = ()
    handed_over: str | None = None
