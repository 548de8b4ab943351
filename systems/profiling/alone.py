"""Each kernel of a program alone, in three states of the L2 cache: warm, cold, and as the program's sequence leaves it.

A kernel's time alone depends on what lies in L2 before it. Warm, it runs right after itself. Cold, 256 MiB of other data
are read before it. In sequence, it runs where it stands in the program, whose operators are replayed one after the other
from one captured graph: neither the host nor another kernel holds it up.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from systems.scheduling.execution.execute import execute
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import sequential

from . import trace
from .profile import Kernel, OperatorProfile
from .profiler import WARM_UP_PASSES, host_times, kernel_of_event
from .trace import DeviceEvent, KernelEvent

REPEATS = 3  # of a kernel in each state
REPLAYS = 5  # of the sequence
OTHER_BYTES = 1 << 28  # that are read before a kernel, several times what any L2 holds
LABEL = "alone:"

Turn = Callable[[], AbstractContextManager[object]]


def operators_alone(program: Program, turn: Turn = nullcontext) -> dict[str, OperatorProfile]:
    """Every distinct operator of `program` by its signature, without its bytes; on a CPU, its call in sequence alone.

    Operators of one signature have the median of their times. A copy stands among the kernels as one without blocks.

    Args:
        turn: What is entered while kernels are timed, for a caller who shares the device.
    """
    signatures = [program.signature(v) for v in range(len(program.graph))]
    if program.device.type != "cuda":
        with turn():
            times = [OperatorProfile(milliseconds) for milliseconds in host_times(program, program.examples)]
        return _by_signature(signatures, times)
    return combined(signatures, *_traced(program, {s: v for v, s in reversed([*enumerate(signatures)])}, turn))


def combined(
    signatures: Sequence[str], sequence: Sequence[Sequence[DeviceEvent]], states: dict[str, list[DeviceEvent]]
) -> dict[str, OperatorProfile]:
    """The operators by their signatures.

    Args:
        signatures: Of all operators, in the order of capture.
        sequence: What each replay of all of them ran, in order.
        states: What "STATE REPEAT OPERATOR" launched: each operator once in sequence, and the first of each signature in
            both other states.
    """
    alone = {s: _in_states(states, v) for v, s in enumerate(signatures) if f"warm 0 {v}" in states}
    launches = [states[f"in sequence 0 {v}"] for v in range(len(signatures))]
    names = [e.name for events in launches for e in events]
    # Where operators launch other kernels under capture, their times are those of the pass without a graph.
    replays = [run for run in sequence if [e.name for e in run] == names]
    operators, place = [], 0
    for signature, events in zip(signatures, launches, strict=True):
        is_same = len(alone[signature]) == len(events)
        kernels = []
        for i, event in enumerate(events):
            seen_ms = [run[place + i].duration_us / 1e3 for run in replays] or [event.duration_us / 1e3]
            warm_ms, cold_ms = alone[signature][i] if is_same else (None, None)
            kernels.append(replace(_kernel(event), milliseconds=median(seen_ms), warm_ms=warm_ms, cold_ms=cold_ms))
        place += len(events)
        operators.append(OperatorProfile(sum(k.milliseconds for k in kernels), tuple(kernels)))
    return _by_signature(signatures, operators)


def _by_signature(signatures: Sequence[str], operators: Sequence[OperatorProfile]) -> dict[str, OperatorProfile]:
    same: dict[str, list[OperatorProfile]] = {}
    for signature, operator in zip(signatures, operators, strict=True):
        same.setdefault(signature, []).append(operator)
    return {signature: _median(group) for signature, group in same.items()}


def _median(operators: Sequence[OperatorProfile]) -> OperatorProfile:
    """One for several of one signature; those that launch other kernels than most (cuDNN may) are left out."""
    shapes = Counter(tuple((k.name, k.grid) for k in o.kernels) for o in operators)
    alike = [o for o in operators if tuple((k.name, k.grid) for k in o.kernels) == shapes.most_common(1)[0][0]]
    kernels = tuple(
        replace(same[0], milliseconds=median(k.milliseconds for k in same))
        for same in zip(*(o.kernels for o in alike), strict=True)
    )
    milliseconds = sum(k.milliseconds for k in kernels) if kernels else median(o.milliseconds for o in alike)
    return OperatorProfile(milliseconds, kernels)


def _in_states(states: dict[str, list[DeviceEvent]], v: int) -> list[tuple[float, float]]:
    """Milliseconds, warm and cold, of what operator v launches: medians over REPEATS, the first run in a row left out.

    None of them where the runs launched different numbers of kernels.
    """
    warm, cold = (
        [states[f"{state} {i} {v}"] for i in range(first, first + REPEATS)] for state, first in (("warm", 1), ("cold", 0))
    )
    if len({len(run) for run in (*warm, *cold)}) > 1:
        return []
    middle = ([median(e.duration_us for e in same) / 1e3 for same in zip(*runs, strict=True)] for runs in (warm, cold))
    return list(zip(*middle, strict=True))


def _kernel(event: DeviceEvent) -> Kernel:
    if isinstance(event, KernelEvent):
        return kernel_of_event(event)
    return Kernel(event.name, event.duration_us / 1e3, (0, 0, 0), (0, 0, 0), 0, 0)


@torch.no_grad()
def _traced(
    program: Program, first_by_signature: dict[str, int], turn: Turn
) -> tuple[list[list[DeviceEvent]], dict[str, list[DeviceEvent]]]:
    """The events of each replay of the sequence, and those of each "STATE REPEAT OPERATOR"."""
    with turn():
        other = torch.zeros(OTHER_BYTES // 4, device=program.device)
        for _ in range(WARM_UP_PASSES):
            program.run(program.examples)
        executor = execute(program, sequential(program.graph))
        try:
            executor(*program.examples)
            with torch_profile(activities=[ProfilerActivity.CUDA]) as replayed:
                for _ in range(REPLAYS):
                    torch.cuda._sleep(trace.QUEUE_CYCLES)  # the profiler launches a graph more slowly than the GPU runs it
                    executor.replay()  # type: ignore[attr-defined]
                torch.cuda.synchronize()
        finally:
            executor.close()
        with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as launched:
            _labelled(program, set(first_by_signature.values()), lambda: other.max())
            torch.cuda.synchronize()
    by_launch: dict[int | None, list[DeviceEvent]] = {}
    for event in trace.on_device(trace.exported(replayed)):
        by_launch.setdefault(event.correlation, []).append(event)
    return list(by_launch.values()), trace.launched_under(trace.exported(launched), LABEL)


def _labelled(program: Program, distinct: set[int], flush: Callable[[], object]) -> None:
    """Run all operators in the order of capture, and those of `distinct` again in both other states."""
    values: list[Any] = [None] * len(program.graph)
    last = program.last_consumers()
    for v in range(len(program.graph)):
        with record_function(f"{LABEL}in sequence 0 {v}"):
            output = program.execute(v, values, program.examples)
        if v in distinct:
            for i in range(REPEATS + 1):
                with record_function(f"{LABEL}warm {i} {v}"):
                    program.execute(v, values, program.examples)
            for i in range(REPEATS):
                flush()
                with record_function(f"{LABEL}cold {i} {v}"):
                    program.execute(v, values, program.examples)
        values[v] = output
        for u in last[v]:
            values[u] = None
