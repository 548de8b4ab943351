import dataclasses
import json

import networkx as nx
import pytest
from dags import dags, from_edges
from hypothesis import assume, given
from hypothesis import strategies as st

from systems.scheduling.execution.memory_plan import Request, plan_memory
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans.schedule import Schedule, sequential
from systems.scheduling.plans.stream_assignment import assign_streams
from systems.scheduling.plans.verify import Buffer, InvalidSchedule, verify

DIAMOND = from_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3)])


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """A schedule with nothing right about it but its form: streams and waits at random."""
    graph = draw(dags(max_nodes=12))
    n = len(graph)
    streams = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    numbers = {s: i for i, s in enumerate(dict.fromkeys(streams))}
    waits = [e for e in graph.edges if draw(st.booleans())]
    return Schedule(graph, "random", tuple(range(n)), tuple(numbers[s] for s in streams), tuple(waits))


def ordering(schedule: Schedule) -> nx.DiGraph:
    """What a stream's order and the waits order, as a graph."""
    out = nx.DiGraph()
    out.add_nodes_from(schedule.order)
    out.add_edges_from(schedule.waits)
    last: dict[int, int] = {}
    for v in schedule.order:
        s = schedule.streams[v]
        if s in last:
            out.add_edge(last[s], v)
        last[s] = v
    return nx.transitive_closure_dag(out)


def accepted(schedule: Schedule, buffers: list[Buffer] | None = None) -> bool:
    try:
        verify(schedule.graph, schedule, buffers or ())
    except InvalidSchedule:
        return False
    return True


@given(schedules())
def test_accepts_exactly_what_orders_every_dependency(schedule: Schedule) -> None:
    order = ordering(schedule)
    assert accepted(schedule) == all(order.has_edge(u, v) for u, v in schedule.graph.edges)


@given(dags(max_nodes=30))
def test_refuses_nimbles_schedule_without_any_one_of_its_waits(graph: OperatorGraph) -> None:
    schedule = assign_streams(graph)
    for wait in schedule.waits:
        without = dataclasses.replace(schedule, waits=tuple(w for w in schedule.waits if w != wait))
        with pytest.raises(InvalidSchedule, match=rf"operator \d+ .* of {wait[0]} |operator {wait[1]} "):
            verify(graph, without)


@given(dags(max_nodes=30))
def test_a_schedule_file_reads_back_the_same(graph: OperatorGraph) -> None:
    schedule = assign_streams(graph)
    document = json.loads(json.dumps(schedule.to_json(model="m", batch=1, device="cpu")))
    again = Schedule.from_json(document)
    assert (again.graph, again.order, again.streams, again.waits) == (
        schedule.graph,
        schedule.order,
        schedule.streams,
        schedule.waits,
    )
    verify(graph, again)


@pytest.mark.parametrize("damage", [{"operators": 3}, {"edges": [[0, 9]]}, {"waits": [1]}, {"edges": [[3, 0]]}])
def test_what_is_no_schedule_file_is_refused(damage: dict) -> None:
    document = assign_streams(DIAMOND).to_json(model="m", batch=1, device="cpu") | damage
    with pytest.raises(ValueError):
        Schedule.from_json(document)


def test_names_both_operators() -> None:
    schedule = dataclasses.replace(assign_streams(DIAMOND), waits=())
    with pytest.raises(InvalidSchedule, match=r"operator 2 \(operator\) on stream 1 reads the output of 0 \(operator\)"):
        verify(DIAMOND, schedule)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": (0, 1, 3)}, "operator 2 .* never launched"),
        ({"order": (0, 1, 2, 2, 3)}, "launched twice"),
        ({"order": (3, 2, 1, 0)}, "launched after it"),
        ({"streams": (0, 0, 1)}, "streams for 3"),
        ({"streams": (0, 0, 2, 0)}, "not numbered"),
        ({"waits": ((0, 7),)}, "0..3"),
    ],
)
def test_refuses_a_malformed_schedule(change: dict, message: str) -> None:
    with pytest.raises(InvalidSchedule, match=message):
        verify(DIAMOND, dataclasses.replace(assign_streams(DIAMOND), **change))


def test_refuses_the_schedule_of_another_model_by_name() -> None:
    other = from_edges(4, [(0, 1), (0, 2), (1, 3)])
    with pytest.raises(InvalidSchedule, match=r"operator 3 .* reads \[1\], this model's reads \[1, 2\]"):
        verify(DIAMOND, assign_streams(other))


@st.composite
def memory_demands(draw: st.DrawFn) -> tuple[Schedule, list[Request]]:
    """A valid schedule, and what its operators ask for: an output each and perhaps a workspace."""
    graph = draw(dags(max_nodes=25))
    schedule = draw(st.sampled_from([assign_streams, sequential]))(graph)
    requests = []
    for v, successors in enumerate(graph.successors):
        touched = sum(1 << w for w in successors) | 1 << v
        requests.append(Request(draw(st.integers(1, 5000)), v, touched, outlives_run=not successors))
        if draw(st.booleans()):
            requests.append(Request(draw(st.integers(1, 50_000)), v, 1 << v))
    return schedule, requests


def conflict(order: nx.DiGraph, a: Request, b: Request) -> bool:
    """May both hold something at one time? Straight from the definition, one operator at a time."""

    def finished_before(first: Request, second: Request) -> bool:
        touching = [v for v in order if first.touched >> v & 1]
        return not first.outlives_run and all(order.has_edge(v, second.writer) for v in touching)

    return not finished_before(a, b) and not finished_before(b, a)


@given(memory_demands())
def test_planned_memory_is_never_shared_by_what_may_be_alive_together(case: tuple[Schedule, list[Request]]) -> None:
    schedule, requests = case
    plan = plan_memory(requests, schedule.happens_before())
    order = ordering(schedule)
    for i, a in enumerate(plan.buffers):
        assert a.size >= requests[i].size and a.start >= 0 and a.start + a.size <= plan.size
        for j in range(i):
            b = plan.buffers[j]
            if a.start < b.start + b.size and b.start < a.start + a.size:
                assert not conflict(order, requests[i], requests[j])
    assert plan.size <= plan.keep_all
    verify(schedule.graph, schedule, plan.buffers)


@given(memory_demands(), st.data())
def test_a_buffer_moved_onto_a_live_one_is_refused(case: tuple[Schedule, list[Request]], data: st.DataObject) -> None:
    schedule, requests = case
    order = ordering(schedule)
    pairs = [(i, j) for i in range(len(requests)) for j in range(i) if conflict(order, requests[i], requests[j])]
    assume(pairs)
    i, j = data.draw(st.sampled_from(pairs))
    buffers = list(plan_memory(requests, schedule.happens_before()).buffers)
    buffers[i] = dataclasses.replace(buffers[i], start=buffers[j].start)
    with pytest.raises(InvalidSchedule, match="writes into the output of"):
        verify(schedule.graph, schedule, buffers)


def test_a_chain_needs_two_buffers_only() -> None:
    graph = from_edges(50, [(v, v + 1) for v in range(49)])
    requests = [Request(512, v, 1 << v | (1 << v + 1 if v < 49 else 0), outlives_run=v == 49) for v in range(50)]
    assert plan_memory(requests, sequential(graph).happens_before()).size == 2 * 512
