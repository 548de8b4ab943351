"""Random computation graphs for property tests, and the same graphs as networkx sees them."""

from collections.abc import Iterable

import networkx as nx
from hypothesis import strategies as st

from systems.scheduling.graph.operator_graph import Operator, OperatorGraph


def from_edges(n: int, edges: Iterable[tuple[int, int]], name: str = "operator") -> OperatorGraph:
    """A graph of `n` nameless operators, for algorithms that look at nothing but dependencies."""
    predecessors: list[list[int]] = [[] for _ in range(n)]
    for u, v in edges:
        predecessors[v].append(u)
    return OperatorGraph([Operator(i, name, name) for i in range(n)], predecessors)


@st.composite
def dags(draw: st.DrawFn, max_nodes: int = 60, max_edges: int | None = None) -> OperatorGraph:
    """A DAG with 1 to `max_nodes` operators; dense or sparse, local or not."""
    n = draw(st.integers(1, max_nodes))
    pair = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).map(lambda p: (min(p), max(p)))
    edges = draw(st.lists(pair, max_size=max_edges if max_edges is not None else 4 * n, unique=True))
    return from_edges(n, sorted((u, v) for u, v in edges if u != v))


def as_networkx(graph: OperatorGraph) -> nx.DiGraph:
    out = nx.DiGraph()
    out.add_nodes_from(range(len(graph)))
    out.add_edges_from(graph.edges)
    return out


def matching_size(graph: nx.DiGraph) -> int:
    """The size of a maximum matching between operators as producers and operators as consumers."""
    bipartite = nx.Graph()
    tops = [("x", u) for u in graph]
    bipartite.add_nodes_from(tops)
    bipartite.add_nodes_from(("y", v) for v in graph)
    bipartite.add_edges_from((("x", u), ("y", v)) for u, v in graph.edges)
    return len(nx.bipartite.hopcroft_karp_matching(bipartite, tops)) // 2


def members(mask: int) -> frozenset[int]:
    """The operators whose bits are set."""
    return frozenset(v for v in range(mask.bit_length()) if mask >> v & 1)
