"""Nimble's stream assignment: maximum logical concurrency with the fewest synchronisations."""

from time import perf_counter

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from systems.scheduling.graph.operator_graph import OperatorGraph

from .schedule import Schedule, Search, sequential


def assign_streams(graph: OperatorGraph) -> Schedule:
    """Map operators to streams so that no two independent operators share one (Nimble, Section 4.2, Algorithm 1).

    Step 1 takes the minimum equivalent graph G' = (V, E'); Steps 2 and 3 a maximum matching M of the bipartite graph with
    an edge (x_u, y_v) for every (u, v) in E'; Steps 4 and 5 join the operators of matched edges into streams. A matching
    uses each x and each y at most once, so what is joined are chains of dependent operators. The waits stand on the edges
    of E' that were not matched: |E'| - |M| of them, the fewest that any such assignment can do with (Theorem 3).
    """
    start = perf_counter()
    n = len(graph)
    edges = graph.minimum_equivalent.edges
    matched = _maximum_matching(n, edges)
    streams = [-1] * n
    count = 0
    for v in range(n):  # topological, so that the upper end of a matched edge has its stream already
        upper = matched[v]
        if upper >= 0:
            streams[v] = streams[upper]
        else:
            streams[v] = count
            count += 1
    waits = tuple((u, v) for u, v in edges if matched[v] != u)
    return Schedule(graph, "nimble", tuple(range(n)), tuple(streams), waits, search=Search(perf_counter() - start))


def single_stream(graph: OperatorGraph) -> Schedule:
    """The ablation of Nimble's Table 1: ahead-of-time scheduling alone, every operator on one stream."""
    schedule = sequential(graph)
    return Schedule(graph, "nimble", schedule.order, schedule.streams, schedule.waits)


def _maximum_matching(n: int, edges: tuple[tuple[int, int], ...]) -> list[int]:
    """For each operator the predecessor it is matched with, or -1 (Hopcroft and Karp's algorithm, from scipy)."""
    if not edges:
        return [-1] * n
    pairs = np.array(edges, dtype=np.int32)
    biadjacency = csr_matrix((np.ones(len(pairs), dtype=np.int8), (pairs[:, 1], pairs[:, 0])), shape=(n, n))
    return maximum_bipartite_matching(biadjacency, perm_type="column").tolist()
