"""When each operator of one call of a cell ran, and on which stream; under any system."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from results.cell import Cell
from results.timeline import COMPUTE, MEMORY, UNKNOWN, Bar, Timeline
from runners.machine.environment import cpu_name, libraries
from runners.measurements.limits import measured as limits_of
from systems.base import Prepared, Unsupported
from systems.compilers.compiled import Compiled
from systems.profiling import intensity, profiler
from systems.profiling.trace import DeviceEvent, Event, KernelEvent, exported, of_one_call, outermost_operators
from systems.scheduling.execution.cpu_executor import CpuExecutor
from systems.scheduling.execution.scheduled import Scheduled
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program

from .calls import synchronize
from .session import Session

WARM_UP_CALLS = 5
CALLS = 9  # of which the shortest is drawn
TABLE = "table"
INDUCTORS = re.compile(r"^graph_\d+_\w+?_(fused_\w+?)_\d+$")  # the name of a kernel that Inductor made
Calls = Callable[[], Any]


class Incorrect(Exception):
    """The system's output is not eager's; the message is the reason, in one line."""


def of_cell(cell: Cell, visible_device: str, report: Callable[[str], None], classify: str) -> Timeline:
    """The timeline of one call of a cell.

    Args:
        cell: what is run.
        visible_device: the device as NVML names it.
        report: told what is being done now.
        classify: what tells the kinds of operators, "measured" or "table".

    Raises:
        Unsupported, BadModel, BadOption: as Session. Unsupported also on a CPU for what runs operators of its own there,
            which nobody sees.
        Incorrect: what ran is not what was asked for.
    """
    session = Session(cell, visible_device, report)
    if cell.device == "cpu":
        torch._inductor.config.cpp.enable_kernel_profile = True  # else nobody sees the kernels that Inductor makes either
    session.prepare()
    if cell.device == "cpu" and isinstance(session.prepared, Compiled):
        raise Unsupported("on a CPU a timeline shows PyTorch's operators, and this system runs its own")
    report("correctness")
    correctness = session.compare()
    if correctness.reason is not None:
        raise Incorrect(correctness.reason)
    report("classifying operators")
    try:
        program = session.program or capture(session.module, session.inputs)
    except Unsupported:  # its operators are then known by the names that the profiler gives them
        program = None
    report("recording")
    timeline = record(session.prepared, program, session.inputs, classify, cell)
    if not isinstance(session.prepared, Scheduled):
        return timeline  # the operators that it makes of the model's are not known
    report("measuring limits")
    return replace(timeline, limits=limits_of(session, session.prepared.program))


def record(prepared: Prepared, program: Program | None, inputs: tuple[Tensor, ...], classify: str, cell: Cell) -> Timeline:
    """One call of `prepared`, the shortest of a few.

    On a GPU the kernels and copies as torch.profiler saw them run, each on its stream. Of a call that replays a CUDA Graph
    those of the graph, without the copies that it makes of inputs and outputs, on the streams that CUDA puts the graph's
    branches on; they need not be the schedule's. On a CPU, for a schedule, the operators as its worker threads ran them.
    For any other system the operators that torch.profiler saw called by no other, a stream a thread.

    Args:
        prepared: what is called.
        program: the module as captured; its operators tell the kinds.
        inputs: of a call.
        classify: measured or table.
        cell: what runs.
    """
    call = partial(prepared, *inputs)
    scheduled = prepared.schedule.stream_count if isinstance(prepared, Scheduled) else None
    for _ in range(WARM_UP_CALLS):
        call()
    if inputs[0].is_cuda:
        synchronize("cuda")
        by_kernel = _by_kernel(program, classify)
        bars = kernel_bars(of_one_call(prepared.without_copies(*inputs)), by_kernel)
        gpu = torch.cuda.get_device_name(inputs[0].device)
        return Timeline(cell, "kernels of torch.profiler", tuple(bars), scheduled, machine=_with_torch(gpu))
    if isinstance(prepared, CpuExecutor):
        source, one = "worker threads", partial(_scheduled, prepared, call, kinds(prepared.program, classify))
    else:
        source, one = "operators of torch.profiler", partial(_profiled, call, _by_shapes(program, classify), classify)
    calls = (one() for _ in range(CALLS))
    shortest = min(calls, key=lambda bars: max((bar.end for bar in bars), default=0.0))
    return Timeline(cell, source, tuple(shortest), scheduled, machine=_with_torch(cpu_name()))


def _with_torch(place: str) -> str:
    """A GPU or a CPU, and the version of torch there."""
    return f"{place}, torch {libraries()['torch']}"


def kinds(program: Program, classify: str) -> list[str]:
    """For each operator of a program whether it is compute- or memory-intensive."""
    return [MEMORY if memory else COMPUTE for memory in intensity.memory_intensive(program, classify)]


def _scheduled(executor: CpuExecutor, call: Calls, kind: list[str]) -> list[Bar]:
    seen: list[tuple[int, float, float]] = []
    executor.observe = lambda *ran: seen.append(ran)
    try:
        call()
    finally:
        executor.observe = None
    zero = min(begin for _, begin, _ in seen)
    operators, streams = executor.program.graph.operators, executor.schedule.streams
    return [
        Bar(
            stream=streams[v],
            name=operators[v].name,
            start=(begin - zero) * 1e3,
            duration=(end - begin) * 1e3,
            kind=kind[v],
            details={"operator": v, "target": operators[v].target},
        )
        for v, begin, end in seen
    ]


def _profiled(call: Calls, by_shapes: dict[Any, str], classify: str) -> list[Bar]:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        call()
    events = outermost_operators(exported(profiled))
    threads = list(dict.fromkeys(e.thread[1] for e in events))
    bars = []
    for event in events:
        inductors = INDUCTORS.match(event.name)
        name = inductors[1] if inductors else event.name.rpartition("::")[2].rstrip("_")
        shapes = tuple(_shapes(event.arguments.get("Input Dims", [])))
        if inductors:  # several operators, which the name does not tell apart
            kind = UNKNOWN
        elif classify == TABLE:
            kind = MEMORY if intensity.in_table(name) else COMPUTE
        else:  # of TorchScript's operators the arguments are the last of what lies on its stack
            keys = (_known_as(name, shapes[i:]) for i in range(len(shapes) + 1))
            kind = next((by_shapes[key] for key in keys if key in by_shapes), UNKNOWN)
        details = {"target": event.name, "shapes": [list(s) for s in shapes]}
        bars.append(_bar(event, events[0].begin_us, threads.index(event.thread[1]), name, kind, details))
    return bars


def kernel_bars(events: Sequence[DeviceEvent], by_kernel: dict[Any, tuple[str, str]]) -> list[Bar]:
    """A bar for each event on the device, in the order of time, a row for each lane of a stream.

    Args:
        by_kernel: Name and kind of the operators that launch a kernel, by its name, blocks and threads. A kernel that is not
            among them goes by its own name; copies are memory-intensive.
    """
    lanes = apart(events)
    rows = sorted(set(lanes))
    bars = []
    for event, lane in zip(events, lanes, strict=True):
        name, kind = event.name.partition("<")[0].rpartition("::")[2], MEMORY
        if isinstance(event, KernelEvent):
            key = event.name, prod(event.grid), prod(event.block)
            name, kind = by_kernel.get(key, (name, UNKNOWN))
        details = {"kernel": event.name, **event.arguments}
        bars.append(_bar(event, events[0].begin_us, rows.index(lane), name, kind, details))
    return bars


def apart(events: Iterable[DeviceEvent]) -> list[tuple[int, int]]:
    """For each event on the device, in the order of time, its stream and a lane.

    The lane is 0, or more where the profiler puts several events that overlap on one stream, as it may for the branches of
    one CUDA Graph. Invariant: `ends[stream][lane]` is when that lane is free; an event takes the first lane that is.
    """
    ends: dict[int, list[float]] = {}
    lanes = []
    for event in events:
        free = ends.setdefault(event.stream, [])
        lane = next((i for i, end in enumerate(free) if end <= event.begin_us), len(free))
        free[lane : lane + 1] = [event.end_us]
        lanes.append((event.stream, lane))
    return lanes


def _bar(event: Event, zero_us: float, stream: int, name: str, kind: str, details: dict[str, Any]) -> Bar:
    return Bar(stream, name, (event.begin_us - zero_us) / 1e3, event.duration_us / 1e3, kind, details)


def _by_shapes(program: Program | None, classify: str) -> dict[Any, str]:
    """What kind an operator is, by its name and the shapes of its tensors, from the operators of the captured program."""
    if program is None or classify == TABLE:
        return {}
    kind_by_shapes = {}
    for operator, kind in zip(program.graph.operators, kinds(program, classify), strict=True):
        arguments = [program.value(a) for a in tree_leaves(program.calls[operator.id].args)]
        shapes = tuple(tuple(a.shape) for a in arguments if isinstance(a, Tensor) and a.dim())
        kind_by_shapes[_known_as(operator.name, shapes)] = kind
    return kind_by_shapes


def _known_as(name: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """Convolutions have several names, and a compiler may take their bias out: input and weight tell them."""
    return ("convolution", shapes[:2]) if "conv" in name else (name, shapes)


def _shapes(dimensions: Any) -> Iterable[tuple[int, ...]]:
    """The shapes in a trace's "Input Dims", one after another; a list of tensors is a list of shapes there."""
    for entry in dimensions:
        if entry and isinstance(entry[0], list):
            yield from _shapes(entry)
        elif entry:
            yield tuple(entry)


def _by_kernel(program: Program | None, classify: str) -> dict[Any, tuple[str, str]]:
    """By (kernel, blocks, threads): the names of the operators that launch it, and the kind of most of them.

    A replayed CUDA Graph does not say which operator a kernel is from. So its kernels are recognised by those that the
    operators launch one by one in this process; a profile in the cache may have another process's kernels. Nothing tells
    two operators apart that launch the same kernel.
    """
    if program is None:
        return {}
    launching: dict[Any, list[int]] = {}
    for v, operator in enumerate(profiler.on_gpu(program)):
        for kernel in operator.kernels:
            launching.setdefault((kernel.name, kernel.num_blocks, kernel.num_threads), []).append(v)
    kind = kinds(program, classify)
    by_kernel = {}
    for key, operators in launching.items():
        names = dict.fromkeys(program.graph.operators[v].name for v in operators)
        by_kernel[key] = "/".join(names), Counter(kind[v] for v in operators).most_common(1)[0][0]
    return by_kernel
