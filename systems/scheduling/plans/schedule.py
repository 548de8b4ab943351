"""The one representation of a schedule: every scheduler emits it, every executor accepts it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from systems.scheduling.decision import DecisionRow
from systems.scheduling.graph.operator_graph import Operator, OperatorGraph


@dataclass(frozen=True)
class BlockSearch:
    """The search of one block.

    Args:
        units: number of schedule units.
        width: the largest number of units of which none depends on another.
        transitions: pairs of a state and an ending that the search went through.
        milliseconds: of the block's stages together.
        sequential_milliseconds: of its units one after the other.
    """

    units: int
    width: int
    transitions: int | None = None
    milliseconds: float | None = None
    sequential_milliseconds: float | None = None


@dataclass(frozen=True)
class Search:
    """What finding a schedule took, and what of it each scheduler knows; None for the rest.

    Args:
        seconds: of the search, a profiler's not among them.
        states, transitions: that a dynamic programme went through.
        units, blocks, largest_block, splits: schedule units, blocks of them, units of the largest block, and how often a
            block was split (IOS).
        parts: the search of each block (IOS).
        measured: measurements that were made, and not read from the cache.
        simulated: what was simulated, and not measured since it was too slow.
        allocation_seconds: of `seconds`, those of the stream allocator, which say too where streams wait (Opara).
        profile_seconds: of the profiler, beside `seconds` (Opara).
        occupancy: mean achieved occupancy of the model's kernels, 0 to 1 (Opara).
    """

    seconds: float = 0.0
    states: int = 0
    transitions: int = 0
    units: int | None = None
    blocks: int | None = None
    largest_block: int | None = None
    splits: int | None = None
    parts: tuple[BlockSearch, ...] | None = None
    measured: int | None = None
    simulated: int | None = None
    allocation_seconds: float | None = None
    profile_seconds: float | None = None
    occupancy: float | None = None

    def to_json(self) -> dict[str, object]:
        """As data for `json.dump`; what is None is left out."""
        document = _without_none(asdict(self))
        if self.parts is not None:
            document["parts"] = [_without_none(asdict(part)) for part in self.parts]
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Search":
        """Raises TypeError where `document` is not of `to_json`."""
        parts = document.get("parts")
        searched = None if parts is None else tuple(BlockSearch(**_numbers(part)) for part in parts)
        return cls(**_numbers({key: value for key, value in document.items() if key != "parts"}), parts=searched)


@dataclass(frozen=True)
class Schedule:
    """Operators in launch order, a stream for each, and the waits between streams.

    Args:
        graph: the operators and their dependencies.
        system: the scheduler's name.
        order: operator ids as they are launched.
        streams: of operator v streams[v], numbered from 0 without gaps.
        waits: (producer, consumer) pairs; the consumer's stream waits for the producer before it runs the consumer.
        stages: groups of operators by stage, for schedulers that have stages.
        merges: groups of operators that run as one (`systems.scheduling.plans.lower`).
        search: what finding the schedule took, None where nothing was searched.
        decisions: what the rewriting passes chose before, and then the scheduler itself, equal choices as one row.
        recipe: what its system needs to make the scheduled program out of the captured one again, as data for `json.dump`.
        early: operators that are launched while the one before them in their stream ends (`plans.launch_early`).
        priorities: of operator v priorities[v], 0 to MOST of `plans.priorities`; empty where all have the same. A CUDA Graph
            goes by them; other executors do not.
    """

    graph: OperatorGraph
    system: str
    order: tuple[int, ...]
    streams: tuple[int, ...]
    waits: tuple[tuple[int, int], ...]
    stages: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    merges: tuple[tuple[int, ...], ...] | None = None
    search: Search | None = None
    decisions: tuple[DecisionRow, ...] = ()
    recipe: dict[str, object] | None = None
    early: tuple[int, ...] = ()
    priorities: tuple[int, ...] = ()

    @cached_property
    def stream_count(self) -> int:
        return len(set(self.streams))

    def happens_before(self) -> list[int]:
        """For each operator the bit mask of the operators that are finished before it starts.

        Only a stream's order and the waits count, never a data dependency. An operator that waits for one launched later
        gets no ordering from it, since an event counts only once it is recorded.
        """
        before = [0] * len(self.graph)
        waits: list[list[int]] = [[] for _ in before]
        for u, v in self.waits:
            waits[v].append(u)
        last: dict[int, int] = {}  # stream -> the operator launched last on it
        launched = 0
        for v in self.order:
            orders_v = [u for u in waits[v] if launched >> u & 1]
            if (previous := last.get(self.streams[v])) is not None:
                orders_v.append(previous)
            _, before[v] = OperatorGraph.reach(orders_v, before)
            last[self.streams[v]] = v
            launched |= 1 << v
        return before

    def summary(self) -> dict[str, object]:
        """The part of the schedule that a record keeps."""
        return {
            "system": self.system,
            "operators": len(self.graph),
            "edges": len(self.graph.edges),
            "streams": self.stream_count,
            "waits": len(self.waits),
            "width": self.graph.width,
            "search": self.search.to_json() if self.search else {},
            "decisions": [row.to_json() for row in self.decisions],
        }

    def to_json(self, *, model: str, batch: int, device: str) -> dict[str, object]:
        """The schedule file, as data for `json.dump`; its keys are a contract."""
        position = {v: i for i, v in enumerate(self.order)}
        operators = [
            {"id": o.id, "name": o.name, "target": o.target, "stream": self.streams[o.id], "position": position[o.id]}
            for o in self.graph.operators
        ]
        document: dict[str, object] = {
            "model": model,
            "system": self.system,
            "batch": batch,
            "device": device,
            "operators": operators,
            "edges": [list(e) for e in self.graph.edges],
            "waits": [list(w) for w in self.waits],
            "streams": self.stream_count,
            "width": self.graph.width,
            "search": (self.search or Search()).to_json(),
        }
        if self.stages is not None:
            document["stages"] = [[list(group) for group in stage] for stage in self.stages]
        if self.merges is not None:
            document["merges"] = [list(group) for group in self.merges]
        if self.early:
            document["early"] = list(self.early)
        if self.priorities:
            document["priorities"] = list(self.priorities)
        if self.decisions:
            document["decisions"] = [row.to_json() for row in self.decisions]
        if self.recipe is not None:
            document["recipe"] = self.recipe
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Schedule":
        """Read a schedule file back; it still has to pass `verify`.

        Raises:
            ValueError: it is no schedule file; the message begins with the field.
        """
        if not isinstance(document, dict):
            raise ValueError("not a schedule file: it is no mapping")

        absent: dict[str, Any] = {
            "stages": None,
            "merges": None,
            "search": {},
            "decisions": (),
            "recipe": None,
            "early": (),
            "priorities": (),
        }
        fields = absent | document

        def read(name: str, reader: Callable[[Any], Any]) -> Any:
            try:
                return reader(fields[name])
            except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
                raise ValueError(f"{name} is not a schedule file's: {type(error).__name__}: {error}") from error

        operators: tuple[Operator, ...] = read("operators", lambda rows: tuple(map(_operator, rows)))
        return cls(
            graph=read("edges", lambda edges: _graph(operators, edges)),
            system=read("system", str),
            order=read("operators", _order),
            streams=read("operators", lambda rows: _naturals(row["stream"] for row in rows)),
            waits=read("waits", lambda waits: tuple((u, v) for u, v in map(_naturals, waits))),
            stages=read("stages", lambda stages: None if stages is None else tuple(map(_groups, stages))),
            merges=read("merges", lambda merges: None if merges is None else _groups(merges)),
            search=read("search", Search.from_json),
            decisions=read("decisions", lambda rows: tuple(map(DecisionRow.from_json, rows))),
            recipe=fields["recipe"],
            early=read("early", _naturals),
            priorities=read("priorities", _naturals),
        )


def _operator(row: Mapping[str, Any]) -> Operator:
    return Operator(_natural(row["id"]), str(row["name"]), str(row["target"]))


def _graph(operators: Sequence[Operator], edges: Any) -> OperatorGraph:
    predecessors: list[list[int]] = [[] for _ in operators]
    for u, v in map(_naturals, edges):
        predecessors[v].append(u)
    return OperatorGraph(operators, predecessors)


def _order(rows: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Operators by their positions. Raises ValueError where two have the same."""
    operator_by_position = {_natural(row["position"]): row["id"] for row in rows}
    if len(operator_by_position) < len(rows):
        raise ValueError("two operators have one position")
    return tuple(v for _, v in sorted(operator_by_position.items()))


def _groups(groups: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(map(_naturals, groups))


def _numbers(document: dict[str, Any]) -> dict[str, Any]:
    """The document itself. Raises TypeError unless each of its values is a number."""
    if strange := [key for key, value in document.items() if type(value) not in (int, float)]:
        raise TypeError(f"{strange[0]} is {document[strange[0]]!r}, not a number")
    return document


def _naturals(numbers: Any) -> tuple[int, ...]:
    return tuple(map(_natural, numbers))


def _natural(number: object) -> int:
    """The number of an operator, a stream or a position, or a priority. Raises TypeError for anything else."""
    if type(number) is not int or number < 0:
        raise TypeError(f"{number!r} is no number of an operator, a stream or a position, and no priority")
    return number


def _without_none(document: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in document.items() if value is not None}


def sequential(graph: OperatorGraph) -> Schedule:
    """Every operator on one stream, in the order of capture."""
    n = len(graph)
    return Schedule(graph, "sequential", tuple(range(n)), (0,) * n, ())
