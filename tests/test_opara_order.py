"""Opara's stream allocator and launch orders."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import networkx as nx
import pytest
from dags import as_networkx, dags, from_edges
from hypothesis import given
from hypothesis import strategies as st

from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans import launch_order
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stream_allocator import allocate_streams, needed_waits
from systems.scheduling.plans.verify import InvalidSchedule, verify

# The stream allocator


@st.composite
def arguments_in_any_order(draw: st.DrawFn) -> OperatorGraph:
    """A DAG whose operators name their producers in no order of capture."""
    graph = draw(dags())
    return OperatorGraph(graph.operators, [draw(st.permutations(p)) for p in graph.predecessors])


@given(arguments_in_any_order())
def test_streams_are_those_of_algorithm_1(graph: OperatorGraph) -> None:
    """By its definition: an operator is joined to the first producer whose smallest consumer it is; streams are what is
    joined, numbered as they begin.
    """
    consumers = {u: sorted(v for a, v in graph.edges if a == u) for u in range(len(graph))}
    joined = nx.Graph()
    joined.add_nodes_from(range(len(graph)))
    for v in range(len(graph)):
        for p in graph.predecessors[v]:
            if consumers[p][0] == v:
                joined.add_edge(p, v)
                break
    expected = sorted(map(sorted, nx.connected_components(joined)))
    streams = allocate_streams(graph)
    assert [[v for v in range(len(graph)) if streams[v] == s] for s in range(max(streams) + 1)] == expected


@given(dags())
def test_a_stream_is_a_chain_and_only_dependent_operators_are_ordered(graph: OperatorGraph) -> None:
    streams = allocate_streams(graph)
    for s in set(streams):
        assert all((u, v) in graph.edges for u, v in pairwise(v for v in range(len(graph)) if streams[v] == s))
    schedule = Schedule(graph, "opara", tuple(range(len(graph))), streams, needed_waits(graph, streams))
    closure = nx.transitive_closure_dag(as_networkx(graph))
    before = schedule.happens_before()
    assert {(u, v) for v, mask in enumerate(before) for u in range(len(graph)) if mask >> u & 1} == set(closure.edges)


@given(dags(max_nodes=25))
def test_every_wait_is_needed(graph: OperatorGraph) -> None:
    streams = allocate_streams(graph)
    schedule = Schedule(graph, "opara", tuple(range(len(graph))), streams, needed_waits(graph, streams))
    verify(graph, schedule)
    for wait in schedule.waits:
        with pytest.raises(InvalidSchedule):
            verify(graph, replace(schedule, waits=tuple(w for w in schedule.waits if w != wait)))


def test_the_first_successor_alone_goes_on_with_a_stream() -> None:
    """3 is the first successor of 0 and of 1 and goes on with 0's stream, the first in argument order; so 4, a later
    successor of 1, gets a stream of its own although nothing went on with 1's.
    """
    graph = from_edges(5, [(0, 3), (1, 3), (1, 4), (2, 4)])
    assert allocate_streams(graph) == (0, 1, 2, 0, 2)
    graph = from_edges(4, [(0, 2), (1, 2), (1, 3)])
    assert allocate_streams(graph) == (0, 1, 0, 2) and needed_waits(graph, (0, 1, 0, 2)) == ((1, 2), (1, 3))


def test_allocation_looks_at_each_dependency_once() -> None:
    """So it is O(n) where the number of arguments is bounded: it searches no list, and asks for first successors alone."""
    looks = Counter[str]()

    class Seen(tuple[int, ...]):
        def __iter__(self) -> Iterator[int]:
            for v in super().__iter__():
                looks["predecessors"] += 1
                yield v

        def __getitem__(self, place: Any) -> Any:
            assert place == 0
            looks["first successors"] += 1
            return super().__getitem__(place)

        def __contains__(self, _: object) -> bool:
            pytest.fail("a list was searched")

    graph = from_edges(300, [(u, v) for v in range(300) for u in range(max(0, v - 7), v)])
    expected = allocate_streams(graph)
    graph.__dict__["successors"] = [Seen(s) for s in graph.successors]
    graph.predecessors = tuple(Seen(p) for p in graph.predecessors)
    assert allocate_streams(graph) == expected
    assert 300 <= looks["predecessors"] <= len(graph.edges) and looks["first successors"] <= looks["predecessors"]


# Launch orders


@st.composite
def weighted(draw: st.DrawFn) -> tuple[OperatorGraph, list[bool], list[float]]:
    """A graph with a class and a demand for each operator; demands are few, so that many are equal."""
    graph = draw(dags(max_nodes=40))
    n = len(graph)
    memory = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return graph, memory, draw(st.lists(st.integers(0, 4).map(float), min_size=n, max_size=n))


def algorithm_2(graph: nx.DiGraph, memory: list[bool], demand: list[float], reverse: bool = False) -> list[int]:
    """The paper's algorithm line by line, with lists that are searched; reversed it prefers the opposite each time."""
    in_degree = dict(graph.in_degree())
    lists: dict[str, list[int]] = {"mem": [], "comp": []}
    for v in graph.nodes:  # line 2
        if in_degree[v] == 0:
            lists["mem" if memory[v] else "comp"].append(v)
    queue: list[int] = []
    turn = "comp" if reverse else "mem"
    while lists["mem"] or lists["comp"]:  # line 3
        chosen = turn if lists[turn] else {"mem": "comp", "comp": "mem"}[turn]  # line 4
        turn = {"mem": "comp", "comp": "mem"}[chosen]
        current = lists[chosen]
        wanted = max(demand[v] for v in current) if reverse else min(demand[v] for v in current)  # line 5
        equals = [v for v in current if demand[v] == wanted]
        best = equals[-1] if reverse else equals[0]
        current.remove(best)  # line 6
        queue.append(best)
        for s in graph.successors(best):  # lines 7 to 16
            in_degree[s] -= 1
            if in_degree[s] == 0:
                lists["mem" if memory[s] else "comp"].append(s)
    return queue


@given(weighted())
def test_the_launcher_is_algorithm_2(given_: tuple[OperatorGraph, list[bool], list[float]]) -> None:
    graph, memory, demand = given_
    network = as_networkx(graph)
    assert list(launch_order.opara(graph, memory, demand)) == algorithm_2(network, memory, demand)
    assert list(launch_order.reverse(graph, memory, demand)) == algorithm_2(network, memory, demand, reverse=True)


@given(weighted())
def test_every_order_is_topological_and_passes_verification(given_: tuple[OperatorGraph, list[bool], list[float]]) -> None:
    graph, memory, demand = given_
    streams = allocate_streams(graph)
    for name, order_of in launch_order.ORDERS.items():
        order = order_of(graph, memory, demand)
        position = {v: i for i, v in enumerate(order)}
        assert sorted(order) == list(range(len(graph))), name
        assert all(position[u] < position[v] for u, v in graph.edges), name
        waits = needed_waits(graph, streams)
        assert all(position[u] < position[v] for u, v in waits)
        verify(graph, Schedule(graph, "opara", order, streams, waits))


@given(weighted())
def test_the_longest_chain_goes_first(given_: tuple[OperatorGraph, list[bool], list[float]]) -> None:
    """Of those that are ready, by all of their paths; of equals the one captured first."""
    graph, memory, milliseconds = given_
    network = as_networkx(graph)
    order = launch_order.critical_path(graph, memory, milliseconds)

    def longest(v: int) -> float:
        reached = network.subgraph({v} | nx.descendants(network, v))
        chains = nx.DiGraph()
        chains.add_weighted_edges_from((a, b, milliseconds[a]) for a, b in reached.edges)
        chains.add_weighted_edges_from((a, "end", milliseconds[a]) for a in reached)
        return float(nx.dag_longest_path_length(chains))

    ranks = [longest(v) for v in range(len(graph))]
    for i, v in enumerate(order):
        ready = [u for u in order[i:] if set(graph.predecessors[u]) <= set(order[:i])]
        assert v == min(ready, key=lambda u: (-ranks[u], u))


@given(dags())
def test_depth_first_follows_a_branch_and_breadth_first_a_generation(graph: OperatorGraph) -> None:
    network = as_networkx(graph)
    generation = {v: i for i, of in enumerate(nx.topological_generations(network)) for v in of}
    breadth = launch_order.breadth_first(graph, [], [])
    assert [generation[v] for v in breadth] == sorted(generation.values())

    missing = dict(network.in_degree())
    depth: list[int] = []

    def visit(v: int) -> None:
        depth.append(v)
        for s in graph.successors[v]:
            missing[s] -= 1
        for s in graph.successors[v]:
            if missing[s] == 0:
                missing[s] = -1
                visit(s)

    for root in [v for v in network if missing[v] == 0]:
        visit(root)
    assert list(launch_order.depth_first(graph, [], [])) == depth


def test_orders_of_two_branches() -> None:
    """A root, two branches of two, and what joins them; then four operators that wait for nothing."""
    graph = from_edges(6, [(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5)])
    assert launch_order.depth_first(graph, [], []) == (0, 1, 2, 3, 4, 5)
    assert launch_order.breadth_first(graph, [], []) == (0, 1, 3, 2, 4, 5)
    free, memory, demand = from_edges(4, []), [True, False, True, False], [2.0, 2.0, 1.0, 1.0]
    assert launch_order.opara(free, memory, demand) == (2, 3, 0, 1)
    assert launch_order.reverse(free, memory, demand) == (1, 0, 3, 2)
    assert launch_order.opara(free, [True] * 4, demand) == (2, 3, 0, 1)
    assert launch_order.reverse(free, [True] * 4, demand) == (1, 0, 3, 2)
