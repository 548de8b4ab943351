"""Each kernel alone in three states of L2: what is made of the events of a trace, and a CPU's calls."""

from collections.abc import Sequence

import pytest
import torch

from systems.profiling.alone import REPEATS, combined, operators_alone
from systems.profiling.trace import DeviceEvent, KernelEvent
from systems.scheduling.graph.capture import capture
from tests.modules import Branches

SIGNATURES = ["conv", "relu", "conv"]  # of three operators in sequence
KERNELS = {"conv": ["pad", "gemm"], "relu": ["elementwise"]}


def kernel(name: str, duration_us: float) -> KernelEvent:
    return KernelEvent(name, "kernel", 0.0, duration_us, grid=(4, 1, 1), block=(128, 1, 1), registers=32, shared_memory=0)


def run(durations_us: Sequence[float]) -> list[DeviceEvent]:
    names = [name for signature in SIGNATURES for name in KERNELS[signature]]
    return [kernel(name, duration) for name, duration in zip(names, durations_us, strict=True)]


def states() -> dict[str, list[DeviceEvent]]:
    """Warm takes 1 us a kernel but for the first of a row, cold 9, in sequence without a graph 5."""
    traces: dict[str, list[DeviceEvent]] = {}
    for v, signature in enumerate(SIGNATURES):
        for i in range(REPEATS):
            traces[f"in sequence {i} {v}"] = [kernel(name, 5.0) for name in KERNELS[signature]]
        if v < 2:
            for i in range(REPEATS + 1):
                traces[f"warm {i} {v}"] = [kernel(name, 1.0 if i else 7.0) for name in KERNELS[signature]]
            for i in range(REPEATS):
                traces[f"cold {i} {v}"] = [kernel(name, 9.0) for name in KERNELS[signature]]
    return traces


def test_a_kernel_has_the_median_of_its_places_in_the_replays() -> None:
    replays = [run([2, 20, 3, 4, 40]), run([2, 20, 3, 4, 40]), run([90, 90, 90, 90, 90])]
    operators = combined(SIGNATURES, replays, states())
    assert [k.milliseconds * 1e3 for k in operators["conv"].kernels] == pytest.approx([3, 30])
    assert [k.milliseconds * 1e3 for k in operators["relu"].kernels] == pytest.approx([3])
    assert operators["conv"].milliseconds == pytest.approx(0.033)
    assert [(k.warm_ms, k.cold_ms) for k in operators["conv"].kernels] == [pytest.approx((0.001, 0.009))] * 2


def test_replays_of_other_kernels_say_nothing() -> None:
    """Attention may launch others under capture: then the pass without a graph counts."""
    operators = combined(SIGNATURES, [[kernel("other", 1.0)] * 5], states())
    assert [k.milliseconds * 1e3 for k in operators["conv"].kernels] == pytest.approx([5, 5])


def test_states_that_differ_in_their_kernels_are_unknown() -> None:
    changed = states()
    changed["warm 2 0"] = [kernel("gemm", 1.0)]
    operators = combined(SIGNATURES, [run([1] * 5)], changed)
    assert {(k.warm_ms, k.cold_ms) for k in operators["conv"].kernels} == {(None, None)}
    assert operators["relu"].kernels[0].warm_ms is not None


def test_a_trace_that_has_lost_its_durations_is_no_profile() -> None:
    """CUPTI's events lose them once another profiler has begun."""
    with pytest.raises(ValueError, match="took no time"):
        combined(SIGNATURES, [run([0] * 5)], states())


def test_a_copy_has_no_blocks() -> None:
    copied = states()
    copied |= {f"in sequence {i} 1": [DeviceEvent("Memcpy DtoD", "gpu_memcpy", 0.0, 5.0)] for i in range(REPEATS)}
    operators = combined(SIGNATURES, [], copied)
    assert operators["relu"].kernels[0].num_blocks == 0 and operators["relu"].milliseconds == 0.005


def test_an_operator_that_launches_nothing_takes_nothing() -> None:
    view: dict[str, list[DeviceEvent]] = {f"{state} {i} 0": [] for state in ("warm", "cold") for i in range(REPEATS + 1)}
    operators = combined(["view"], [[]], view | {"in sequence 0 0": []})
    assert operators["view"].milliseconds == 0 and operators["view"].kernels == ()


def test_a_cpu_has_calls_in_place_of_kernels() -> None:
    program = capture(Branches().eval(), (torch.randn(1, 3, 8, 8),))
    operators = operators_alone(program)
    assert set(operators) == {program.signature(v) for v in range(len(program.graph))}
    assert all(o.milliseconds > 0 and not o.kernels for o in operators.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_kernels_are_slower_cold() -> None:
    x = torch.randn(8, 64, 56, 56, device="cuda")
    module = torch.nn.Sequential(torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.ReLU()).cuda().eval()
    program = capture(module, (x,))
    kernels = [k for o in operators_alone(program).values() for k in o.kernels]
    assert kernels and all(k.milliseconds > 0 and k.warm_ms and k.cold_ms for k in kernels)
    assert sum(k.cold_ms or 0 for k in kernels) > sum(k.warm_ms or 0 for k in kernels)
