"""The one representation of a schedule: every scheduler emits it, every executor accepts it."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from systems.scheduling.graph.operator_graph import Operator, OperatorGraph


@dataclass(frozen=True)
class Schedule:
    """Operators in launch order, a stream for each, and the waits between streams.

    order: operator ids as they are launched. streams[v]: the stream of operator v, numbered from 0 without gaps.
    waits: (producer, consumer) pairs; the consumer's stream waits for the producer before it runs the consumer. stages:
    groups of operators by stage, for schedulers that have them. merges: groups of operators run as one. search: what
    finding the schedule took (seconds, states, transitions). rewriting: what passes made of the captured model before it
    was scheduled, by pass.
    """

    graph: OperatorGraph
    system: str
    order: tuple[int, ...]
    streams: tuple[int, ...]
    waits: tuple[tuple[int, int], ...]
    stages: tuple[tuple[tuple[int, ...], ...], ...] | None = None
    merges: tuple[tuple[int, ...], ...] | None = None
    search: dict[str, Any] = field(default_factory=dict)
    rewriting: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def stream_count(self) -> int:
        return len(set(self.streams))

    def happens_before(self) -> list[int]:
        """For each operator the bit mask of the operators that are finished before it starts.

        What a stream's order and the waits give, and nothing else: no data dependency is looked at. An operator that
        waits for one launched later gets no ordering from it, since an event counts only once it is recorded.
        """
        before = [0] * len(self.graph)
        waits: list[list[int]] = [[] for _ in before]
        for u, v in self.waits:
            waits[v].append(u)
        last: dict[int, int] = {}  # stream -> the operator launched last on it
        launched = 0
        for v in self.order:
            reached = 0
            for u in waits[v]:
                if launched >> u & 1:
                    reached |= before[u] | 1 << u
            if (previous := last.get(self.streams[v])) is not None:
                reached |= before[previous] | 1 << previous
            before[v] = reached
            last[self.streams[v]] = v
            launched |= 1 << v
        return before

    def summary(self) -> dict[str, Any]:
        """What a record keeps of the schedule."""
        return {
            "system": self.system,
            "operators": len(self.graph),
            "edges": len(self.graph.edges),
            "streams": self.stream_count,
            "waits": len(self.waits),
            "width": self.graph.width,
            "search": dict(self.search),
            "rewriting": dict(self.rewriting),
        }

    def to_json(self, *, model: str, batch: int, device: str) -> dict[str, Any]:
        """The schedule file, as data for `json.dump`; its keys are a contract."""
        position = {v: i for i, v in enumerate(self.order)}
        operators = [
            {"id": o.id, "name": o.name, "target": o.target, "stream": self.streams[o.id], "position": position[o.id]}
            for o in self.graph.operators
        ]
        document: dict[str, Any] = {
            "model": model,
            "system": self.system,
            "batch": batch,
            "device": device,
            "operators": operators,
            "edges": [list(e) for e in self.graph.edges],
            "waits": [list(w) for w in self.waits],
            "streams": self.stream_count,
            "width": self.graph.width,
            "search": {"seconds": 0.0, "states": 0, "transitions": 0} | self.search,
        }
        if self.stages is not None:
            document["stages"] = [[list(group) for group in stage] for stage in self.stages]
        if self.merges is not None:
            document["merges"] = [list(group) for group in self.merges]
        if self.rewriting:
            document["rewriting"] = dict(self.rewriting)
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Schedule":
        """Read a schedule file back. Raises ValueError where it is not one; it still has to pass `verify`."""
        try:
            operators = [Operator(o["id"], o["name"], o["target"]) for o in document["operators"]]
            predecessors: list[list[int]] = [[] for _ in operators]
            for u, v in document["edges"]:
                predecessors[v].append(u)
            stages, merges = document.get("stages"), document.get("merges")
            return cls(
                graph=OperatorGraph(operators, predecessors),
                system=document["system"],
                order=tuple(o["id"] for o in sorted(document["operators"], key=lambda o: o["position"])),
                streams=tuple(o["stream"] for o in document["operators"]),
                waits=tuple((u, v) for u, v in document["waits"]),
                stages=None if stages is None else tuple(tuple(tuple(g) for g in stage) for stage in stages),
                merges=None if merges is None else tuple(tuple(g) for g in merges),
                search=dict(document.get("search", {})),
                rewriting=dict(document.get("rewriting", {})),
            )
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"not a schedule file: {type(error).__name__}: {error}") from error


def sequential(graph: OperatorGraph) -> Schedule:
    """Every operator on one stream, in the order of capture."""
    n = len(graph)
    return Schedule(graph, "sequential", tuple(range(n)), (0,) * n, ())
