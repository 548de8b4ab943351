"""Kernels and copies as torch.profiler saw them: the events of a Chrome trace, and what launched which of them.

An event on the device names the call that launched it by a correlation id. Neither its place in the trace nor the time at
which it ran says which operator it is from.
"""

import json
import re
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from systems.cache import JSON

LAUNCHES = ("cuda_runtime", "cuda_driver")  # categories of the calls that launch
KERNEL = "kernel"
ON_DEVICE = (KERNEL, "gpu_memcpy", "gpu_memset")  # categories of what they launch
OCCUPANCY = "est. achieved occupancy %"  # of a kernel, among its arguments
LABEL = "user_annotation"  # category of a record_function
OPERATOR = re.compile(r".*::|graph_\d+_")  # an operator's name, or that of a kernel that Inductor made
CALLS = 5  # in one trace
TURNS = 9  # the shortest of so many stands for one call, since the profiler's own work beside a call lengthens it
QUEUE_CYCLES = 40_000_000  # some 20 ms, within which the profiler launches a graph of thousands of kernels

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class Event:
    """Something that took time: an operator, a label or a call on the host, or a kernel or a copy on the device.

    Args:
        begin_us: Microseconds on the clock that all events of one trace share.
        thread: (process, thread), as the trace names them.
        correlation: The number that a launch shares with what it launched; None for events of another kind.
        arguments: Everything else that the trace says of it.
    """

    name: str
    category: str
    begin_us: float
    duration_us: float
    thread: tuple[str, str] = ("", "")
    correlation: int | None = None
    arguments: dict[str, JSON] = field(default_factory=dict, repr=False)

    @property
    def end_us(self) -> float:
        return self.begin_us + self.duration_us


@dataclass(frozen=True)
class DeviceEvent(Event):
    """A copy or a memset on a CUDA stream, or a kernel."""

    stream: int = 0


@dataclass(frozen=True)
class KernelEvent(DeviceEvent):
    """A kernel.

    Args:
        grid: Blocks in each dimension.
        block: Threads of a block in each dimension.
        registers: Of a thread; None where the trace does not say.
        shared_memory: Bytes of a block, static and dynamic together; None where the trace does not say.
        occupancy_percent: The achieved occupancy as the profiler estimates it, rounded to a whole number of percent; None
            where the trace does not say.
    """

    grid: Dim3 = (1, 1, 1)
    block: Dim3 = (1, 1, 1)
    registers: int | None = None
    shared_memory: int | None = None
    occupancy_percent: float | None = None


def read(document: object) -> list[Event]:
    """The events of a Chrome trace that took time, in the trace's order.

    Raises:
        ValueError: Something in it is no such trace.
    """
    entries = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError("this is no Chrome trace: it has no list of traceEvents")
    return [_event(entry) for entry in entries if isinstance(entry, dict) and entry.get("ph") == "X"]


def exported(profiler: profile) -> list[Event]:
    """The events of a profiler that has stopped."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read(json.loads(path.read_text(encoding="utf-8")))


def launched_under(events: Iterable[Event], prefix: str) -> dict[str, list[DeviceEvent]]:
    """The kernels and copies by the label that they were launched under, in the order of launching.

    Invariant: an event on the device belongs to the label in which, on the same thread, the call of its correlation began.

    Args:
        prefix: What the labels (of record_function) begin with; the keys are what follows it. A label that launched
            nothing is a key of an empty list.

    Raises:
        ValueError: The trace lacks the call that launched something.
    """
    events = list(events)
    labels: dict[tuple[str, str], list[tuple[float, float, str]]] = {}  # by thread: (begin, end, what follows the prefix)
    launches: dict[int, Event] = {}
    for event in events:
        if event.category == LABEL and event.name.startswith(prefix):
            span = (event.begin_us, event.end_us, event.name.removeprefix(prefix))
            labels.setdefault(event.thread, []).append(span)
        elif event.category in LAUNCHES and event.correlation is not None:
            launches[event.correlation] = event
    for spans in labels.values():
        spans.sort()
    launched: dict[str, list[tuple[float, DeviceEvent]]] = {label: [] for spans in labels.values() for *_, label in spans}
    for event in events:
        if not isinstance(event, DeviceEvent):
            continue
        launch = None if event.correlation is None else launches.get(event.correlation)
        if launch is None:
            raise ValueError(f"the trace does not say what launched {event.name}")
        spans = labels.get(launch.thread, [])
        place = bisect_right(spans, launch.begin_us, key=lambda span: span[0]) - 1
        if place >= 0 and launch.begin_us < spans[place][1]:
            launched[spans[place][2]].append((launch.begin_us, event))
    return {label: [e for _, e in sorted(pairs, key=lambda pair: pair[0])] for label, pairs in launched.items()}


def on_device(events: Iterable[Event]) -> list[DeviceEvent]:
    """The kernels and copies by the time at which they began."""
    return sorted((e for e in events if isinstance(e, DeviceEvent)), key=lambda e: e.begin_us)


def outermost_operators(events: Iterable[Event]) -> list[Event]:
    """The operators on the CPU that no other operator called, by the time at which they began.

    Neither the notes that torch.compile makes of itself nor a region that it compiled is an operator; what runs within such
    a region is.
    """
    operators = [e for e in events if e.category == "cpu_op" and OPERATOR.match(e.name)]
    outermost: list[Event] = []
    end_us: dict[tuple[str, str], float] = {}  # by thread: of the last of them
    for event in sorted(operators, key=lambda e: (e.begin_us, -e.duration_us)):
        if event.begin_us >= end_us.get(event.thread, 0.0):
            end_us[event.thread] = event.end_us
            outermost.append(event)
    return outermost


def traced(call: Callable[[], object], calls: int = CALLS, ahead: Callable[[], object] | None = None) -> list[DeviceEvent]:
    """The kernels and copies of some calls, by the time at which they began.

    Args:
        ahead: Called once before them, under the profiler too; what it launches is among the events.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        if ahead is not None:
            ahead()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    return on_device(exported(profiler))


def of_one_call(call: Callable[[], object]) -> list[DeviceEvent]:
    """The kernels and copies of one call, the shortest of TURNS, as `traced` gives them.

    If the call replays a CUDA Graph, these are the graph's, launched while the GPU is busy: under the profiler a launch
    takes longer than the graph, whose first kernels would wait until the others are launched.
    """
    graph = launched_graph(traced(call, 1))  # the profiler's first turn is slow, too
    ahead = partial(torch.cuda._sleep, QUEUE_CYCLES) if graph is not None else None
    return min((replayed(traced(call, 1, ahead)) for _ in range(TURNS)), key=_span_us)


def launched_graph(events: Sequence[DeviceEvent]) -> int | None:
    """The correlation of a CUDA Graph's launch, which all that the graph runs shares; None unless there is just one."""
    counts = Counter(event.correlation for event in events)
    graphs = [correlation for correlation, count in counts.items() if count > 1]
    return graphs[0] if len(graphs) == 1 else None


def replayed(events: Sequence[DeviceEvent]) -> list[DeviceEvent]:
    """What the CUDA Graph ran, if these events are of a call that replays one; else all of them.

    The profiler takes a millisecond and more to launch a graph. Between the copies of the inputs and the graph that time
    would look as if the device had waited.
    """
    graph = launched_graph(events)
    return list(events) if graph is None else [e for e in events if e.correlation == graph]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans (begin, end)."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _span_us(events: Sequence[DeviceEvent]) -> float:
    """From the beginning of the first to the end of the last."""
    return max(e.end_us for e in events) - events[0].begin_us if events else 0.0


def _event(entry: dict[str, object]) -> Event:
    arguments = entry.get("args", {})
    name, category = entry.get("name"), entry.get("cat", "")
    if not isinstance(arguments, dict) or not isinstance(name, str) or not isinstance(category, str):
        raise ValueError(f"an event of the trace is malformed: {entry!r:.200}")
    begin_us, duration_us = _number(entry, "ts"), _number(entry, "dur")
    correlation = _whole(arguments, "correlation") if "correlation" in arguments else None
    thread = str(entry.get("pid")), str(entry.get("tid"))
    common = name, category, begin_us, duration_us, thread, correlation, arguments
    if category not in ON_DEVICE:
        return Event(*common)
    stream = _whole(arguments, "stream")
    if category != KERNEL:
        return DeviceEvent(*common, stream)
    registers, shared_memory = (
        _whole(arguments, key) if key in arguments else None for key in ("registers per thread", "shared memory")
    )
    percent = _number(arguments, OCCUPANCY) if OCCUPANCY in arguments else None
    return KernelEvent(
        *common, stream, _dim3(arguments, "grid"), _dim3(arguments, "block"), registers, shared_memory, percent
    )


def _number(entry: dict[str, object], key: str) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} in the trace is {value!r}, which is no number")
    return float(value)


def _whole(arguments: dict[str, object], key: str) -> int:
    value = arguments.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{key} in the trace is {value!r}, which is no whole number")
    return int(value)


def _dim3(arguments: dict[str, object], key: str) -> Dim3:
    value = arguments.get(key)
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"{key} in the trace is {value!r}, which is no size in three dimensions")
    x, y, z = (_whole({key: size}, key) for size in value)
    return x, y, z
