"""Opara's operator launcher, and the other launch orders that it is compared with. All of them are topological."""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

from systems.scheduling.graph.operator_graph import OperatorGraph

Order = Callable[[OperatorGraph, Sequence[bool], Sequence[float]], tuple[int, ...]]


def opara(graph: OperatorGraph, memory_intensive: Sequence[bool], demand: Sequence[float]) -> tuple[int, ...]:
    """The resource- and interference-aware launch order (Opara, Section 3.3, Algorithm 2).

    Operators whose producers have all been launched stand in one of two lists, by memory_intensive[v]. The lists take turns,
    the memory-intensive one first as in the paper's line 4, and one that is empty passes its turn on; the operator of least
    demand[v] is launched, of equal ones the one that came to the list first. The lists are heaps here: O(n log n).
    """
    return _alternate(graph, memory_intensive, demand, 1)


def reverse(graph: OperatorGraph, memory_intensive: Sequence[bool], demand: Sequence[float]) -> tuple[int, ...]:
    """Every choice of `opara` made the other way: compute-intensive first, the largest demand, of equals the latest."""
    return _alternate(graph, memory_intensive, demand, -1)


def depth_first(graph: OperatorGraph, _memory_intensive: Sequence[bool], _demand: Sequence[float]) -> tuple[int, ...]:
    """Depth-first topological order (the paper's figure 2, order 1): a branch is followed until it has to wait."""
    missing = _in_degrees(graph)
    ready = [v for v in reversed(range(len(graph))) if not missing[v]]
    order = []
    while ready:
        order.append(v := ready.pop())
        ready += reversed(_freed(graph, v, missing))
    return tuple(order)


def breadth_first(graph: OperatorGraph, _memory_intensive: Sequence[bool], _demand: Sequence[float]) -> tuple[int, ...]:
    """Breadth-first topological order: operators in the order in which they become ready."""
    missing = _in_degrees(graph)
    order = [v for v in range(len(graph)) if not missing[v]]
    for v in order:  # it grows meanwhile
        order += _freed(graph, v, missing)
    return tuple(order)


def critical_path(graph: OperatorGraph, _memory_intensive: Sequence[bool], milliseconds: Sequence[float]) -> tuple[int, ...]:
    """Of the operators that are ready the one first from which the longest chain to the end begins, of equals the one that
    was captured first. Not in the paper: list scheduling's oldest rule (Hu, 1961; the upward rank of HEFT, Topcuoglu et al.,
    2002), for graphs whose kernels leave room for each other, where resources hold nothing up.
    """
    rank = upward_ranks(graph, milliseconds)
    missing = _in_degrees(graph)
    ready = [(-rank[v], v) for v in range(len(graph)) if not missing[v]]
    heapify(ready)
    order = []
    while ready:
        order.append(v := heappop(ready)[1])
        for s in _freed(graph, v, missing):
            heappush(ready, (-rank[s], s))
    return tuple(order)


def upward_ranks(graph: OperatorGraph, milliseconds: Sequence[float]) -> list[float]:
    """For each operator the longest chain from its beginning to the end (HEFT, Topcuoglu et al., 2002), in milliseconds."""
    ranks = [0.0] * len(graph)
    for v in reversed(range(len(graph))):
        ranks[v] = milliseconds[v] + max((ranks[s] for s in graph.successors[v]), default=0.0)
    return ranks


ORDERS: dict[str, Order] = {
    "opara": opara,
    "depth_first": depth_first,
    "breadth_first": breadth_first,
    "reverse": reverse,
    "critical_path": critical_path,
}
PROFILED = ("opara", "reverse", "critical_path")  # the others look at nothing but the graph
TIMED = ("critical_path",)  # of these, by the operators' milliseconds and not by what they demand


def _alternate(
    graph: OperatorGraph, memory_intensive: Sequence[bool], demand: Sequence[float], sign: int
) -> tuple[int, ...]:
    """Algorithm 2, with sign 1, or with every preference reversed, with sign -1."""
    missing = _in_degrees(graph)
    memory: list[tuple[float, int, int]] = []  # heaps of (demand, arrival, operator), the first two times `sign`
    compute: list[tuple[float, int, int]] = []
    arrivals = 0

    def add(operators: Sequence[int]) -> None:
        nonlocal arrivals
        for v in operators:
            heappush(memory if memory_intensive[v] else compute, (sign * demand[v], sign * arrivals, v))
            arrivals += 1

    add([v for v in range(len(graph)) if not missing[v]])
    last = compute if sign > 0 else memory
    order = []
    while memory or compute:
        last = (compute or memory) if last is memory else (memory or compute)
        v = heappop(last)[2]
        order.append(v)
        add(_freed(graph, v, missing))
    return tuple(order)


def _in_degrees(graph: OperatorGraph) -> list[int]:
    return [len(p) for p in graph.predecessors]


def _freed(graph: OperatorGraph, v: int, missing: list[int]) -> list[int]:
    """The successors of `v` that its launch makes ready; counts it off their missing producers."""
    freed = []
    for s in graph.successors[v]:
        missing[s] -= 1
        if not missing[s]:
            freed.append(s)
    return freed
