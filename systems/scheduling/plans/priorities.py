"""Which operators a GPU gives its multiprocessors first, where several are ready."""

from collections.abc import Callable, Sequence

import torch

from systems.scheduling.graph.operator_graph import OperatorGraph

from .launch_order import upward_ranks

MOST = 5  # the highest priority; the lowest is 0. A GPU that tells fewer apart takes the nearest
CRITICAL = 0.02  # of the critical path, by which an operator of it may be late
FREE = 0.5  # of the critical path, from which on an operator that may be so late has the lowest priority

Priorities = tuple[int, ...]  # of operator v [v]: the higher comes first


def has_priorities(device: torch.device) -> bool:
    """Does an executor on this device look at them?"""
    return device.type == "cuda"


def slacks(graph: OperatorGraph, milliseconds: Sequence[float]) -> list[float]:
    """How late each operator may begin, as a share of the critical path, without making that longer.

    Args:
        milliseconds: of each operator alone.
    """
    after = upward_ranks(graph, milliseconds)  # from an operator's beginning to the end
    before = [0.0] * len(graph)  # from the beginning to an operator's
    for v in range(len(graph)):
        before[v] = max((before[u] + milliseconds[u] for u in graph.predecessors[v]), default=0.0)
    longest = max(after, default=0.0) or 1.0
    return [max(0.0, 1 - (a + b) / longest) for a, b in zip(after, before, strict=True)]


def by_slack(graph: OperatorGraph, milliseconds: Sequence[float]) -> Priorities:
    """The less an operator may be late, the higher."""
    return tuple(round(MOST * max(0.0, 1 - slack / FREE)) for slack in slacks(graph, milliseconds))


def critical_alone(graph: OperatorGraph, milliseconds: Sequence[float]) -> Priorities:
    """The critical path before all others."""
    return tuple(MOST if slack < CRITICAL else 0 for slack in slacks(graph, milliseconds))


PRIORITIES: dict[str, Callable[[OperatorGraph, Sequence[float]], Priorities]] = {
    "critical path": critical_alone,
    "by slack": by_slack,
}
