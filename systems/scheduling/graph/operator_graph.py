"""The operators of one model at one input shape, and the dependencies between them."""

from collections.abc import Iterable, Iterator, Sequence
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


@dataclass(frozen=True)
class State:
    """Something that operators change in place: a parameter, a moment of an optimizer, the random generator.

    readers, writers: bit masks of the operators that read it only, and of those that write it. The order of capture says
    which of two operators sees the other's value.
    """

    name: str
    readers: int
    writers: int

    def accesses(self) -> Iterator[tuple[int, bool]]:
        """(operator, whether it writes), in the order of capture."""
        touched = self.readers | self.writers
        while touched:
            v = (touched & -touched).bit_length() - 1
            touched ^= 1 << v
            yield v, bool(self.writers >> v & 1)


class OperatorGraph:
    """A directed acyclic graph of operators, G = (V, E) in the papers.

    `predecessors[v]` are the operators that v has to come after, each once: first the producers of its arguments, in
    argument order. `producers[v]` are these alone; in a graph without state that is all of them. Every predecessor's id is
    smaller than its successor's: the order of capture is a topological order. `state` declares what operators change in
    place; `with_state` makes the dependencies that follow from it, and `verify` proves every schedule against it.

    Sets of operators are bit masks in Python integers (bit v stands for operator v): unions of whole reachability sets
    then cost n/64 machine operations, which is what keeps a 20,000-operator graph within seconds.

    Raises ValueError where a dependency points forward or outside the graph.
    """

    def __init__(
        self,
        operators: Sequence[Operator],
        predecessors: Sequence[Iterable[int]],
        producers: Sequence[Iterable[int]] | None = None,
        state: Sequence[State] = (),
    ):
        self.operators = tuple(operators)
        self.predecessors = tuple(tuple(dict.fromkeys(p)) for p in predecessors)
        self.producers = self.predecessors if producers is None else tuple(tuple(dict.fromkeys(p)) for p in producers)
        self.state = tuple(state)
        if len(self.operators) != len(self.predecessors):
            raise ValueError(f"{len(self.operators)} operators but {len(self.predecessors)} lists of predecessors")
        for v, (operator, before) in enumerate(zip(self.operators, self.predecessors, strict=True)):
            if operator.id != v:
                raise ValueError(f"operator {operator.id} stands at place {v} of the order of capture")
            for u in before:
                if not 0 <= u < v:
                    raise ValueError(f"operator {v} ({operator.name}) depends on {u}, which is not captured before it")

    @classmethod
    def from_edges(cls, n: int, edges: Iterable[tuple[int, int]], name: str = "operator") -> "OperatorGraph":
        """A graph of `n` nameless operators, for algorithms that look at nothing but dependencies."""
        predecessors: list[list[int]] = [[] for _ in range(n)]
        for u, v in edges:
            predecessors[v].append(u)
        return cls([Operator(i, name, name) for i in range(n)], predecessors)

    @classmethod
    def with_state(
        cls, operators: Sequence[Operator], producers: Sequence[Iterable[int]], state: Sequence[State]
    ) -> "OperatorGraph":
        """A graph in which operators that touch the same state keep the order of capture, unless all of them only read it.

        What orders them is added to the data dependencies as further edges, none where a path is there already.
        """
        predecessors = [list(dict.fromkeys(p)) for p in producers]
        after: list[set[int]] = [set() for _ in operators]
        for piece in state:
            last_writer: int | None = None
            readers: list[int] = []  # since then
            for v, writes in piece.accesses():
                if last_writer is not None:
                    after[v].add(last_writer)
                if writes:
                    after[v].update(readers)
                    last_writer, readers = v, []
                else:
                    readers.append(v)
        ancestors: list[int] = []
        for v, before in enumerate(predecessors):
            reached = 0
            for u in before:
                reached |= ancestors[u] | 1 << u
            for u in sorted(after[v], reverse=True):  # nearest first: it may lie behind the others
                if not reached >> u & 1:
                    before.append(u)
                    reached |= ancestors[u] | 1 << u
            ancestors.append(reached)
        return cls(operators, predecessors, producers, state)

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
        """(predecessor, successor) pairs, by successor; those that carry data first, in argument order."""
        return tuple((u, v) for v, before in enumerate(self.predecessors) for u in before)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        out: list[list[int]] = [[] for _ in self.operators]
        for u, v in self.edges:
            out[u].append(v)
        return tuple(map(tuple, out))

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each operator those that read its output; the successors may be more."""
        out: list[list[int]] = [[] for _ in self.operators]
        for v, producers in enumerate(self.producers):
            for u in producers:
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
