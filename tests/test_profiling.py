"""The profiling room: classes of operators, traces, profiles."""

import json
import random
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from modules import Lambda, mixed
from rewriting import COUNTING
from torch import Tensor, nn

import models
from systems.base import Unsupported
from systems.opara.demand import demand
from systems.profiling import intensity, profiler, trace
from systems.profiling.profile import Capacity, Kernel, OperatorProfile, Profile
from systems.profiling.profiler import by_operator, from_entry, to_entry
from systems.profiling.trace import launched_under, on_device, outermost_operators
from systems.scheduling.graph.capture import capture
from systems.scheduling.passes.fuse_elementwise import fuse_elementwise

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("cache_folder")


# Compute- and memory-intensive operators


def kind_of(model: str, method: str, **options: Any) -> dict[str, set[bool]]:
    """For each operator name of a model whether it is memory-intensive, in the cases that occur."""
    loaded = models.load(model, 1, **options)
    program = capture(loaded.module, loaded.inputs)
    kinds_by_operator = defaultdict(set)
    for operator, memory in zip(program.graph.operators, intensity.memory_intensive(program, method), strict=True):
        kinds_by_operator[operator.name].add(memory)
    return dict(kinds_by_operator)


@pytest.mark.slow
def test_the_papers_table() -> None:
    """What the paper names: Conv, Sgemm, Embedding and Arange on one side, Relu, Add, To and Ones on the other."""
    kinds_by_operator = kind_of("t5", "table", sequence=8, decoder_sequence=8)
    assert all(
        kinds_by_operator[name] == {False} for name in ("linear", "embedding", "arange", "scaled_dot_product_attention")
    )
    assert all(kinds_by_operator[name] == {True} for name in ("add", "min", "relu", "_to_copy", "zeros", "view", "mean"))
    assert kind_of("squeezenet", "table").items() >= {"conv2d": {False}, "max_pool2d": {True}, "cat": {True}}.items()
    assert intensity.in_table("ones") and not intensity.in_table("addmm")


@pytest.mark.parametrize("method", intensity.METHODS)
def test_elementwise_operators_stay_memory_intensive_when_they_are_fused(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(intensity, "ridge_point", lambda *_: 10.0)
    module = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU()).eval()
    program, _ = fuse_elementwise(capture(module, (torch.randn(1, 3, 32, 32),)), COUNTING)
    assert [o.name for o in program.graph.operators] == ["conv2d", "batch_norm_relu"]
    assert intensity.memory_intensive(program, method) == [False, True]


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


def test_work_of_attention_whose_keys_have_fewer_heads_is_that_of_repeated_ones() -> None:
    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def operations(num_heads: int) -> int:
        keys = torch.randn(2, num_heads, 6, 16)
        program = capture(Attention().eval(), (torch.randn(2, 8, 6, 16), keys, keys.clone()))
        (v,) = (o.id for o in program.graph.operators if "scaled_dot_product" in o.name)
        return intensity.work(program, v)[0]

    assert operations(2) == operations(8) == 2 * 2 * (2 * 8 * 6 * 6 * 16)


def test_work_of_expanded_repeated_and_whole_numbers() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.expand(8, 4, 4) * x, torch.arange(4) + 1

    program = capture(Odd(), (torch.randn(1, 4, 4),))
    work = {o.name: intensity.work(program, o.id) for o in program.graph.operators}
    assert work["mul"] == (16 + 16 + 128, 4 * (16 + 16 + 128)) and work["expand"] == (0, 0)
    assert work["add"] == (0, 2 * 4 * 8)


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
        (
            Kernel("winograd", 0.02, (4, 2, 1), (128, 1, 1), 128, 48 << 10, 0.25),
            Kernel("bias", 0.01, (4, 2, 1), (32, 32, 1), 32, 0, 0.5),
        ),
    ),
    OperatorProfile(0.0),
    OperatorProfile(0.006, (Kernel("relu", 0.006, (1, 1, 1), (128, 1, 1), 32, 0, 0.25),)),
]


HOPPER = Capacity(2048, 65536, 228 << 10, blocks=32, reserved_shared_memory=1024, num_multiprocessors=132)


def operators_of(events: list[dict[str, Any]], count: int) -> list[OperatorProfile]:
    launches = by_operator(trace.read({"traceEvents": events}), count)
    return [profiler._operator(launched) for launched in launches]


def whole(operators: list[OperatorProfile], capacity: Capacity | None = None) -> Profile:
    return Profile("a device", tuple(f"op{i}()" for i in range(len(operators))), tuple(operators), capacity)


def test_kernels_belong_to_the_operator_that_launched_them() -> None:
    assert operators_of(EVENTS, 3) == PROFILE


@given(st.permutations(EVENTS))
def test_the_place_in_a_trace_says_nothing(events: list[dict[str, Any]]) -> None:
    assert operators_of(events, 3) == PROFILE


def test_when_a_kernel_ran_says_nothing() -> None:
    chance = random.Random(0)
    for _ in range(20):
        moved = [{**e, "ts": chance.uniform(0, 1000)} if e.get("cat") in ("kernel", "gpu_memcpy") else e for e in EVENTS]
        assert operators_of(moved, 3) == PROFILE


def test_a_trace_that_does_not_say_all_is_refused() -> None:
    without = [e for e in EVENTS if e.get("args", {}).get("correlation") != 4 or e["cat"] == "kernel"]
    with pytest.raises(ValueError, match="what launched relu"):
        operators_of(without, 3)
    with pytest.raises(ValueError, match="operator 3 is not in the trace"):
        operators_of(EVENTS, 4)
    events = trace.read({"traceEvents": EVENTS})
    assert launched_under(events, "nothing:") == {}
    assert [e.name for e in on_device(events)] == [*("winograd", "relu", "foreign", "bias", "Memcpy DtoD", "late")]


def test_a_profiler_that_saw_no_kernel_is_refused() -> None:
    launches = by_operator(trace.read({"traceEvents": EVENTS}), 3)
    program = capture(*mixed())
    assert profiler.seen(program, [launches, launches]) == [launches, launches]
    with pytest.raises(ValueError, match="saw no kernel"):
        profiler.seen(program, [launches, [[], [], []]])
    nothing = capture(Lambda(lambda x: x.view(-1)), (torch.ones(2, 3),))
    assert profiler.seen(nothing, [[[]]]) == [[[]]]


def test_an_occupancy_that_the_profiler_does_not_give_is_none() -> None:
    events = json.loads(json.dumps(EVENTS))
    for event in events:
        event.get("args", {}).pop("est. achieved occupancy %", None)
    operators = operators_of(events, 3)
    assert operators[2].kernels[0].achieved_occupancy is None and whole(operators).occupancy() is None


def test_the_traces_of_the_profiler_itself() -> None:
    """As far as a CPU goes: labels are found, nothing was launched, and an operator's callees are left out."""
    module, (x,) = mixed()
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        for v in range(2):
            with torch.profiler.record_function(f"{profiler.LABEL}{v}"):
                module(x)
    events = trace.exported(profiled)
    assert by_operator(events, 2) == [[], []]
    names = [e.name for e in outermost_operators(events)]
    assert names == 2 * names[: len(names) // 2] and names.count("aten::conv2d") == 4 and "aten::convolution" not in names


def test_demand_by_either_measure() -> None:
    known = whole(PROFILE, HOPPER)
    assert demand(known, "shared_memory") == [48 << 10, 0.0, 0.0]
    # The second kernel's 1024 threads are half of a multiprocessor's, as are its 32 * 1024 registers.
    assert demand(known, "largest_share") == [0.5, 0.0, 128 / 2048]
    few = whole(PROFILE, replace(HOPPER, registers=40960))
    assert demand(few, "largest_share")[0] == 32 * 1024 / 40960
    narrow = whole(PROFILE, replace(HOPPER, threads=4096, registers=1 << 20, shared_memory=64 << 10))
    assert demand(narrow, "largest_share")[0] == 48 / 64
    assert demand(whole(PROFILE), "shared_memory") == [0.034, 0.0, 0.006]
    assert known.occupancy() == pytest.approx((0.25 * 20 + 0.5 * 10 + 0.25 * 6) / 36)


# What a kernel takes of a multiprocessor


@pytest.mark.parametrize(
    ("threads", "registers", "blocks"),
    [(128, 37, 12), (320, 37, 4), (1024, 32, 2), (1024, 64, 1), (32, 16, 32), (1024, 65, 0), (33, 16, 32)],
)
def test_occupancy_by_registers_and_threads(threads: int, registers: int, blocks: int) -> None:
    """The first two are the examples of the CUDA C++ Best Practices Guide, "Calculating Occupancy": 75 % and 63 %."""
    kernel = Kernel("k", 1.0, (1, 1, 1), (threads, 1, 1), registers, 0)
    assert HOPPER.resident_blocks(kernel) == blocks
    assert HOPPER.theoretical_occupancy(kernel) == blocks * -(-threads // 32) / 64


@pytest.mark.parametrize(
    ("shared_memory", "blocks"), [(0, 16), (13 << 10, 16), (48 << 10, 4), (227 << 10, 1), (228 << 10, 0)]
)
def test_occupancy_by_shared_memory(shared_memory: int, blocks: int) -> None:
    """CUDA takes a KiB of each block on an H100: four blocks of 48 KiB fill 196 of 228 KiB, a fifth has no room."""
    assert HOPPER.resident_blocks(Kernel("k", 1.0, (1, 1, 1), (16, 8, 1), 32, shared_memory)) == blocks


def test_a_gpus_capacity_is_read_by_cudas_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU that need not be here: CUDA's runtime says what torch does not."""
    cuda_streams = pytest.importorskip("systems.scheduling.execution.cuda_streams")
    real, limits = cuda_streams.cudart, {106: 32, 111: 1024}
    stand_in = SimpleNamespace(
        cudaDeviceAttr=real.cudaDeviceAttr,
        cudaError_t=real.cudaError_t,
        cudaDeviceGetAttribute=lambda limit, index: (real.cudaError_t.cudaSuccess, limits[int(limit)]),
    )
    properties = SimpleNamespace(
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_multiprocessor=228 << 10,
        multi_processor_count=132,
    )
    monkeypatch.setattr(cuda_streams, "cudart", stand_in)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert profiler.capacity_of(torch.device("cuda", 0)) == HOPPER


SIZES = st.integers(0, 1 << 40)
DIMENSIONS = st.tuples(*[st.integers(1, 1 << 31)] * 3)
TIMES = st.floats(0, 1e6)
KERNELS = st.builds(
    Kernel, st.text(), TIMES, DIMENSIONS, DIMENSIONS, st.integers(0, 255), SIZES, st.none() | st.floats(0, 1)
)
OPERATORS = st.builds(OperatorProfile, TIMES, st.lists(KERNELS, max_size=3).map(tuple), SIZES, SIZES)
CAPACITIES = st.builds(Capacity, *[st.integers(32, 1 << 20)] * 4, st.integers(0, 2048), st.integers(1, 200))


@given(st.text(), st.lists(st.tuples(st.text(), OPERATORS), max_size=4), st.none() | CAPACITIES)
def test_a_profile_is_one_json_document(
    device: str, operators: list[tuple[str, OperatorProfile]], capacity: Capacity | None
) -> None:
    known = Profile(device, tuple(s for s, _ in operators), tuple(o for _, o in operators), capacity)
    document = json.loads(json.dumps(known.to_json()))
    assert Profile.from_json(document) == known
    for entry, operator in zip(document["operators"], known.operators, strict=True):
        for kernel_entry, one in zip(entry["kernels"], operator.kernels, strict=True):
            expected = None if capacity is None else capacity.theoretical_occupancy(one)
            assert kernel_entry["theoretical_occupancy"] == expected
        assert (
            from_entry(json.loads(json.dumps(to_entry(operator))), entry["bytes_read"], entry["bytes_written"]) == operator
        )


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("device"),
        lambda d: d["operators"][0].pop("bytes_read"),
        lambda d: d["operators"][0]["kernels"][0].update(grid=[1, 2]),
        lambda d: d["operators"][0]["kernels"][0].update(registers="32"),
        lambda d: d["capacity"].update(threads=None),
        lambda d: d["capacity"].pop("threads"),
        lambda d: d.update(operators={}),
    ],
)
def test_what_is_no_profile_is_refused(change: Any) -> None:
    document = json.loads(json.dumps(whole(PROFILE, HOPPER).to_json()))
    assert Profile.from_json(document) == whole(PROFILE, HOPPER)
    change(document)
    with pytest.raises(ValueError):
        Profile.from_json(document)


@pytest.mark.parametrize(
    "event",
    [
        kernel("k", 1.0, 1.0, 1, grid=[1, 1]),
        kernel("k", 1.0, 1.0, 1, block="[1, 1, 1]"),
        kernel("k", 1.0, 1.0, 1) | {"ts": None},
        kernel("k", 1.0, 1.0, 1) | {"name": 3},
        kernel("k", 1.0, 1.0, 1, stream="7"),  # type: ignore[arg-type]
    ],
)
def test_an_event_that_is_malformed_is_refused(event: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        trace.read({"traceEvents": [event]})
    for nothing in ([], {}, {"traceEvents": {}}, None):
        with pytest.raises(ValueError, match="no Chrome trace"):
            trace.read(nothing)


# The cache
