"""runner=timeline: when each operator of one call ran, and on which stream; under any system."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from results.record import system_label
from results.timeline import COMPUTE, MEMORY, UNKNOWN, Bar, Timeline
from runners.cell.session import Session
from runners.request.requests import defaults_only
from systems.base import Prepared, Unsupported
from systems.compilers.compiled import Compiled
from systems.profiling import intensity, profiler
from systems.profiling.kernel_trace import exported, outermost_operators
from systems.scheduling.execution.cpu_executor import CpuExecutor
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program

from . import correctness, kernels, latency

WARM_UP_CALLS = 5
CALLS = 9  # of which the shortest is drawn
TABLE = "table"
USUAL = {"precision": "tf32", "layout": "contiguous", "algorithms": "heuristic"}  # what a title says nothing of
INDUCTORS = re.compile(r"^graph_\d+_\w+?_(fused_\w+?)_\d+$")  # the name of a kernel that Inductor made
Calls = Callable[[], Any]


def run(cell: dict[str, Any], visible_device: str, report: Callable[[str], None]) -> dict[str, Any]:
    """The timeline of one call of a cell, as data. Raises Unsupported, BadModel and BadOption as Session does, and
    Unsupported on a CPU for what runs operators of its own there, which nobody sees.
    """
    session = Session(cell, visible_device, report)
    if cell["device"] == "cpu":
        torch._inductor.config.cpp.enable_kernel_profile = True  # else nobody sees the kernels that Inductor makes either
    session.prepare()
    prepared, module = session.prepared, session.model.module
    assert prepared is not None
    if cell["device"] == "cpu" and isinstance(prepared, Compiled):
        raise Unsupported("on a CPU a timeline shows PyTorch's operators, and this system runs its own")
    report("correctness")
    draws = [session.model.fresh_inputs(cell["seed"] + 1 + i) for i in range(correctness.DRAWS)]
    judged = correctness.measure(module, prepared, draws, cell["precision"])
    if not judged["correct"]:
        return {"status": "incorrect", "reason": judged["reason"]}
    report("classifying operators")
    try:
        program = prepared.program or capture(module, session.inputs)
    except Unsupported:  # its operators are then known by the names that the profiler gives them
        program = None
    how = cell["runner"]["classify"]
    report("recording")
    system = cell["system"]["name"] if defaults_only(cell, "system") else system_label(cell)
    conditions = [cell[key] for key, usual in USUAL.items() if cell[key] != usual]
    title = ", ".join((cell["model"]["name"], system, f"batch {cell['batch']}", *conditions, cell["device"]))
    return {"timeline": record(prepared, program, session.inputs, how, title).to_json()}


def record(prepared: Prepared, program: Program | None, inputs: tuple[Tensor, ...], classify: str, title: str) -> Timeline:
    """One call of `prepared`, the shortest of a few.

    On a GPU the kernels and copies as torch.profiler saw them run, each on its stream; of a call that replays a CUDA Graph
    those of the graph, on the streams that CUDA puts the graph's branches on, which need not be the schedule's. On a CPU,
    for a schedule, the operators as its worker threads ran them; for any other system the operators that torch.profiler saw
    called by no other, a stream a thread. program: the module as captured, by whose operators the kinds are told (classify:
    measured or table).
    """
    call = partial(prepared, *inputs)
    scheduled = prepared.schedule.stream_count if prepared.schedule is not None else None
    for _ in range(WARM_UP_CALLS):
        call()
    if inputs[0].is_cuda:
        latency.synchronize("cuda")
        by_kernel = _by_kernel(program, classify)
        bars = kernel_bars(kernels.of_one_call(call), by_kernel)
        return Timeline(title, "kernels of torch.profiler", tuple(bars), scheduled)
    if isinstance(prepared, CpuExecutor):
        source, one = "worker threads", partial(_scheduled, prepared, call, kinds(prepared.program, classify))
    else:
        source, one = "operators of torch.profiler", partial(_profiled, call, _by_shapes(program, classify), classify)
    calls = (one() for _ in range(CALLS))
    shortest = min(calls, key=lambda bars: max((bar.end for bar in bars), default=0.0))
    return Timeline(title, source, tuple(shortest), scheduled)


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
    threads = list(dict.fromkeys(e["tid"] for e in events))
    bars = []
    for event in events:
        inductors = INDUCTORS.match(event["name"])
        name = inductors[1] if inductors else event["name"].rpartition("::")[2].rstrip("_")
        shapes = tuple(_shapes(event["args"].get("Input Dims", [])))
        if inductors:  # several operators, which the name does not tell apart
            kind = UNKNOWN
        elif classify == TABLE:
            kind = MEMORY if intensity.in_table(name) else COMPUTE
        else:  # of TorchScript's operators the arguments are the last of what lies on its stack
            keys = (_known_as(name, shapes[i:]) for i in range(len(shapes) + 1))
            kind = next((by_shapes[key] for key in keys if key in by_shapes), UNKNOWN)
        details = {"target": event["name"], "shapes": [list(s) for s in shapes]}
        bars.append(_bar(event, events[0]["ts"], threads.index(event["tid"]), name, kind, details))
    return bars


def kernel_bars(events: list[dict[str, Any]], by_kernel: dict[Any, tuple[str, str]]) -> list[Bar]:
    """A bar for each event on the device, in the order of time, a row for each lane of a stream.

    by_kernel: name and kind of the operators that launch a kernel, by its name, blocks and threads. A kernel that is not
    among them goes by its own name; copies are memory-intensive.
    """
    lanes = apart(events)
    rows = sorted(set(lanes))
    bars = []
    for event, lane in zip(events, lanes, strict=True):
        arguments = event["args"]
        name, kind = event["name"].partition("<")[0].rpartition("::")[2], MEMORY
        if event["cat"] == "kernel":
            key = event["name"], prod(arguments["grid"]), prod(arguments["block"])
            name, kind = by_kernel.get(key, (name, UNKNOWN))
        details = {"kernel": event["name"], **arguments}
        bars.append(_bar(event, events[0]["ts"], rows.index(lane), name, kind, details))
    return bars


def apart(events: Iterable[dict[str, Any]]) -> list[tuple[int, int]]:
    """For each event on the device, in the order of time, its stream and a lane: 0, or more where the profiler puts several
    that overlap on one stream, as it may for the branches of one CUDA Graph.
    """
    ends: dict[int, list[float]] = {}  # stream -> when each of its lanes is free
    found = []
    for event in events:
        stream = event["args"]["stream"]
        free = ends.setdefault(stream, [])
        lane = next((i for i, end in enumerate(free) if end <= event["ts"]), len(free))
        free[lane : lane + 1] = [event["ts"] + event["dur"]]
        found.append((stream, lane))
    return found


def _bar(event: dict[str, Any], zero: float, stream: int, name: str, kind: str, details: dict[str, Any]) -> Bar:
    return Bar(stream, name, (event["ts"] - zero) / 1e3, event["dur"] / 1e3, kind, details)


def _by_shapes(program: Program | None, classify: str) -> dict[Any, str]:
    """What kind an operator is, by its name and the shapes of its tensors, from the operators of the captured program."""
    if program is None or classify == TABLE:
        return {}
    found = {}
    for operator, kind in zip(program.graph.operators, kinds(program, classify), strict=True):
        arguments = [program.value(a) for a in tree_leaves(program.calls[operator.id].args)]
        shapes = tuple(tuple(a.shape) for a in arguments if isinstance(a, Tensor) and a.dim())
        found[_known_as(operator.name, shapes)] = kind
    return found


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
    """The operators that launch a kernel with this many blocks and threads, by name, and the kind of most of them.

    A replayed CUDA Graph does not say which operator a kernel is from, so its kernels are recognised by those that the
    operators launch one by one, in this very process: of a profile in the cache the kernels may be another's. Two operators
    that launch the very same kernel are then told apart by nothing.
    """
    if program is None:
        return {}
    launching: dict[Any, list[int]] = {}
    for v, operator in enumerate(profiler.on_gpu(program)):
        for kernel in operator.kernels:
            launching.setdefault((kernel.name, kernel.blocks, kernel.threads), []).append(v)
    kind = kinds(program, classify)
    found = {}
    for key, operators in launching.items():
        names = dict.fromkeys(program.graph.operators[v].name for v in operators)
        found[key] = "/".join(names), Counter(kind[v] for v in operators).most_common(1)[0][0]
    return found
