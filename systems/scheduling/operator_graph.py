"""The operators of one model at one input shape, and the data dependencies between them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow


@dataclass(frozen=True)
class Operator:
    """One operator as captured: `id` is its place in the order of capture, which is topological."""

    id: int
    name: str  # conv2d
    target: str  # aten.conv2d.default


class OperatorGraph:
    """A directed acyclic graph of operators, G = (V, E) in the papers.

    `predecessors[v]` are the producers of operator v's arguments, in argument order, each once. Every producer's id is
    smaller than its consumer's: the order of capture is a topological order.

    Sets of operators are bit masks in Python integers (bit v stands for operator v): unions of whole reachability sets
    then cost n/64 machine operations, which is what keeps a 20,000-operator graph within seconds.

    Raises ValueError where a dependency points forward or outside the graph.
    """

    def __init__(self, operators: Sequence[Operator], predecessors: Sequence[Iterable[int]]):
        self.operators = tuple(operators)
        self.predecessors = tuple(tuple(dict.fromkeys(p)) for p in predecessors)
        if len(self.operators) != len(self.predecessors):
            raise ValueError(f"{len(self.operators)} operators but {len(self.predecessors)} lists of predecessors")
        for v, (operator, producers) in enumerate(zip(self.operators, self.predecessors, strict=True)):
            if operator.id != v:
                raise ValueError(f"operator {operator.id} stands at place {v} of the order of capture")
            for u in producers:
                if not 0 <= u < v:
                    raise ValueError(f"operator {v} ({operator.name}) depends on {u}, which is not captured before it")

    @classmethod
    def from_edges(cls, n: int, edges: Iterable[tuple[int, int]], name: str = "operator") -> "OperatorGraph":
        """A graph of `n` nameless operators, for algorithms that look at nothing but dependencies."""
        predecessors: list[list[int]] = [[] for _ in range(n)]
        for u, v in edges:
            predecessors[v].append(u)
        return cls([Operator(i, name, name) for i in range(n)], predecessors)

    def __len__(self) -> int:
        return len(self.operators)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OperatorGraph):
            return NotImplemented
        return self.operators == other.operators and self.predecessors == other.predecessors

    __hash__ = None  # type: ignore[assignment]

    def label(self, v: int) -> str:
        """How a message names operator `v`."""
        return f"{v} ({self.operators[v].name})"

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """(producer, consumer) pairs, by consumer, in argument order."""
        return tuple((u, v) for v, producers in enumerate(self.predecessors) for u in producers)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        out: list[list[int]] = [[] for _ in self.operators]
        for u, v in self.edges:
            out[u].append(v)
        return tuple(map(tuple, out))

    @cached_property
    def minimum_equivalent(self) -> "OperatorGraph":
        """The minimum equivalent graph G' = (V, E'): the fewest edges with the same reachability.

        Nimble, Section 4.2, Algorithm 1, Step 1. Unique for a DAG: an edge (u, v) stays exactly when no other
        predecessor of v can be reached from u.
        """
        ancestors: list[int] = []
        kept: list[tuple[int, ...]] = []
        for producers in self.predecessors:
            reached = 0
            keep = []
            for u in sorted(producers, reverse=True):  # nearest first: what they reach cannot be reached back
                if not reached >> u & 1:
                    keep.append(u)
                    reached |= ancestors[u] | 1 << u
            ancestors.append(reached)
            kept.append(tuple(u for u in producers if u in set(keep)))
        return OperatorGraph(self.operators, kept)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For each operator the bit mask of the operators it depends on, directly or through others."""
        out: list[int] = []
        for producers in self.predecessors:
            reached = 0
            for u in producers:
                reached |= out[u] | 1 << u
            out.append(reached)
        return tuple(out)

    @cached_property
    def width(self) -> int:
        """The largest number of operators of which none depends on another: the degree of logical concurrency.

        By Dilworth's theorem the size of a minimum cover by chains. A chain of the transitive closure is a path of the
        minimum equivalent graph that may share operators with other paths, so a maximum flow in which a path may pass
        through an operator already covered gives it without building the closure.
        """
        n = len(self)
        if n == 0:
            return 0
        edges = np.array(self.minimum_equivalent.edges, dtype=np.int32).reshape(-1, 2)
        node = np.arange(n, dtype=np.int32)
        source, sink = 2 * n, 2 * n + 1
        # 0..n-1: an operator as the upper end of a link of a chain; n..2n-1: as the lower end.
        rows = np.concatenate([np.full(n, source, np.int32), edges[:, 0], node + n, node + n])
        columns = np.concatenate([node, edges[:, 1] + n, np.full(n, sink, np.int32), node])
        capacity = np.concatenate([np.ones(n), np.full(len(edges), n), np.ones(n), np.full(n, n)]).astype(np.int32)
        network = csr_matrix((capacity, (rows, columns)), shape=(2 * n + 2, 2 * n + 2))
        return n - int(maximum_flow(network, source, sink, method="dinic").flow_value)
