"""The simulator: what holds of every schedule, and small cases that are worked out by hand."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from unittest import mock

import networkx as nx
import pytest
from dags import from_edges
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from simulated import GPU, kernel, operator, profile_of

from systems.profiling.profile import Kernel, OperatorProfile
from systems.scheduling.plans.schedule import Schedule, sequential
from systems.scheduling.plans.stream_assignment import assign_streams
from systems.scheduling.simulate import events
from systems.scheduling.simulate.baselines import baselines
from systems.scheduling.simulate.edges import predecessors
from systems.scheduling.simulate.gpu import Gpu, load
from systems.scheduling.simulate.kernels import Kernels, Node
from systems.scheduling.simulate.random_schedules import random_schedules
from systems.scheduling.simulate.simulator import Simulator, simulate
from systems.scheduling.simulate.timeline import Timeline
from tests.dags import dags

CLOSE = 1e-3  # microseconds that rounding may make of a whole schedule


@st.composite
def gpus(draw: st.DrawFn) -> Gpu:
    """From one small multiprocessor to many, with free edges and dear ones."""
    costs = {
        name: draw(st.floats(0, 5)) for name in ("launch_us", "finish_us", "edge_us", "branch_us", "join_us", "dispatch_us")
    }
    multiprocessors = draw(st.sampled_from((1, 2, 3, 132)))
    return load("h200", multiprocessors=multiprocessors, sharing=draw(st.floats(0, 1)), **costs)


@st.composite
def operators(draw: st.DrawFn) -> OperatorProfile:
    """Of no, one or two kernels, from one block to many waves, that a multiprocessor holds one or many of."""
    kernels = draw(
        st.lists(
            st.builds(
                kernel,
                st.floats(0.1, 50),
                st.one_of(st.integers(1, 200), st.integers(1, 5_000)),
                st.sampled_from((32, 96, 128, 256, 1024)),
                st.integers(0, 64),
                st.sampled_from((0, 1000, 40_000, 100_000, 220_000)),
            ),
            max_size=2,
        )
    )
    if draw(st.integers(0, 9)) == 0:
        kernels.append(kernel(draw(st.floats(0.1, 9)), 0, 0, 0, 0))  # a copy
    return operator(*kernels, moved=draw(st.sampled_from((0, 10**5, 10**7, 10**9))))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Simulator]:
    graph = draw(dags(max_nodes=25))
    profile = profile_of([draw(operators()) for _ in range(len(graph))])
    schedules = [assign_streams(graph), *random_schedules(graph, 3, draw(st.integers(0, 1000)))]
    return draw(st.sampled_from(schedules)), Simulator(graph, profile, draw(gpus()))


def edges_us(before: list[tuple[int, ...]], on: Gpu) -> float:
    """All that launches, edges and dispatches may cost: a kernel waits for one edge at most, and for one dispatch."""
    joins = sum(max(0, len(earlier) - 1) for earlier in before)
    n = len(before)
    return on.launch_us + on.finish_us + n * (max(on.edge_us, on.branch_us) + on.dispatch_us) + joins * on.join_us


def longest_us(nodes: Sequence[Node], before: list[tuple[int, ...]], edge_us: float = 0.0, branch_us: float = 0.0) -> float:
    """The longest path through kernels and the edges between them, by networkx: an oracle that shares no code."""
    num_after = Counter(u for earlier in before for u in earlier)
    path = nx.DiGraph()
    for v, node in enumerate(nodes):
        path.add_edge(("begin", v), ("end", v), weight=node.alone_us)
        for u in before[v]:
            is_chain = num_after[u] == len(before[v]) == 1
            path.add_edge(("end", u), ("begin", v), weight=edge_us if is_chain else branch_us)
    return float(nx.dag_longest_path_length(path)) if before else 0.0


@examples(60)
@given(cases())
def test_latency_lies_between_the_critical_path_and_the_sum(case: tuple[Schedule, Simulator]) -> None:
    schedule, simulator = case
    nodes, on, latency_us = simulator.kernels.nodes, simulator.gpu, simulator(schedule).latency_us
    before = predecessors(schedule, simulator.kernels)
    total_us = sum(node.alone_us for node in nodes)
    assert latency_us >= on.launch_us + longest_us(nodes, before, on.edge_us, on.branch_us) + on.finish_us - CLOSE
    assert latency_us <= total_us + edges_us(before, on) + CLOSE
    stated = baselines(schedule, simulator)
    assert stated.critical_path_us == pytest.approx(longest_us(nodes, before)) and stated.sum_us == pytest.approx(total_us)


@examples(40)
@given(cases())
def test_one_stream_takes_its_kernels_and_what_lies_between_them(case: tuple[Schedule, Simulator]) -> None:
    """From one kernel's dispatch to the next one's: its time and an edge, or what the dispatcher takes."""
    schedule, simulator = case
    on, times_us = simulator.gpu, [node.alone_us for node in simulator.kernels.nodes]
    between_us = sum(max(us + on.edge_us, on.dispatch_us) for us in times_us[:-1])
    latency_us = on.launch_us + between_us + sum(times_us[-1:]) + on.finish_us
    assert simulator(sequential(schedule.graph)).latency_us == pytest.approx(latency_us)


@examples(150)
@given(st.lists(operators(), min_size=2, max_size=12), gpus())
def test_all_beside_each_other_take_no_longer_than_in_turn(each: list[OperatorProfile], on: Gpu) -> None:
    """However much they want of memory and multiprocessors; nothing but kernels takes time here."""
    n, on = len(each), gpu(multiprocessors=on.multiprocessors, sharing=on.sharing)
    beside = Schedule(from_edges(n, []), "all", tuple(range(n)), tuple(range(n)), ())
    assert simulate(beside, profile_of(each), on).latency_us <= sum(o.milliseconds for o in each) * 1e3 + CLOSE


@examples(60)
@given(cases())
def test_work_is_conserved(case: tuple[Schedule, Simulator]) -> None:
    """Every block runs once, and block-seconds in are block-seconds out.

    From when batches came and went, the slowdowns are worked out anew for each moment. The time that they leave of a batch
    is what its waves take alone.
    """
    schedule, simulator = case
    nodes, on, batches = simulator.kernels.nodes, simulator.gpu, simulator(schedule).batches
    blocks = [0] * len(nodes)
    for batch in batches:
        blocks[batch.node] += batch.blocks * batch.waves
    assert blocks == [node.kernel.num_blocks for node in nodes]

    done_us = [0.0] * len(batches)
    moments = sorted({moment for batch in batches for moment in (batch.begin_us, batch.end_us)})
    for now, then in pairwise(moments):
        present = [i for i, batch in enumerate(batches) if batch.begin_us <= now and batch.end_us >= then]
        resident, memory = dict[int, int](), dict[int, float]()  # of each kernel: blocks that run, what they want of memory
        for v in {batches[i].node for i in present}:
            node = nodes[v]
            resident[v] = sum(batches[i].blocks for i in present if batches[i].node == v)
            memory[v] = node.bandwidth * resident[v] / node.most_blocks if node.most_blocks else node.bandwidth
        begun = dict.fromkeys(resident, 0)
        for batch in batches:
            if batch.node in begun and batch.begin_us <= now:
                begun[batch.node] += batch.blocks * batch.waves
        for v in resident:
            others = [u for u in resident if u != v and begun[u] == nodes[u].blocks]
            slowdown = max(1.0, 1 + memory[v] * (memory[v] + sum(memory[u] for u in others) - 1))
            if resident[v]:
                levels = [
                    math.ceil(b / on.multiprocessors) for b in (resident[v] + sum(resident[u] for u in others), resident[v])
                ]
                by_levels = 1 + on.sharing * (levels[0] / levels[1] - 1)
                slowdown = max(slowdown, min(by_levels, 1 + len(others)))
            for i in present:
                if batches[i].node == v:
                    done_us[i] += (then - now) / slowdown
    for batch, us in zip(batches, done_us, strict=True):
        assert us == pytest.approx(nodes[batch.node].wave_us * batch.waves, rel=1e-6, abs=CLOSE)


def room_on_one(kernel: Kernel, on: Gpu) -> int:
    """Blocks of a kernel that one multiprocessor holds: worked out anew, by CUDA's rules for compute capability 9.0."""
    warps = max(1, math.ceil(kernel.num_threads / 32))
    by_threads = on.threads // (32 * warps)
    by_registers = math.inf
    if kernel.registers:
        warps_by_registers = on.registers // (math.ceil(kernel.registers * 32 / 256) * 256)
        by_registers = warps_by_registers // 4 * 4 // warps
    shared_memory = math.ceil((kernel.shared_memory + on.reserved_shared_memory) / 128) * 128
    return int(max(1, min(by_threads, by_registers, on.shared_memory // shared_memory, on.blocks)))


@examples(60)
@given(cases())
def test_no_multiprocessor_ever_holds_more_than_its_limits(case: tuple[Schedule, Simulator]) -> None:
    """Blocks are laid onto multiprocessors one by one as the timeline has them come and go, none of them moves meanwhile.

    Each multiprocessor holds blocks of one kernel, and the fullest of it are filled up first and emptied last.
    """
    schedule, simulator = case
    on, nodes = simulator.gpu, simulator.kernels.nodes
    moments: list[tuple[float, int, int, int]] = []  # (when, 1 for a beginning, blocks, node)
    for batch in simulator(schedule).batches:
        if batch.blocks and batch.end_us > batch.begin_us:
            moments += [(batch.begin_us, 1, batch.blocks, batch.node), (batch.end_us, 0, batch.blocks, batch.node)]
    free, blocks_by_node = on.multiprocessors, dict[int, list[int]]()  # of each of its multiprocessors
    for _, begins, blocks, v in sorted(moments):
        most, laid = room_on_one(nodes[v].kernel, on), blocks_by_node.setdefault(v, [])
        for _ in range(blocks):
            if not begins:
                emptiest = min(range(len(laid)), key=laid.__getitem__)
                laid[emptiest] -= 1
                if not laid[emptiest]:
                    del laid[emptiest]
                    free += 1
            elif any(n < most for n in laid):
                laid[next(i for i, n in enumerate(laid) if n < most)] += 1
            else:
                laid.append(1)
                free -= 1
        assert free >= 0, "blocks lie on more multiprocessors than there are"


@examples(40)
@given(cases())
def test_edges_are_kept_and_the_same_comes_out_again(case: tuple[Schedule, Simulator]) -> None:
    schedule, simulator = case
    timeline = simulator(schedule)
    for v, before in enumerate(predecessors(schedule, simulator.kernels)):
        for u in before:
            assert timeline.begins_us[v] >= timeline.ends_us[u] + min(simulator.gpu.edge_us, simulator.gpu.branch_us) - CLOSE
    again = simulator(schedule)
    assert again == timeline and again.batches == timeline.batches


@pytest.mark.skipif(events.compiled() is None, reason="Numba is not installed: there is no machine code to compare with")
@examples(60)
@given(cases())
def test_machine_code_and_python_agree_to_the_last_bit(case: tuple[Schedule, Simulator]) -> None:
    schedule, simulator = case
    timeline = simulator(schedule)
    with mock.patch.object(events, "compiled", return_value=None):
        interpreted = simulator(schedule)
    assert interpreted == timeline and interpreted.batches == timeline.batches


@pytest.mark.skipif(events.compiled() is None, reason="Numba is not installed")
def test_where_nothing_can_be_written_each_process_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.caching import CompileResultCacheImpl

    monkeypatch.setattr(CompileResultCacheImpl, "_locator_classes", [])  # the folders that it tries
    machine_code = events.compiled.__wrapped__()
    assert machine_code is not None and machine_code.stats.cache_path is None


@examples(40)
@given(cases(), st.randoms(use_true_random=False))
def test_a_captured_graph_keeps_no_launch_order(case: tuple[Schedule, Simulator], random: Random) -> None:
    """Any launch order that keeps each stream's and has what is waited for first gives the same edges."""
    schedule, simulator = case
    edges = nx.DiGraph(schedule.waits)
    edges.add_nodes_from(schedule.order)
    for stream in set(schedule.streams):
        nx.add_path(edges, [v for v in schedule.order if schedule.streams[v] == stream])
    order = tuple(nx.lexicographical_topological_sort(edges, key=lambda _: random.random()))
    assert simulator(replace(schedule, order=order)) == simulator(schedule)


@examples(40)
@given(cases())
def test_what_reaches_what_is_what_the_schedule_orders(case: tuple[Schedule, Simulator]) -> None:
    """Operators with kernels are ordered exactly as `happens_before`, which verify proves schedules by, has it."""
    schedule, simulator = case
    first, before = simulator.kernels.first, predecessors(schedule, simulator.kernels)
    graph = nx.DiGraph((u, v) for v, earlier in enumerate(before) for u in earlier)
    graph.add_nodes_from(range(len(before)))
    closure = nx.transitive_closure_dag(graph)
    with_kernels = [v for v in range(len(schedule.graph)) if first[v] < first[v + 1]]
    for v, mask in enumerate(schedule.happens_before()):
        for u in with_kernels if v in with_kernels else ():
            assert closure.has_edge(first[u + 1] - 1, first[v]) == bool(mask >> u & 1), (u, v)


def gpu(**changed: float) -> Gpu:
    free = dict.fromkeys(("launch_us", "finish_us", "edge_us", "branch_us", "join_us", "dispatch_us", "sharing"), 0.0)
    return load("h200", **(free | changed))


def two_beside_each_other(first: OperatorProfile, second: OperatorProfile, on: Gpu) -> Timeline:
    graph = from_edges(2, [])
    return simulate(Schedule(graph, "both", (0, 1), (0, 1), ()), profile_of([first, second]), on)


def test_a_chain_takes_its_kernels_its_edges_and_its_launch() -> None:
    graph = from_edges(3, [(0, 1), (1, 2)])
    profile = profile_of([operator(kernel(10, 50, 128, 32, 0))] * 3)
    on = gpu(launch_us=3, finish_us=1, edge_us=0.5)
    assert simulate(sequential(graph), profile, on).latency_us == pytest.approx(3 + 10 + 0.5 + 10 + 0.5 + 10 + 1)


def test_small_kernels_run_beside_each_other() -> None:
    small = operator(kernel(10, 60, 128, 32, 0))
    assert two_beside_each_other(small, small, gpu()).latency_us == pytest.approx(10)


def test_a_kernel_that_fills_the_gpu_holds_up_the_next() -> None:
    """Blocks of 1,024 threads: an SM holds two, and the GPU 264 of the first kernel."""
    full = operator(kernel(10, 264, 1024, 32, 0))
    assert two_beside_each_other(full, full, gpu()).latency_us == pytest.approx(20)


def test_the_next_kernel_begins_in_the_last_wave() -> None:
    """300 blocks in two waves of 5 us, the second of 36: the other kernel's 200 find room for themselves in it."""
    waves, other = operator(kernel(10, 300, 1024, 32, 0)), operator(kernel(5, 200, 1024, 32, 0))
    timeline = two_beside_each_other(waves, other, gpu())
    assert timeline.begins_us == pytest.approx((0, 5)) and timeline.latency_us == pytest.approx(10)


def test_a_kernel_takes_the_room_that_is_left() -> None:
    """200 of 264 places are held for 10 us. Of the other kernel's 100 blocks 64 go first, then the rest."""
    large_kernel, other = operator(kernel(10, 200, 1024, 32, 0)), operator(kernel(4, 100, 1024, 32, 0))
    timeline = two_beside_each_other(large_kernel, other, gpu())
    assert [(b.blocks, b.begin_us, b.end_us) for b in timeline.batches if b.node == 1] == [(64, 0, 4), (36, 4, 8)]


def test_two_that_use_all_bandwidth_take_turns() -> None:
    """10 us at 4.8 TB/s are 48 MB."""
    busy = operator(kernel(10, 60, 128, 32, 0), moved=48_000_000)
    assert two_beside_each_other(busy, busy, gpu()).latency_us == pytest.approx(20)
    assert two_beside_each_other(busy, operator(kernel(10, 60, 128, 32, 0)), gpu()).latency_us == pytest.approx(10)


@pytest.mark.parametrize(
    ("blocks", "others", "slowdown"),
    [(66, 66, 1), (66, 67, 1.5), (132, 132, 1.5), (132, 133, 2), (133, 132, 1.25), (264, 264, 1.5), (1, 1320, 2)],
)
def test_two_on_the_same_multiprocessors_share_them(blocks: int, others: int, slowdown: float) -> None:
    """By the blocks of the fullest of 132 multiprocessors over those of the kernel alone, with a sharing of a half.

    None of two takes more than twice as long.
    """
    timeline = two_beside_each_other(
        operator(kernel(1, blocks, 64, 16, 0)), operator(kernel(10, others, 64, 16, 0)), gpu(sharing=0.5)
    )
    assert timeline.ends_us[0] == pytest.approx(slowdown)


def test_kernels_are_dispatched_one_after_the_other() -> None:
    small = operator(kernel(1, 1, 32, 16, 0))
    graph = from_edges(5, [])
    beside = Schedule(graph, "all", tuple(range(5)), tuple(range(5)), ())
    assert simulate(beside, profile_of([small] * 5), gpu(dispatch_us=0.5)).latency_us == pytest.approx(1 + 4 * 0.5)


@pytest.mark.parametrize("num_before", [1, 2, 4])
def test_what_waits_for_more_holds_the_dispatcher_longer(num_before: int) -> None:
    """Two kernels that come after the same ones: the second is dispatched when the first's further edges are through."""
    edges = [(u, v) for v in (num_before, num_before + 1) for u in range(num_before)]
    n = num_before + 2
    graph = from_edges(n, edges)
    joins = Schedule(graph, "joins", tuple(range(n)), tuple(range(n)), tuple(edges))
    latency_us = simulate(joins, profile_of([operator(kernel(10, 1, 32, 16, 0))] * n), gpu(join_us=0.5)).latency_us
    assert latency_us == pytest.approx(10 + 0.5 * (num_before - 1) + 10)


def test_a_view_costs_nothing_and_hands_on_its_waits() -> None:
    """0 -> view 1 on another stream -> 2 on the view's stream."""
    graph = from_edges(3, [(0, 1), (1, 2)])
    work = operator(kernel(10, 1, 32, 16, 0))
    profile = profile_of([work, operator(), work])
    schedule = Schedule(graph, "view", (0, 1, 2), (0, 1, 1), ((0, 1),))
    assert predecessors(schedule, Kernels.of(graph, profile, GPU)) == [(), (0,)]
    assert simulate(schedule, profile, gpu(edge_us=1)).latency_us == pytest.approx(21)


def test_half_the_multiprocessors_take_twice_the_waves() -> None:
    """Times are those of the profile's GPU, so a kernel alone takes what it took; two no longer fit beside each other."""
    half = operator(kernel(10, 132, 1024, 32, 0))
    assert two_beside_each_other(half, half, gpu()).latency_us == pytest.approx(10)
    assert two_beside_each_other(half, half, gpu(multiprocessors=66)).latency_us == pytest.approx(20)


def test_a_cpus_profile_has_calls_alone() -> None:
    profile = replace(profile_of([OperatorProfile(0.01), OperatorProfile(0.02)]), capacity=None)
    schedule = Schedule(from_edges(2, []), "both", (0, 1), (0, 1), ())
    assert simulate(schedule, profile, gpu()).latency_us == pytest.approx(20)


def test_a_profile_of_another_program_is_refused() -> None:
    with pytest.raises(ValueError, match="a profile of 1 operators, for a program of 3"):
        simulate(sequential(from_edges(3, [])), profile_of([operator()]), GPU)


def test_twenty_thousand_operators_are_simulated() -> None:
    n = 20_000
    graph = from_edges(n, [(v - 8, v) for v in range(8, n)])
    schedule = Schedule(graph, "lanes", tuple(range(n)), tuple(v % 8 for v in range(n)), ())
    timeline = simulate(schedule, profile_of([operator(kernel(2, 10, 128, 32, 0))] * n), gpu(edge_us=1))
    assert timeline.latency_us == pytest.approx(n / 8 * 3 - 1) and math.isfinite(timeline.latency_us)
