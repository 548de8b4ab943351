"""Nimble's stream assignment: maximum logical concurrency with the fewest synchronisations."""

from collections.abc import Sequence
from time import perf_counter

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from systems.scheduling.graph.operator_graph import OperatorGraph

from .schedule import Schedule, Search, sequential


def assign_streams(graph: OperatorGraph, reuse_streams: bool = False) -> Schedule:
    """Map operators to streams so that no two independent operators share one (Nimble, Section 4.2, Algorithm 1).

    Step 1 takes the minimum equivalent graph G' = (V, E'); Steps 2 and 3 a maximum matching M of the bipartite graph with
    an edge (x_u, y_v) for every (u, v) in E'; Steps 4 and 5 join the operators of matched edges into streams. A matching
    uses each x and each y at most once, so what is joined are chains of dependent operators. The waits stand on the edges
    of E' that were not matched: |E'| - |M| of them, the fewest that any such assignment can do with (Theorem 3).

    Args:
        graph: with operators in topological order.
        reuse_streams: a stream takes further chains, as in the released code (not in the paper).
    """
    start = perf_counter()
    edges = graph.minimum_equivalent.edges
    matched = _maximum_matching(len(graph), edges)
    streams = _joined(matched)
    if reuse_streams:
        stream_by_chain = _joined(_maximum_matching(max(streams, default=-1) + 1, _chain_order(graph, streams)))
        streams = [stream_by_chain[chain] for chain in streams]
    waits = tuple((u, v) for u, v in edges if matched[v] != u)
    order = tuple(range(len(graph)))
    return Schedule(graph, "nimble", order, tuple(streams), waits, search=Search(perf_counter() - start))


def assign_forward_streams(graph: OperatorGraph, num_forward: int, reuse_streams: bool = False) -> Schedule:
    """Forward on the streams of `assign_streams`, then the rest of a step of training on one, as in Nimble's released code.

    Invariant: the rest begins when all of forward has ended, as a graph that is launched after another one does.

    Args:
        graph: of a step of training.
        num_forward: its operators up to the loss, the first ones in the order of capture.
        reuse_streams: as of `assign_streams`.
    """
    forward = assign_streams(OperatorGraph(graph.operators[:num_forward], graph.predecessors[:num_forward]), reuse_streams)
    n = len(graph)
    last = {stream: v for v, stream in enumerate(forward.streams)}
    ends = tuple((v, num_forward) for stream, v in last.items() if stream != 0 and num_forward < n)
    streams = forward.streams + (0,) * (n - num_forward)
    return Schedule(graph, "nimble", tuple(range(n)), streams, forward.waits + ends, search=forward.search)


def single_stream(graph: OperatorGraph) -> Schedule:
    """The ablation of Nimble's Table 1: ahead-of-time scheduling alone, every operator on one stream."""
    schedule = sequential(graph)
    return Schedule(graph, "nimble", schedule.order, schedule.streams, schedule.waits)


def _chain_order(graph: OperatorGraph, chains: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The pairs of chains (a, b) in which the first operator of b depends on the last one of a.

    Invariant: a stream that runs b after a orders no operators that no dependency orders, so concurrency is the same. Nor is
    a wait less needed: an edge of E' from the end of one chain to the beginning of another would have been matched.

    Args:
        graph: of the operators.
        chains: the chain of each operator, numbered by first operators.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for v, chain in enumerate(chains):
        first.setdefault(chain, v)
        last[chain] = v
    return tuple((a, b) for b, v in first.items() for a, u in last.items() if graph.ancestors[v] >> u & 1)


def _joined(matched: Sequence[int]) -> list[int]:
    """For each node, the number of the chain that the matched pairs join it to.

    Args:
        matched: for each node the one that comes directly before it in its chain, a smaller number, or -1.
    """
    chains: list[int] = []
    count = 0
    for upper in matched:
        if upper >= 0:
            chains.append(chains[upper])
        else:
            chains.append(count)
            count += 1
    return chains


def _maximum_matching(n: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """For each of n nodes the predecessor it is matched with, or -1 (Hopcroft and Karp's algorithm, from scipy)."""
    if not edges:
        return [-1] * n
    pairs = np.array(edges, dtype=np.int32)
    biadjacency = csr_matrix((np.ones(len(pairs), dtype=np.int8), (pairs[:, 1], pairs[:, 0])), shape=(n, n))
    return maximum_bipartite_matching(biadjacency, perm_type="column").tolist()
