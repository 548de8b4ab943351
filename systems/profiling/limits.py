"""How fast a model could run at all: its critical path, beside the time that its operators keep the device busy."""

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.graph.program import Program

PASSES = 5
WARM_UP_PASSES = 2
LABEL = "operator:"


def measure(module: nn.Module, inputs: tuple[Tensor, ...], program: Program | None = None) -> dict[str, Any]:
    """Measure every operator of `module` alone, and from that the limits of any schedule of them.

    critical_path_ms: the longest chain of dependent operators, each at its own measured time; no schedule of these kernels
    is faster. busy_ms: the sum over all of them; no schedule without concurrency is faster. On a GPU an operator's time is
    that of its kernels and copies (source "kernels"), on a CPU that of the call (source "host"). Times are medians over
    PASSES runs. `program`: the module as captured, where that has been done. Raises
    Unsupported where the module cannot be captured.
    """
    program = program or capture(module, inputs)
    if inputs[0].is_cuda:
        times, kernels = kernel_times(program, inputs)
        source = "kernels"
    else:
        times, kernels = host_times(program, inputs), 0
        source = "host"
    return {
        "critical_path_ms": critical_path(program.graph, times),
        "busy_ms": sum(times),
        "operators": len(program.graph),
        "kernels": kernels,
        "width": program.graph.width,
        "source": source,
    }


def critical_path(graph: OperatorGraph, times: Sequence[float]) -> float:
    """The largest sum of `times` (one an operator) along a chain of dependent operators."""
    finish: list[float] = []
    for v, producers in enumerate(graph.predecessors):
        finish.append(times[v] + max((finish[u] for u in producers), default=0.0))
    return max(finish, default=0.0)


def host_times(program: Program, inputs: Sequence[Tensor]) -> list[float]:
    """Milliseconds of each operator's call on a CPU."""
    samples: list[list[float]] = [[] for _ in program.calls]
    for i in range(WARM_UP_PASSES + PASSES):
        start = perf_counter()

        def each(v: int, _output: Any, warm: bool = i >= WARM_UP_PASSES) -> None:
            nonlocal start
            if warm:
                samples[v].append((perf_counter() - start) * 1e3)
            start = perf_counter()

        program.run(inputs, each)
    return [median(s) for s in samples]


def kernel_times(program: Program, inputs: Sequence[Tensor]) -> tuple[list[float], int]:
    """Milliseconds of the kernels and copies that each operator launches, and how many all of them launch.

    A kernel belongs to the operator whose call launched it, by correlation id.
    """
    values_of: list[list[float]] = [[] for _ in program.calls]
    for _ in range(WARM_UP_PASSES):
        program.run(inputs)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(PASSES):
            labelled_run(program, inputs)
        torch.cuda.synchronize()
    kernels = 0
    for event in profiler.events():
        # The label stands on the CPU's timeline and, as an annotation, on the device's too.
        if event.name.startswith(LABEL) and event.device_type == torch.autograd.DeviceType.CPU:
            durations = _kernel_microseconds(event)
            values_of[int(event.name.removeprefix(LABEL))].append(sum(durations) / 1e3)
            kernels += len(durations)
    return [median(v) for v in values_of], kernels // PASSES


@torch.no_grad()
def labelled_run(program: Program, inputs: Sequence[Tensor]) -> None:
    """Run all operators in the order of capture, operator v under the label LABEL + v for a profiler."""
    values: list[Any] = [None] * len(program.graph)
    last = program.last_consumers()
    for v in range(len(program.graph)):
        with record_function(f"{LABEL}{v}"):
            values[v] = program.execute(v, values, inputs)
        for u in last[v]:
            values[u] = None


def _kernel_microseconds(event: Any) -> list[float]:
    durations = [k.duration for k in event.kernels]
    for child in event.cpu_children:
        durations += _kernel_microseconds(child)
    return durations
