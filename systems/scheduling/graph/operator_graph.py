"""The operators of one model at one input shape, and the dependencies between them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow


@dataclass(frozen=True)
class Operator:
    """One operator as captured.

    Args:
        id: Its place in the order of capture, which is topological.
        name: conv2d.
        target: aten.conv2d.default.
    """

    id: int
    name: str
    target: str


@dataclass(frozen=True)
class State:
    """Something that operators change in place: a parameter, a moment of an optimizer, the random generator.

    The order of capture says which of two operators sees the other's value.

    Args:
        readers: Bit mask of the operators that only read it.
        writers: Bit mask of the operators that write it.
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

    Invariant: every predecessor's id is smaller than its successor's, so the order of capture is a topological order.

    Sets of operators are bit masks in Python integers: bit v stands for operator v. A union of reachability sets then costs
    n/64 machine operations, which keeps a graph of 20,000 operators within seconds.

    Args:
        operators: In the order of capture.
        predecessors: For each operator v, the operators that v has to come after: first the producers of its arguments, in
            argument order.
        producers: These producers alone; all predecessors, in a graph without state.
        state: Declares what operators change in place. `with_state` makes the dependencies that follow from it, and `verify`
            proves every schedule against it.

    Raises:
        ValueError: A dependency points forward or outside the graph.
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
    def with_state(
        cls, operators: Sequence[Operator], producers: Sequence[Iterable[int]], state: Sequence[State]
    ) -> "OperatorGraph":
        """A graph in which operators that touch the same state keep the order of capture, unless all of them only read it.

        Three hazards order two operators: read after write (RAW), write after read (WAR) and write after write (WAW). Each
        becomes an edge beside the data dependencies, unless a path is there already.

        Invariants: in the first loop, `readers` are the operators that have read a state since its last writer. In the
        second, `ancestors[u]` is the reachability of every u < v along the edges of both kinds.
        """
        predecessors = [list(dict.fromkeys(p)) for p in producers]
        hazards: list[set[int]] = [set() for _ in operators]
        for piece in state:
            last_writer: int | None = None
            readers: list[int] = []
            for v, writes in piece.accesses():
                if last_writer is not None:
                    hazards[v].add(last_writer)  # RAW, or WAW
                if writes:
                    hazards[v].update(readers)  # WAR
                    last_writer, readers = v, []
                else:
                    readers.append(v)
        ancestors: list[int] = []
        for v, before in enumerate(predecessors):
            _, reached = cls.reach(before, ancestors)
            # Nearest first: a farther operator may be an ancestor of a nearer one, and never the other way round.
            needed, reached = cls.reach(sorted(hazards[v], reverse=True), ancestors, reached)
            before += needed
            ancestors.append(reached)
        return cls(operators, predecessors, producers, state)

    @staticmethod
    def reach(
        operators: Iterable[int], reached_by: Sequence[int] | Mapping[int, int], reached: int = 0
    ) -> tuple[list[int], int]:
        """The step that all reachability comes down to: what one operator reaches through others.

        Args:
            operators: the others, in the order in which they are considered.
            reached_by: for each of them the bit mask of what it reaches itself.
            reached: bit mask of what is reached already.

        Returns:
            Those that were not reached when their turn came, and the bit mask of all that is reached then.
        """
        needed = []
        for u in operators:
            if not reached >> u & 1:
                needed.append(u)
                reached |= reached_by[u] | 1 << u
        return needed, reached

    def __len__(self) -> int:
        return len(self.operators)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OperatorGraph):
            return NotImplemented
        return self.operators == other.operators and self.predecessors == other.predecessors

    __hash__ = None  # type: ignore[assignment]

    def label(self, v: int) -> str:
        """The name of operator `v` in a message."""
        return f"{v} ({self.operators[v].name})"

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """(predecessor, successor) pairs by successor; edges that carry data come first, in argument order."""
        return tuple((u, v) for v, before in enumerate(self.predecessors) for u in before)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        out: list[list[int]] = [[] for _ in self.operators]
        for u, v in self.edges:
            out[u].append(v)
        return tuple(map(tuple, out))

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each operator, the operators that read its output; its successors may be more."""
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
        edges: list[list[int]] = []
        for before in self.predecessors:
            # Nearest first: no operator is reached from one that comes before it.
            needed, _ = self.reach(sorted(before, reverse=True), self.ancestors)
            edges.append([u for u in before if u in set(needed)])
        return OperatorGraph(self.operators, edges)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For each operator the bit mask of the operators it depends on, directly or through others."""
        ancestors: list[int] = []
        for before in self.predecessors:
            ancestors.append(self.reach(before, ancestors)[1])
        return tuple(ancestors)

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        """For each operator the bit mask of the operators that depend on it, directly or through others."""
        descendants = [0] * len(self)
        for v in reversed(range(len(self))):
            descendants[v] = self.reach(self.successors[v], descendants)[1]
        return tuple(descendants)

    @cached_property
    def width(self) -> int:
        """The largest number of operators of which none depends on another: the degree of logical concurrency.

        By Dilworth's theorem it is the size of a minimum cover by chains. A chain of the transitive closure is a path of the
        minimum equivalent graph that may share operators with other paths. So no closure is built: the maximum flow lets a
        path pass through an operator that another path covers.

        Invariant: a unit of flow links an operator, as the upper end of a link, to the next operator of its chain. n
        operators in k chains have n - k links, so the width is n minus the maximum flow.
        """
        n = len(self)
        if n == 0:
            return 0
        edges = np.array(self.minimum_equivalent.edges, dtype=np.int32).reshape(-1, 2)
        node = np.arange(n, dtype=np.int32)
        source, sink = 2 * n, 2 * n + 1
        # Nodes 0..n-1 are operators as the upper end of a link, nodes n..2n-1 as the lower end. The edges, in this order:
        # source to upper ends, upper to lower ends along the graph, lower ends to sink, lower back to upper ends (pass on).
        rows = np.concatenate([np.full(n, source, np.int32), edges[:, 0], node + n, node + n])
        columns = np.concatenate([node, edges[:, 1] + n, np.full(n, sink, np.int32), node])
        capacity = np.concatenate([np.ones(n), np.full(len(edges), n), np.ones(n), np.full(n, n)]).astype(np.int32)
        network = csr_matrix((capacity, (rows, columns)), shape=(2 * n + 2, 2 * n + 2))
        return n - int(maximum_flow(network, source, sink, method="dinic").flow_value)
