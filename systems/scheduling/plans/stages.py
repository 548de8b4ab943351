"""Stages of concurrent groups of operators (IOS, Section 3), and the schedule that executes them."""

from collections.abc import Sequence
from dataclasses import dataclass

from systems.scheduling.graph.operator_graph import OperatorGraph

from .schedule import Schedule, Search
from .stream_allocator import waits_between


@dataclass(frozen=True)
class Stage:
    """One stage.

    Args:
        groups: of operators; the groups run at once, the operators of a group one after the other.
        is_merged: its operators run as one instead, and there is one group (IOS, Section 3).
    """

    groups: tuple[tuple[int, ...], ...]
    is_merged: bool = False

    @property
    def operators(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(sorted(v for group in self.groups for v in group))


def greedy(graph: OperatorGraph) -> list[tuple[int, ...]]:
    """Every operator in the earliest stage it can be in (IOS, Section 6.1): the operators of each stage, a group each."""
    depth: list[int] = []
    for predecessors in graph.predecessors:
        depth.append(1 + max((depth[u] for u in predecessors), default=-1))
    return [tuple(v for v, d in enumerate(depth) if d == level) for level in range(max(depth, default=-1) + 1)]


def to_schedule(
    graph: OperatorGraph, system: str, stages: Sequence[Stage], search: Search, barriers: bool = True
) -> Schedule:
    """The schedule that executes stages one after the other.

    Args:
        graph: of the operators that the stages hold.
        system: the scheduler's name.
        stages: all operators, each once, every one after those that it depends on.
        search: how the stages were found.
        barriers: every group waits for all groups of the stage before. Without them, which is not in the paper, every
            operator waits for its own dependencies alone, and the stages only give the launch order.

    Returns:
        A schedule whose `stages` and `merges` number operators as `graph` does; `lower` carries the merges out.
    """
    order = tuple(v for stage in stages for group in stage.groups for v in group)
    streams, waits = _between_barriers(graph, stages) if barriers else _by_dependencies(graph, stages)
    merges = tuple(stage.groups[0] for stage in stages if stage.is_merged)
    grouped = tuple(stage.groups for stage in stages)
    return Schedule(graph, system, order, tuple(streams), tuple(waits), grouped, merges, search)


def _between_barriers(graph: OperatorGraph, stages: Sequence[Stage]) -> tuple[list[int], Sequence[tuple[int, int]]]:
    """The stream of each operator, and the waits.

    Invariant: when a group begins, all groups of the stage before have ended. The first operator of a group waits for the
    last operator of each of them, but for the group on its own stream.
    """
    streams = [0] * len(graph)
    waits: list[tuple[int, int]] = []
    previous: Sequence[tuple[int, ...]] = ()
    for stage in stages:
        for stream, group in enumerate(stage.groups):
            for v in group:
                streams[v] = stream
            waits += [(other[-1], group[0]) for s, other in enumerate(previous) if s != stream]
        previous = stage.groups
    return streams, waits


def _by_dependencies(graph: OperatorGraph, stages: Sequence[Stage]) -> tuple[list[int], Sequence[tuple[int, int]]]:
    """The stream of each operator, and the waits, where no stage waits for another.

    Invariants: no stream orders two independent groups, and every dependency is ordered by a stream or a wait. A group
    takes over a stream whose last operator its first operator depends on, directly if it can, and else gets a new stream.
    """
    streams = [0] * len(graph)
    order = [v for stage in stages for group in stage.groups for v in group]
    place = {v: i for i, v in enumerate(order)}
    last: list[int] = []  # of each stream, the operator launched last on it
    for stage in stages:
        free = set(range(len(last)))
        for group in stage.groups:
            first = group[0]
            continued = [s for s in free if graph.ancestors[first] >> last[s] & 1]
            if continued:
                stream = max(continued, key=lambda s: (last[s] in graph.predecessors[first], place[last[s]], s))
                free.remove(stream)
            else:
                stream = len(last)
                last.append(-1)
            for v in group:
                streams[v], last[stream] = stream, v
    return streams, waits_between(graph, order, streams)
