import networkx as nx
import pytest
from dags import as_networkx, dags, from_edges, matching_size
from hypothesis import given

from systems.scheduling.graph.operator_graph import Operator, OperatorGraph


@given(dags())
def test_minimum_equivalent_graph_is_the_transitive_reduction(graph: OperatorGraph) -> None:
    assert set(graph.minimum_equivalent.edges) == set(nx.transitive_reduction(as_networkx(graph)).edges)


@given(dags())
def test_width_is_dilworths(graph: OperatorGraph) -> None:
    closure = nx.transitive_closure_dag(as_networkx(graph))
    assert graph.width == len(graph) - matching_size(closure)


@given(dags(max_nodes=9))
def test_width_is_the_largest_antichain(graph: OperatorGraph) -> None:
    assert graph.width == max(map(len, nx.antichains(as_networkx(graph))))


@given(dags())
def test_ancestors(graph: OperatorGraph) -> None:
    oracle = as_networkx(graph)
    for v, mask in enumerate(graph.ancestors):
        assert {u for u in range(len(graph)) if mask >> u & 1} == nx.ancestors(oracle, v)


def test_a_repeated_argument_is_one_edge_in_argument_order() -> None:
    graph = OperatorGraph([Operator(i, "op", "op") for i in range(4)], [(), (), (), (2, 0, 2, 1)])
    assert graph.edges == ((2, 3), (0, 3), (1, 3))


@pytest.mark.parametrize("edge", [(1, 0), (1, 1), (-1, 1)])
def test_a_dependency_that_does_not_point_back_is_refused(edge: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not captured before it"):
        from_edges(2, [edge])
