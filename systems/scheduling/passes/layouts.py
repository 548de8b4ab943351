"""Assigns layouts to operators with the least total time, conversions included."""

from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

UNITS = 1e5  # of flow in a millisecond, at most: 10 ns each
MOST_FLOW = 2**30  # of all times; a flow has 32 bits


class Unsolvable(ValueError):
    """No assignment of layouts can be found for these times."""


def cheapest_layouts(
    costs: Sequence[tuple[float, float]], reads: Sequence[Sequence[int]], conversions: Sequence[tuple[float, float]]
) -> list[int]:
    """The layout of each operator, 0 (contiguous) or 1 (channels_last), with the least sum of all times.

    Invariant: every finite cut of this network is an assignment of layouts, and its capacity is that assignment's time. With
    two layouts, and costs that only arise where they differ, the minimum cut is exact.
        - Operators on the source's side are channels_last. The contiguous time lies on the edge from the source, the
          channels_last time on the edge to the sink.
        - Two more nodes an output stand for its copies. One is on the source's side if a reader is, the other on the sink's
          side if a reader is. Where the output itself lies on the other side, the cut holds its conversion.

    Args:
        costs: milliseconds of each operator in either layout, infinite where it cannot run in it.
        reads: for each operator those whose output it reads, in its own layout.
        conversions: milliseconds of converting each output to contiguous and to channels_last; it is converted once for all
            readers that need it.

    Raises:
        Unsolvable: an operator can run in neither layout.
    """
    n = len(costs)
    if any(min(c) == np.inf for c in costs):
        raise Unsolvable("an operator can run in neither layout")
    source, sink = 3 * n, 3 * n + 1
    finite = [c for pair in (*costs, *conversions) for c in pair if c < np.inf]
    total = sum(finite)
    unit = min(UNITS, MOST_FLOW / total) if total else UNITS
    never = int(total * unit) + 1
    edges: dict[tuple[int, int], int] = {}

    def edge(a: int, b: int, cost: float) -> None:
        units = never if cost == np.inf else round(cost * unit)
        edges[a, b] = min(never, edges.get((a, b), 0) + units)

    for v, (contiguous, channels_last) in enumerate(costs):
        edge(source, v, contiguous)
        edge(v, sink, channels_last)
    for u in {u for producers in reads for u in producers}:
        to_contiguous, to_channels_last = conversions[u]
        edge(n + u, u, to_channels_last)
        edge(u, 2 * n + u, to_contiguous)
    for v, producers in enumerate(reads):
        for u in producers:
            edge(v, n + u, np.inf)
            edge(2 * n + u, v, np.inf)
    rows, columns = np.array(list(edges), dtype=np.int32).reshape(-1, 2).T
    network = csr_matrix((np.array(list(edges.values()), dtype=np.int32), (rows, columns)), shape=(3 * n + 2, 3 * n + 2))
    residual = network - maximum_flow(network, source, sink, method="dinic").flow
    residual.data[residual.data <= 0] = 0
    residual.eliminate_zeros()
    reached = set(breadth_first_order(residual, source, return_predecessors=False).tolist())
    return [int(v in reached) for v in range(n)]
