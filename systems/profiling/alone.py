"""Each kernel of a program alone, in three states of the L2 cache: warm, cold, and as the program's sequence leaves it.

A kernel's time alone depends on what lies in L2 before it. Warm, it runs right after itself. Cold, 256 MiB of other data
are read before it. In sequence, it runs where it stands in the program, whose operators are replayed one after the other
from one captured graph: neither the host nor another kernel holds it up.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
    first_by_signature = {s: v for v, s in reversed([*enumerate(signatures)])}
    return combined(signatures, *_traced(program, list(first_by_signature.values()), turn))


def combined(
    signatures: Sequence[str], sequence: Sequence[Sequence[DeviceEvent]], states: dict[str, list[DeviceEvent]]
) -> dict[str, OperatorProfile]:
    """The operators by their signatures.

    Args:
        signatures: Of all operators, in the order of capture.
        sequence: What each replay of all of them ran, in order.
        states: What "STATE REPEAT OPERATOR" launched: each operator in sequence, and the first of each signature in both
            other states.

    Raises:
        ValueError: A kernel took no time: its trace is damaged.
    """
    alone = {s: _in_states(states, v) for v, s in enumerate(signatures) if f"warm 0 {v}" in states}
    launches = [states[f"in sequence 0 {v}"] for v in range(len(signatures))]
    names = [e.name for events in launches for e in events]
    # Where operators launch other kernels under capture, their times are those of the pass without a graph.
    replays = [run for run in sequence if [e.name for e in run] == names]
    operators, place = [], 0
    for v, (signature, events) in enumerate(zip(signatures, launches, strict=True)):
        is_same = len(alone[signature]) == len(events)
        kernels = []
        for i, event in enumerate(events):
            seen_ms = [run[place + i].duration_us / 1e3 for run in replays]
            if not seen_ms:
                runs = (states[f"in sequence {repeat} {v}"] for repeat in range(REPEATS))
                seen_ms = [run[i].duration_us / 1e3 for run in runs if len(run) == len(events)]
            if min(seen_ms) <= 0:
                raise ValueError(f"the trace says that {event.name} took no time")
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
    program: Program, distinct: Sequence[int], turn: Turn
) -> tuple[list[list[DeviceEvent]], dict[str, list[DeviceEvent]]]:
    """The events of each replay of the sequence, and those of each "STATE REPEAT OPERATOR".

    Each profiler's events are read before the next one begins: afterwards they have lost their durations. Reading takes
    longer than measuring, and leaves the device to others.
    """
    with turn():
        other = torch.zeros(OTHER_BYTES // 4, device=program.device)
        rewind = program.rewinding()
        for _ in range(WARM_UP_PASSES):
            program.run(program.examples)
            rewind()
        executor = execute(program, sequential(program.graph))
        try:
            executor(*program.examples)
            rewind()
            with torch_profile(activities=[ProfilerActivity.CUDA]) as replayed:
                for _ in range(REPLAYS):
                    torch.cuda._sleep(trace.QUEUE_CYCLES)  # the profiler launches a graph more slowly than the GPU runs it
                    executor.replay()  # type: ignore[attr-defined]
                    rewind()
                torch.cuda.synchronize()
        finally:
            executor.close()
    by_launch: dict[int | None, list[DeviceEvent]] = {}
    for event in trace.on_device(trace.exported(replayed)):
        by_launch.setdefault(event.correlation, []).append(event)
    with turn(), torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as launched:
        for i in range(REPEATS):
            _in_sequence(program, f"{LABEL}in sequence {i} ")
            rewind()
        _in_both_states(program, set(distinct), lambda: other.max())
        torch.cuda.synchronize()
    return list(by_launch.values()), trace.launched_under(trace.exported(launched), LABEL)


def _in_sequence(program: Program, label: str) -> None:
    """Run all operators in the order of capture, operator v under the label `label` + v."""
    for v, run in _each(program):
        with record_function(f"{label}{v}"):
            run()


def _in_both_states(program: Program, distinct: set[int], flush: Callable[[], object]) -> None:
    """Run all operators in the order of capture, and those of `distinct` several times warm and cold."""
    for v, run in _each(program):
        if v not in distinct:
            run()
            continue
        for i in range(REPEATS + 1):
            with record_function(f"{LABEL}warm {i} {v}"):
                run()
        for i in range(REPEATS):
            flush()
            with record_function(f"{LABEL}cold {i} {v}"):
                run()


def _each(program: Program) -> Iterator[tuple[int, Callable[[], None]]]:
    """Each operator, and what runs it; between two of them what nobody reads any more is dropped."""
    values: list[Any] = [None] * len(program.graph)
    last = program.last_consumers()
    for v in range(len(program.graph)):

        def run(v: int = v) -> None:
            values[v] = program.execute(v, values, program.examples)

        yield v, run
        for u in last[v]:
            values[u] = None
