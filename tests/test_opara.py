"""Opara's stream allocator, launch orders, classes, profiler and cache, each against a definition of its own."""

import json
import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from dags import as_networkx, dags
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import models
import systems
from runners.correctness import relative_error
from systems.base import BadOption, Unsupported
from systems.opara import intensity, launch_order, profiler
from systems.opara.kernel_trace import launched_under, on_device, outermost_operators
from systems.opara.profiler import Capacity, Kernel, OperatorProfile, Profile, from_trace, profile
from systems.opara.stream_allocator import allocate_streams, needed_waits
from systems.opara.system import Opara
from systems.scheduling.capture import capture
from systems.scheduling.costs import Cache
from systems.scheduling.cpu_executor import CpuExecutor
from systems.scheduling.operator_graph import OperatorGraph
from systems.scheduling.schedule import Schedule
from systems.scheduling.verify import InvalidSchedule, verify

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads what another, or the user, has measured."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("OPWEAVE_CACHE", str(folder))
    intensity.ridge_point.cache_clear()
    return folder


class Mixed(nn.Module):
    """Two branches with a convolution, elementwise operators, views and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.a(x).relu() + self.b(x).sigmoid()).mean((2, 3)).flatten(1))


def mixed(device: str = "cpu") -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Mixed().eval().to(device), (torch.randn(2, 3, 16, 16, device=device),)


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
    graph = OperatorGraph.from_edges(5, [(0, 3), (1, 3), (1, 4), (2, 4)])
    assert allocate_streams(graph) == (0, 1, 2, 0, 2)
    graph = OperatorGraph.from_edges(4, [(0, 2), (1, 2), (1, 3)])
    assert allocate_streams(graph) == (0, 1, 0, 2) and needed_waits(graph, (0, 1, 0, 2)) == ((1, 2), (1, 3))


@pytest.mark.parametrize("model", ["googlenet", "inception_v3"])
def test_the_schedules_of_branching_networks(model: str) -> None:
    """GoogLeNet gets the 28 streams that the paper reports (Section 5.2)."""
    loaded = models.load(model, 1, device="meta")
    schedule = systems.load("opara", classify="table").schedule(loaded.module, loaded.inputs)
    verify(schedule.graph, schedule)
    assert (schedule.stream_count, len(schedule.waits)) == {"googlenet": (28, 54), "inception_v3": (36, 70)}[model]


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
    graph = OperatorGraph.from_edges(6, [(0, 1), (1, 2), (0, 3), (3, 4), (2, 5), (4, 5)])
    assert launch_order.depth_first(graph, [], []) == (0, 1, 2, 3, 4, 5)
    assert launch_order.breadth_first(graph, [], []) == (0, 1, 3, 2, 4, 5)
    free, memory, demand = OperatorGraph.from_edges(4, []), [True, False, True, False], [2.0, 2.0, 1.0, 1.0]
    assert launch_order.opara(free, memory, demand) == (2, 3, 0, 1)
    assert launch_order.reverse(free, memory, demand) == (1, 0, 3, 2)
    assert launch_order.opara(free, [True] * 4, demand) == (2, 3, 0, 1)
    assert launch_order.reverse(free, [True] * 4, demand) == (1, 0, 3, 2)


# Compute- and memory-intensive operators


def kind_of(model: str, method: str, **options: Any) -> dict[str, set[bool]]:
    """For each operator name of a model whether it is memory-intensive, in the cases that occur."""
    loaded = models.load(model, 1, **options)
    program = capture(loaded.module, loaded.inputs)
    found = defaultdict(set)
    for operator, memory in zip(program.graph.operators, intensity.memory_intensive(program, method), strict=True):
        found[operator.name].add(memory)
    return dict(found)


def test_the_papers_table() -> None:
    """What the paper names: Conv, Sgemm, Embedding and Arange on one side, Relu, Add, To and Ones on the other."""
    found = kind_of("t5", "table", sequence=8, decoder_sequence=8)
    assert all(found[name] == {False} for name in ("linear", "embedding", "arange", "scaled_dot_product_attention"))
    assert all(found[name] == {True} for name in ("add", "relu", "_to_copy", "zeros", "view", "mean"))
    assert kind_of("squeezenet", "table").items() >= {"conv2d": {False}, "max_pool2d": {True}, "cat": {True}}.items()
    assert intensity.in_table("ones") and not intensity.in_table("addmm")


@pytest.mark.parametrize(("ridge", "convolutions"), [(1e-9, False), (1e9, True)])
def test_measured_classes_fall_with_the_ridge_point(
    monkeypatch: pytest.MonkeyPatch, ridge: float, convolutions: bool
) -> None:
    monkeypatch.setattr(intensity, "ridge_point", lambda *_: ridge)
    program = capture(*mixed())
    names = [o.name for o in program.graph.operators]
    memory = dict(zip(names, intensity.memory_intensive(program, "measured"), strict=True))
    assert memory["conv2d"] is convolutions and memory["linear"] is convolutions
    assert memory.get("view", True) is True  # a view does nothing


def test_work_is_counted_in_operations_and_bytes() -> None:
    program = capture(*mixed())
    work = {(o.name, i): intensity.work(program, o.id) for i, o in enumerate(program.graph.operators)}
    first = next(v for (name, _), v in work.items() if name == "conv2d")
    # 2 images of 16 x 16, 3 channels to 8, 3 x 3; input, weight, bias and output, 4 bytes each.
    assert first == (2 * 2 * 256 * 8 * 27, 4 * (2 * 3 * 256 + 8 * 27 + 8 + 2 * 8 * 256))
    added = next(v for (name, _), v in work.items() if name == "add")
    assert added == (3 * 4096, 3 * 4096 * 4)
    linear = next(v for (name, _), v in work.items() if name == "linear")
    assert linear == (2 * 2 * 8 * 4, 4 * (2 * 8 + 8 * 4 + 4 + 2 * 4))
    assert all(v == (0, 0) for (name, _), v in work.items() if name == "view")


def test_work_of_expanded_repeated_and_whole_numbers() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.expand(8, 4, 4) * x, torch.arange(4) + 1

    program = capture(Odd(), (torch.randn(1, 4, 4),))
    work = {o.name: intensity.work(program, o.id) for o in program.graph.operators}
    assert work["mul"] == (16 + 16 + 128, 4 * (16 + 16 + 128)) and work["expand"] == (0, 0)
    assert work["add"] == (0, 2 * 4 * 8)


def test_operations_are_those_of_the_published_count() -> None:
    """GoogLeNet's 1.5 G multiply-accumulates."""
    loaded = models.load("googlenet", 1, device="meta")
    program = capture(loaded.module, loaded.inputs)
    matrix = [v for v, o in enumerate(program.graph.operators) if o.name in ("conv2d", "linear")]
    assert sum(intensity.work(program, v)[0] for v in matrix) / 2 == pytest.approx(1.498e9, rel=0.001)


def test_the_ridge_point_is_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (ridge := intensity.ridge_point(CPU, torch.float32)) > 0
    intensity.ridge_point.cache_clear()
    monkeypatch.setattr(intensity, "_measured_ridge_point", lambda *_: pytest.fail("measured again"))
    assert intensity.ridge_point(CPU, torch.float32) == ridge
    with pytest.raises(Unsupported, match="meta"):
        intensity.ridge_point(torch.device("meta"), torch.float32)


# The profiler, on traces as torch.profiler writes them


def call_(name: str, ts: float, correlation: int, *, tid: int = 1, category: str = "cuda_runtime") -> dict[str, Any]:
    place = {"ph": "X", "cat": category, "name": name, "pid": 10, "tid": tid, "ts": ts, "dur": 2.0}
    return {**place, "args": {"External id": 1, "cbid": 211, "correlation": correlation}}


def label(name: str, ts: float, duration: float, *, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 10, "tid": tid, "ts": ts, "dur": duration, "args": {}}


def kernel(name: str, ts: float, duration: float, correlation: int, stream: int = 7, **more: Any) -> dict[str, Any]:
    arguments = {
        **{"device": 0, "stream": stream, "correlation": correlation, "registers per thread": 32, "shared memory": 0},
        **{"grid": [4, 2, 1], "block": [128, 1, 1], "est. achieved occupancy %": 25, **more},
    }
    place = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": duration}
    return {**place, "args": arguments}


# Written by hand, in the form of torch.profiler's export. Operator 0 launches two kernels and a copy, operator 1 nothing,
# operator 2 one kernel through the driver, which runs before the others have ended. Another thread launches something of its
# own in the midst of operator 0, and something is launched after the last operator.
COPY = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "pid": 0, "tid": 7, "ts": 340.0, "dur": 4.0}
EVENTS: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "pid": 10, "args": {"name": "python"}},
    label("operator:0", 100.0, 50.0),
    call_("cudaLaunchKernel", 110.0, 1),
    call_("cudaLaunchKernel", 120.0, 2),
    call_("cudaMemcpyAsync", 130.0, 3),
    label("operator:1", 151.0, 9.0),
    label("operator:2", 161.0, 30.0),
    call_("cuLaunchKernelEx", 170.0, 4, category="cuda_driver"),
    call_("cudaLaunchKernel", 125.0, 5, tid=2),
    call_("cudaLaunchKernel", 195.0, 7),
    call_("cudaDeviceSynchronize", 200.0, 6),
    kernel("winograd", 300.0, 20.0, 1, **{"shared memory": 48 << 10, "registers per thread": 128}),
    kernel("bias", 321.0, 10.0, 2, **{"block": [32, 32, 1], "est. achieved occupancy %": 50}),
    {**COPY, "args": {"stream": 7, "correlation": 3, "bytes": 4096}},
    kernel("relu", 310.0, 6.0, 4, stream=20, **{"grid": [1, 1, 1]}),
    kernel("foreign", 315.0, 99.0, 5, stream=21),
    kernel("late", 400.0, 1.0, 7),
]
PROFILE = [
    OperatorProfile(
        0.034,
        (Kernel("winograd", 8, 128, 128, 48 << 10, 0.25, 0.02), Kernel("bias", 8, 1024, 32, 0, 0.5, 0.01)),
    ),
    OperatorProfile(0.0),
    OperatorProfile(0.006, (Kernel("relu", 1, 128, 32, 0, 0.25, 0.006),)),
]


def test_kernels_belong_to_the_operator_that_launched_them() -> None:
    assert from_trace({"traceEvents": EVENTS}, 3) == PROFILE


@given(st.permutations(EVENTS))
def test_the_place_in_a_trace_says_nothing(events: list[dict[str, Any]]) -> None:
    assert from_trace({"traceEvents": events}, 3) == PROFILE


def test_when_a_kernel_ran_says_nothing() -> None:
    chance = random.Random(0)
    for _ in range(20):
        moved = [{**e, "ts": chance.uniform(0, 1000)} if e.get("cat") in ("kernel", "gpu_memcpy") else e for e in EVENTS]
        assert from_trace({"traceEvents": moved}, 3) == PROFILE


def test_a_trace_that_does_not_say_all_is_refused() -> None:
    without = [e for e in EVENTS if e.get("args", {}).get("correlation") != 4 or e["cat"] == "kernel"]
    with pytest.raises(ValueError, match="what launched relu"):
        from_trace({"traceEvents": without}, 3)
    with pytest.raises(ValueError, match="operator 3 is not in the trace"):
        from_trace({"traceEvents": EVENTS}, 4)
    assert launched_under({"traceEvents": EVENTS}, "nothing:") == {}
    assert [e["name"] for e in on_device({"traceEvents": EVENTS})] == [
        *("winograd", "relu", "foreign", "bias", "Memcpy DtoD", "late")
    ]


def test_an_occupancy_that_the_profiler_does_not_give_is_none() -> None:
    events = json.loads(json.dumps(EVENTS))
    for event in events:
        event.get("args", {}).pop("est. achieved occupancy %", None)
    found = from_trace({"traceEvents": events}, 3)
    assert found[2].kernels[0].occupancy is None and Profile(tuple(found), None).occupancy() is None


def test_the_traces_of_the_profiler_itself() -> None:
    """As far as a CPU goes: labels are found, nothing was launched, and an operator's callees are left out."""
    module, (x,) = mixed()
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        for v in range(2):
            with torch.profiler.record_function(f"{profiler.LABEL}{v}"):
                module(x)
    trace = profiler.exported(profiled)
    assert from_trace(trace, 2) == [OperatorProfile(0), OperatorProfile(0)]
    names = [e["name"] for e in outermost_operators(trace)]
    assert names == 2 * names[: len(names) // 2] and names.count("aten::conv2d") == 4 and "aten::convolution" not in names


def test_demand_by_either_measure() -> None:
    whole = Profile(tuple(PROFILE), Capacity(threads=2048, registers=65536, shared_memory=228 << 10))
    assert whole.demand("shared_memory") == [48 << 10, 0.0, 0.0]
    # The second kernel's 1024 threads are half of a multiprocessor's, as are its 32 * 1024 registers.
    assert whole.demand("largest_share") == [0.5, 0.0, 128 / 2048]
    few = Profile(tuple(PROFILE), Capacity(threads=2048, registers=40960, shared_memory=228 << 10))
    assert few.demand("largest_share")[0] == 32 * 1024 / 40960
    narrow = Profile(tuple(PROFILE), Capacity(threads=4096, registers=1 << 20, shared_memory=64 << 10))
    assert narrow.demand("largest_share")[0] == 48 / 64
    assert Profile(tuple(PROFILE), None).demand("shared_memory") == [0.034, 0.0, 0.006]
    assert whole.occupancy() == pytest.approx((0.25 * 20 + 0.5 * 10 + 0.25 * 6) / 36)


# The cache


def test_a_profile_is_measured_once_for_each_operator(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    program = capture(*mixed())
    assert profile(program, measure=False) is None
    first = profile(program)
    assert first is not None and first.capacity is None and all(o.milliseconds > 0 for o in first.operators)
    monkeypatch.setattr(profiler.limits, "host_times", lambda *_: pytest.fail("measured again"))
    assert profile(program) == profile(program, measure=False) == first
    (file,) = cache_folder.glob("*.json")
    assert json.loads(file.read_text())["of"]["torch"] == torch.__version__
    monkeypatch.setattr(torch, "__version__", "0.1")
    assert profile(program, measure=False) is None


def test_kernels_come_back_from_the_cache_as_they_were() -> None:
    Cache("opara", CPU).add({"x": profiler.asdict(PROFILE[0])})
    assert OperatorProfile.from_json(Cache("opara", CPU)["x"]) == PROFILE[0]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"of": 1}', '{"of": {}, "measured": {"x": 2}}'])
def test_a_cache_that_cannot_be_read_is_made_anew(content: str) -> None:
    cache = Cache("opara", CPU)
    cache.add({"x": 1})
    cache.file.write_text(content)
    assert "x" not in Cache("opara", CPU)
    Cache("opara", CPU).add({"y": 3})
    assert "y" in Cache("opara", CPU) and {f.suffix for f in cache.file.parent.iterdir()} == {".json", ".lock"}


def test_two_processes_keep_what_each_has_measured() -> None:
    first, second = Cache("opara", CPU), Cache("opara", CPU)
    first.add({"a": 1})
    second.add({"b": 2})
    assert Cache("opara", CPU).measured == {"a": 1, "b": 2}


def test_a_cache_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path / "file"))
    cache = Cache("opara", CPU)
    with pytest.warns(UserWarning, match="cannot be written"):
        cache.add({"a": 1})
    assert cache["a"] == 1


# The system


@pytest.mark.parametrize(
    ("option", "right"), [("resource", "shared_memory"), ("launch_order", "breadth_first"), ("classify", "measured, table")]
)
def test_wrong_options_are_told(option: str, right: str) -> None:
    with pytest.raises(BadOption, match=rf"system\.{option} is wrong, not one of .*{right}"):
        Opara(**{option: "wrong"})


@pytest.mark.parametrize("order", launch_order.ORDERS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_agrees_with_the_module_in_any_order(order: str, device: str) -> None:
    module, inputs = mixed(device)
    prepared = Opara(launch_order=order).prepare(module, inputs)
    assert prepared.schedule is not None and prepared.schedule.system == "opara"
    for _ in range(3):
        x = torch.randn_like(inputs[0])
        with torch.no_grad():
            assert relative_error(prepared(x), module(x)) < (1e-5 if device == "cpu" else 1e-2)
    prepared.close()


@pytest.mark.parametrize("model", ["squeezenet", "efficientnet_b0_cifar10"])
def test_agrees_with_eager_on_models_of_the_zoo(model: str) -> None:
    loaded = models.load(model, 1)
    prepared = systems.load("opara").prepare(loaded.module, loaded.inputs)
    inputs = loaded.fresh_inputs(11)
    with torch.no_grad():
        assert relative_error(prepared(*inputs), loaded.module(*inputs)) < 1e-4
    prepared.close()


@pytest.mark.parametrize("resource", profiler.RESOURCES)
def test_the_options_reach_the_algorithms(monkeypatch: pytest.MonkeyPatch, resource: str) -> None:
    program = capture(*mixed())
    n = len(program.graph)
    chance = random.Random(3)
    kernels = [
        Kernel("k", 1, chance.randrange(32, 1024, 32), chance.randrange(16, 128), chance.randrange(0, 1 << 15), 0.5, 0.1)
        for _ in range(n)
    ]
    known = Profile(tuple(OperatorProfile(0.1, (k,)) for k in kernels), Capacity(2048, 65536, 1 << 17))
    monkeypatch.setattr("systems.opara.system.profile", lambda *_: known)
    memory, demand = intensity.memory_intensive(program, "table"), known.demand(resource)
    for name, order_of in launch_order.ORDERS.items():
        schedule = Opara(resource=resource, launch_order=name, classify="table").plan(program)
        assert schedule.order == order_of(program.graph, memory, demand)
        assert schedule.streams == allocate_streams(program.graph)
        assert schedule.search["seconds"] >= schedule.search["allocation_seconds"] > 0
        assert ("occupancy" in schedule.search) == (name in launch_order.PROFILED)


def test_a_schedule_alone_runs_no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = mixed()
    monkeypatch.setattr("systems.scheduling.program.Program.execute", lambda *_: pytest.fail("an operator ran"))
    schedule = Opara().schedule(module, inputs)
    verify(schedule.graph, schedule)
    monkeypatch.undo()


def test_the_cpu_executor_launches_each_stream_in_launch_order() -> None:
    """On a stream the operators run in the schedule's order, whatever the order of capture; Opara's streams are chains, so
    only a schedule made for this can show it.
    """

    class Free(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [x.relu(), x.tanh(), x.sigmoid(), x.neg(), x.exp(), x.abs()]

    program = capture(Free(), (torch.randn(4),))
    order, streams = (4, 1, 5, 3, 0, 2), (0, 1, 0, 1, 0, 1)
    executor = CpuExecutor(program, Schedule(program.graph, "by hand", order, streams, ()))
    seen: list[tuple[int, float, float]] = []
    executor.observe = lambda *ran: seen.append(ran)
    executor(torch.randn(4))
    executor.close()
    for s in (0, 1):
        of = [v for v, _, _ in sorted(seen, key=lambda ran: ran[1]) if streams[v] == s]
        assert of == [v for v in order if streams[v] == s]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_profiled_down_to_its_kernels() -> None:
    loaded = models.load("googlenet", 1, device="cuda")
    program = capture(loaded.module, loaded.inputs)
    found = profile(program)
    assert found is not None and found.capacity is not None and found.capacity.threads >= 1024
    for operator, profiled in zip(program.graph.operators, found.operators, strict=True):
        if operator.name in ("conv2d", "batch_norm", "relu", "max_pool2d", "cat", "linear"):
            assert profiled.kernels and profiled.milliseconds > 0
        for k in profiled.kernels:
            assert k.blocks > 0 and 0 < k.threads <= 1024 and k.registers > 0 and k.shared_memory >= 0
            assert k.occupancy is None or 0 <= k.occupancy <= 1
    assert max(found.demand("largest_share")) <= 1 and max(found.demand("shared_memory")) > 0
    assert profile(program, measure=False) == found
    assert intensity.ridge_point(torch.device("cuda", 0), torch.float32, True) > 1
