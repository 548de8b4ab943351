"""Streams that take turns on one, where a schedule runs."""

import random
from dataclasses import replace

from dags import dags, from_edges
from hypothesis import given
from hypothesis import strategies as st
from test_cuda_memory import in_random_order

from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans.shared_streams import shared_streams
from systems.scheduling.plans.stream_assignment import assign_streams


@given(dags(max_nodes=25), st.randoms(use_true_random=False), st.integers(1, 8), st.data())
def test_sharing_adds_no_order(graph: OperatorGraph, draw: random.Random, count: int, data: st.DataObject) -> None:
    for schedule in (assign_streams(graph), in_random_order(graph, count, draw)):
        before = schedule.happens_before()
        streams = data.draw(st.sets(st.sampled_from(schedule.streams)))
        places = shared_streams(schedule, streams, before)
        assert set(places) == streams and set(places.values()) <= streams
        on = [places.get(s, s) for s in schedule.streams]
        number = {s: i for i, s in enumerate(dict.fromkeys(on[v] for v in schedule.order))}
        assert replace(schedule, streams=tuple(number[s] for s in on)).happens_before() == before


def test_branches_that_rejoin_share_with_those_that_come_after() -> None:
    """Three operators side by side, as the projections of an attention, eight times over: three streams are enough."""
    edges = [(4 * block + i, 4 * block + 3) for block in range(8) for i in range(3)]
    edges += [(4 * block + 3, 4 * block + 4 + i) for block in range(7) for i in range(3)]
    schedule = assign_streams(from_edges(32, sorted(edges)))
    places = shared_streams(schedule, set(schedule.streams), schedule.happens_before())
    assert schedule.stream_count == 17 and len(set(places.values())) == 3
