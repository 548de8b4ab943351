"""Opara as a system."""

import random
import time
from collections.abc import Sequence

import pytest
import torch
from modules import mixed
from torch import Tensor, nn

import models
import systems
from runners.measurements.correctness import relative_error
from systems.base import BadOption
from systems.opara.demand import RESOURCES, demand
from systems.opara.system import Opara
from systems.profiling import intensity
from systems.profiling.profile import Capacity, Kernel, OperatorProfile, Profile
from systems.profiling.profiler import profile
from systems.scheduling.execution.cpu_executor import CpuExecutor
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.graph.part import alone
from systems.scheduling.graph.program import Call, Input
from systems.scheduling.plans import launch_order
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stream_allocator import allocate_streams, needed_waits
from systems.scheduling.plans.verify import verify

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


pytestmark = pytest.mark.usefixtures("cache_folder")


@pytest.mark.parametrize(
    ("option", "right"), [("resource", "shared_memory"), ("launch_order", "breadth_first"), ("classify", "measured, table")]
)
def test_wrong_options_are_told(option: str, right: str) -> None:
    with pytest.raises(BadOption, match=rf"system\.{option}=wrong is not one of .*{right}"):
        Opara(**{option: "wrong"})


def test_the_papers_opara_goes_by_a_table() -> None:
    made = {choice: systems.load(choice) for choice in ("opara", "opara_paper", "opara_shared_memory")}
    assert {choice: (one.classify, one.resource, one.launch_order) for choice, one in made.items()} == {  # type: ignore[attr-defined]
        "opara": ("measured", "largest_share", "opara"),
        "opara_paper": ("table", "largest_share", "opara"),
        "opara_shared_memory": ("table", "shared_memory", "opara"),
    }


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


@pytest.mark.parametrize("model", ["squeezenet", pytest.param("efficientnet_b0_cifar10", marks=pytest.mark.slow)])
def test_agrees_with_eager_on_models_of_the_zoo(model: str) -> None:
    loaded = models.load(model, 1)
    prepared = systems.load("opara").prepare(loaded.module, loaded.inputs)
    inputs = loaded.fresh_inputs(11)
    with torch.no_grad():
        assert relative_error(prepared(*inputs), loaded.module(*inputs)) < 1e-4
    prepared.close()


@pytest.mark.parametrize("resource", RESOURCES)
def test_the_options_reach_the_algorithms(monkeypatch: pytest.MonkeyPatch, resource: str) -> None:
    program = capture(*mixed())
    n = len(program.graph)
    chance = random.Random(3)
    kernels = [
        Kernel(
            name="k",
            milliseconds=0.1,
            grid=(1, 1, 1),
            block=(chance.randrange(32, 1024, 32), 1, 1),
            registers=chance.randrange(16, 128),
            shared_memory=chance.randrange(0, 1 << 15),
            achieved_occupancy=0.5,
        )
        for _ in range(n)
    ]
    times = [chance.random() for _ in kernels]
    operators = tuple(OperatorProfile(time, (k,)) for time, k in zip(times, kernels, strict=True))
    known = Profile("a GPU", ("",) * n, operators, Capacity(2048, 65536, 1 << 17, 32, 1024, 132))
    monkeypatch.setattr("systems.opara.system.profile", lambda *_: known)
    memory, demands = intensity.memory_intensive(program, "table"), demand(known, resource)
    for name, order_of in launch_order.ORDERS.items():
        schedule = Opara(resource=resource, launch_order=name, classify="table").plan(program)
        assert schedule.order == order_of(program.graph, memory, times if name == "critical_path" else demands)
        assert schedule.streams == allocate_streams(program.graph)
        assert schedule.search.seconds >= schedule.search.allocation_seconds > 0
        assert (schedule.search.occupancy is not None) == (name in launch_order.PROFILED)


def test_the_time_of_allocation_holds_that_of_the_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(graph: OperatorGraph, streams: Sequence[int]) -> tuple[tuple[int, int], ...]:
        time.sleep(0.2)
        return needed_waits(graph, streams)

    monkeypatch.setattr("systems.opara.system.needed_waits", slow)
    search = Opara(launch_order="depth_first").schedule(*mixed()).search
    assert search is not None and search.allocation_seconds is not None and search.profile_seconds is not None
    assert search.seconds >= search.allocation_seconds >= 0.2 > search.profile_seconds


def test_a_schedule_alone_runs_no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = mixed()
    monkeypatch.setattr("systems.scheduling.graph.program.Program.execute", lambda *_: pytest.fail("an operator ran"))
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
    operator_profile = profile(program)
    assert (
        operator_profile is not None and operator_profile.capacity is not None and operator_profile.capacity.threads >= 1024
    )
    for operator, profiled in zip(program.graph.operators, operator_profile.operators, strict=True):
        if operator.name in ("conv2d", "batch_norm", "relu", "max_pool2d", "cat", "linear"):
            assert profiled.kernels and profiled.milliseconds > 0
        for k in profiled.kernels:
            assert k.num_blocks > 0 and 0 < k.num_threads <= 1024 and k.registers > 0 and k.shared_memory >= 0
            assert k.achieved_occupancy is None or 0 <= k.achieved_occupancy <= 1
            assert 0 < operator_profile.capacity.theoretical_occupancy(k) <= 1
        if profiled.kernels:
            assert profiled.bytes_read > 0 and profiled.bytes_written > 0
    assert max(demand(operator_profile, "largest_share")) <= 1 and max(demand(operator_profile, "shared_memory")) > 0
    assert operator_profile.capacity.blocks >= 16 and operator_profile.capacity.num_multiprocessors > 1
    assert Profile.from_json(operator_profile.to_json()) == operator_profile
    assert profile(program, measure=False) == operator_profile
    assert intensity.ridge_point(torch.device("cuda", 0), torch.float32, True) > 1


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_a_vendors_convolution_with_a_residual_has_the_operations_of_the_convolution() -> None:
    """It has no form without data, and torch's counter does not know it. Its weight is its third argument."""
    x, residual, weight = torch.randn(1, 8, 5, 5), torch.randn(1, 16, 5, 5), torch.randn(16, 8, 3, 3)
    function = torch.ops.mkldnn._convolution_pointwise.binary
    fused = (weight, None, [1, 1], [1, 1], [1, 1], 1, "add", 1.0, "relu", [], "")
    program = alone(
        "conv2d_add_relu", "opweave.fused", Call(function, (Input(0), Input(1), *fused), {}, residual), (x, residual)
    )
    plain = Call(torch.ops.aten.conv2d.default, (Input(0), weight, None, [1, 1], [1, 1]), {}, residual)
    expected, _ = intensity.work(alone("conv2d", "aten.conv2d.default", plain, (x,)), 0)
    assert intensity.work(program, 0)[0] == expected == 2 * 16 * 25 * 8 * 9
