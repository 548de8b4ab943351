from collections.abc import Iterator
from itertools import combinations

import networkx as nx
import pytest
import torch
from dags import as_networkx, dags, from_edges, matching_size
from drawing import examples
from hypothesis import given
from modules import mixed

import systems
from runners.measurements.correctness import relative_error
from systems.base import BadOption
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans.stream_assignment import assign_streams, single_stream
from systems.scheduling.plans.verify import verify


@given(dags())
def test_independent_operators_never_share_a_stream(graph: OperatorGraph) -> None:
    """Maximum logical concurrency (Nimble, Section 4.2)."""
    closure = nx.transitive_closure_dag(as_networkx(graph))
    streams = assign_streams(graph).streams
    for u, v in combinations(range(len(graph)), 2):
        if not closure.has_edge(u, v):
            assert streams[u] != streams[v]


@given(dags())
def test_as_many_waits_as_theorem_3_says(graph: OperatorGraph) -> None:
    reduced = nx.transitive_reduction(as_networkx(graph))
    schedule = assign_streams(graph)
    assert len(schedule.waits) == reduced.number_of_edges() - matching_size(reduced)
    assert schedule.stream_count == len(graph) - matching_size(reduced)


@given(dags())
def test_every_schedule_passes_verification(graph: OperatorGraph) -> None:
    verify(graph, assign_streams(graph))
    verify(graph, single_stream(graph))


@given(dags())
def test_streams_that_are_reused_order_nothing_more(graph: OperatorGraph) -> None:
    """As few streams as the chains allow, and the waits and the concurrency of a stream for each chain."""
    chains, reused = assign_streams(graph), assign_streams(graph, reuse_streams=True)
    verify(graph, reused)
    assert reused.waits == chains.waits
    assert reused.happens_before() == chains.happens_before() == list(graph.ancestors)
    ends = {s: [v for v in range(len(graph)) if chains.streams[v] == s] for s in range(chains.stream_count)}
    follows = nx.DiGraph((a, b) for a in ends for b in ends if graph.ancestors[ends[b][0]] >> ends[a][-1] & 1)
    assert graph.width <= reused.stream_count == chains.stream_count - matching_size(follows)


def test_the_papers_nimble_has_the_papers_passes_and_no_others() -> None:
    """Section 5: a subset of TensorRT's fusion, and for convolutions cuDNN's kernel or PyTorch's own."""
    rewriting = systems.load("nimble_paper").rewriting  # type: ignore[attr-defined]
    assert [each.kind for each in rewriting.passes] == ["fold_batch_norm", "select_kernels", "fuse_elementwise"]
    assert rewriting.switches == {"fold_batch_norm", "select_kernels", "fuse_elementwise"}


@pytest.mark.usefixtures("cache_folder")
@pytest.mark.parametrize("choice", ["nimble_paper", "nimble_released"])
def test_the_settings_of_paper_and_release_agree_with_eager(choice: str) -> None:
    module, inputs = mixed()
    prepared = systems.load(choice).prepare(module, inputs)
    for _ in range(3):
        x = torch.randn_like(inputs[0])
        with torch.no_grad():
            assert relative_error(prepared(x), module(x)) < 1e-5
    prepared.close()


def test_one_stream_has_none_to_reuse() -> None:
    with pytest.raises(BadOption, match="there is one stream"):
        systems.load("nimble_single_stream", reuse_streams=True)


@examples(40)
@given(dags(max_nodes=8, max_edges=12))
def test_no_safe_plan_has_fewer_waits(graph: OperatorGraph) -> None:
    """Brute force over every assignment with maximum logical concurrency and every plan (supplement, Definitions 1, 2)."""
    edges = graph.edges
    closure = nx.transitive_closure_dag(as_networkx(graph))
    fewest = len(assign_streams(graph).waits)
    on_path = [_edges_on_paths(edges, closure, u, v) for u, v in edges]
    for streams in _chain_partitions(len(graph), closure):
        must_hit = [on_path[e] for e, (u, v) in enumerate(edges) if streams[u] != streams[v]]
        assert not _can_hit_all(must_hit, len(edges), fewest - 1)


def _edges_on_paths(edges: tuple[tuple[int, int], ...], closure: nx.DiGraph, u: int, v: int) -> int:
    """The bit mask of the edges that lie on some path from u to v."""
    return sum(
        1 << e for e, (a, b) in enumerate(edges) if (a == u or closure.has_edge(u, a)) and (b == v or closure.has_edge(b, v))
    )


def _chain_partitions(n: int, closure: nx.DiGraph) -> Iterator[list[int]]:
    """Every assignment of operators to streams in which operators that share a stream are dependent."""

    def extend(streams: list[int]) -> Iterator[list[int]]:
        v = len(streams)
        if v == n:
            yield streams
            return
        for s in range(max(streams, default=-1) + 2):
            if all(closure.has_edge(u, v) for u in range(v) if streams[u] == s):
                yield from extend([*streams, s])

    return extend([])


def _can_hit_all(sets: list[int], edges: int, size: int) -> bool:
    """Is there a plan of at most `size` edges with an edge in each of `sets`?"""
    plans = (sum(1 << e for e in chosen) for k in range(size + 1) for chosen in combinations(range(edges), k))
    return any(all(plan & s for s in sets) for plan in plans)


def test_the_walk_through_of_figure_6() -> None:
    """A diamond with a tail: one chain through it, one operator aside, two waits."""
    graph = from_edges(5, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (0, 3)])
    schedule = assign_streams(graph)
    assert (schedule.stream_count, len(schedule.waits)) == (2, 2)
