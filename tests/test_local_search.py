"""Schedules that are changed a little again and again."""

from conftest import ROOT
from dags import dags
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans.list_scheduling import list_schedule
from systems.scheduling.plans.local_search import improved
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stream_assignment import assign_streams
from systems.scheduling.plans.verify import verify
from systems.scheduling.simulate.gpu import find
from systems.scheduling.simulate.measured_set import MeasuredSet
from systems.scheduling.simulate.simulator import Simulator


@examples(50)
@given(dags(), st.integers(0, 60), st.integers(0, 9), st.randoms(use_true_random=False))
def test_what_it_returns_is_valid_and_costs_no_more(graph: OperatorGraph, trials: int, seed: int, chance: object) -> None:
    """By any cost: here one that is drawn for each schedule."""
    costs: dict[tuple[object, ...], int] = {}

    def key(schedule: Schedule) -> tuple[object, ...]:
        return schedule.order, schedule.streams, schedule.waits

    def cost(schedule: Schedule) -> int:
        verify(graph, schedule)
        assert set(schedule.streams) == set(range(schedule.stream_count))
        return costs.setdefault(key(schedule), chance.randrange(100))  # type: ignore[attr-defined]

    first = assign_streams(graph)
    better = improved(first, cost, trials, seed)
    verify(graph, better)
    assert costs[key(better)] == min(costs.values()) <= costs[key(first)] and len(costs) <= trials + 1
    assert improved(first, cost, trials, seed) == better


@given(dags())
def test_every_wait_is_a_dependency(graph: OperatorGraph) -> None:
    better = improved(assign_streams(graph), lambda schedule: 1.0, 20)
    assert set(better.waits) <= set(graph.edges)
    before = better.happens_before()
    for v in range(len(graph)):
        assert all(before[v] >> u & 1 for u in graph.predecessors[v])


def test_googlenet_gains_by_simulation() -> None:
    """Beside the best of Nimble's plan and list schedules, in a fused program on an H200."""
    gpu = find("NVIDIA H200")
    assert gpu is not None
    measured = MeasuredSet.read(ROOT / "results/reference/simulation/googlenet-b1-fused.json.gz").programs["nimble_fused"]
    simulator = Simulator(measured.graph, measured.profile, gpu)
    alone_ms = [operator.milliseconds for operator in measured.profile.operators]

    def latency_us(schedule: Schedule) -> float:
        return simulator(schedule).latency_us

    plans = [assign_streams(measured.graph), *(list_schedule(measured.graph, alone_ms, k) for k in (2, 4, 8))]
    first = min(plans, key=latency_us)
    better = improved(first, latency_us, 3000)
    assert latency_us(better) < 0.99 * latency_us(first)
    verify(measured.graph, better)
