"""The edges between the kernels of a schedule, as capturing it into a CUDA Graph leaves them."""

from itertools import chain

from systems.scheduling.plans.schedule import Schedule

from .kernels import Kernels


def predecessors(schedule: Schedule, kernels: Kernels) -> list[tuple[int, ...]]:
    """For each node those that it comes after; nothing else of the launch order is left in a captured graph.

    Invariant: `last[s]` are the nodes that what comes next on stream s depends on, and `after[v]` those that a wait for
    operator v is a wait for. An operator without a kernel hands on what it would have waited for. A wait for what is
    launched later is none.
    """
    first = kernels.first
    waits: list[list[int]] = [[] for _ in schedule.order]
    for u, v in schedule.waits:
        waits[v].append(u)
    before: list[tuple[int, ...]] = [()] * len(kernels.nodes)
    last: dict[int, tuple[int, ...]] = {}
    after: list[tuple[int, ...]] = [()] * len(schedule.order)
    for v in schedule.order:
        stream = schedule.streams[v]
        needed = last.get(stream, ())
        if waits[v]:
            needed = tuple(dict.fromkeys(chain(needed, *[after[u] for u in waits[v]])))
        for node in range(first[v], first[v + 1]):
            before[node] = needed
            needed = (node,)
        last[stream] = after[v] = needed
    return before
