"""List scheduling: each ready operator, the most urgent first, onto the stream that lets it begin first."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from systems.scheduling.graph.operator_graph import OperatorGraph

from .launch_order import upward_ranks
from .schedule import Schedule
from .stream_allocator import waits_between


def list_schedule(graph: OperatorGraph, milliseconds: Sequence[float], num_streams: int) -> Schedule:
    """Graham's list scheduling (1966) by upward ranks, as if `num_streams` operators ran at once and none slowed another.

    A stream may order operators that do not depend on each other: fewer streams need fewer waits, and keep operators that
    would only get in each other's way apart. Of streams that are free equally early, one whose last operator this one reads
    needs no wait for it.

    Args:
        milliseconds: of each operator alone.
        num_streams: at most.
    """
    ranks = upward_ranks(graph, milliseconds)
    missing = [len(p) for p in graph.predecessors]
    ready = [(-ranks[v], v) for v in range(len(graph)) if not missing[v]]
    heapify(ready)
    ends, streams, order = [0.0] * len(graph), [0] * len(graph), list[int]()
    free_at = [0.0] * num_streams
    last: list[int | None] = [None] * num_streams
    while ready:
        v = heappop(ready)[1]
        inputs_at = max((ends[u] for u in graph.predecessors[v]), default=0.0)

        def preference(s: int, v: int = v, inputs_at: float = inputs_at) -> tuple[float, bool, float]:
            return max(free_at[s], inputs_at), last[s] not in graph.predecessors[v], -free_at[s]

        stream = min(range(num_streams), key=preference)
        ends[v] = free_at[stream] = max(free_at[stream], inputs_at) + milliseconds[v]
        streams[v], last[stream] = stream, v
        order.append(v)
        for s in graph.successors[v]:
            missing[s] -= 1
            if not missing[s]:
                heappush(ready, (-ranks[s], s))
    number = {s: i for i, s in enumerate(sorted(set(streams)))}  # without gaps
    numbered = tuple(number[s] for s in streams)
    return Schedule(graph, "list", tuple(order), numbered, waits_between(graph, order, numbered))
