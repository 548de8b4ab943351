"""Active warps over a call: the estimate from a trace, the record, and the chart."""

from collections.abc import Iterator, Sequence
from itertools import count, pairwise
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_records import cell as made_cell
from made_records import record
from modules import Branches

import systems
from results.cell import Cell
from results.course import Course
from results.occupation import ActiveWarps
from results.store import Store
from runners.cell.measuring import measured
from runners.cell.session import Session
from runners.measurements import active_warps
from runners.measurements.sm_efficiency import GRAPH, KERNELS, RANGE, CountersUnavailable
from systems.profiling import trace
from systems.profiling.trace import DeviceEvent

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


def test_records_keep_a_course(tmp_path: Path) -> None:
    store = Store(tmp_path)
    course = Course.of([(0.0, 1.25, 7.0)], 10)
    written = record("ios", active_warps=ActiveWarps(3.0, "counters", None, 1.5, course))
    store.write(written)
    contents = store.read()
    assert not contents.reasons_by_file and contents.records == {written.id: written}
    assert course == Course((0.0, 1.25), (7.0,))


def cell(system: str, model: str = "inception_v3") -> Cell:
    return made_cell(system, model, "active_warps", device="cuda")


# The estimate, from events in the form of torch.profiler's


def event(ts: float, dur: float, correlation: int, blocks: int = 8, category: str = "kernel", **more: Any) -> Any:
    """A KernelEvent, or a DeviceEvent of another category."""
    arguments = {"stream": 7, "correlation": correlation}
    if category == "kernel":
        arguments |= {"grid": [blocks, 1, 1], "block": [64, 2, 1], **more}
    (one,) = trace.read(
        {"traceEvents": [{"ph": "X", "cat": category, "name": "k", "ts": ts, "dur": dur, "args": arguments}]}
    )
    return one


def occupied(percent: int) -> dict[str, int]:
    return {trace.OCCUPANCY: percent}


@given(st.integers(1, 2000), st.integers(1, 1024), st.integers(1, 32), st.integers(1, 2000))
def test_a_kernel_has_the_warps_that_fit_although_the_occupancy_is_rounded(
    blocks: int, threads: int, resident: int, sms: int
) -> None:
    """resident: the blocks that an SM can hold at once. The profiler's estimate is min(blocks / SMs, resident) of them."""
    whole = 2048 // threads
    resident = max(1, min(resident, whole))
    most = sms * 2048 // 32
    per_sm = min(blocks / sms, resident)
    percent = int(0.5 + 100 * per_sm * threads / 2048)
    kernel = event(0, 1, 1, blocks, block=[threads, 1, 1], **occupied(percent))
    num_warps = active_warps.warps_of(kernel, most)
    all_of_it = blocks * ceil(threads / 32)
    assert num_warps <= min(all_of_it, most)
    if threads % 32 == 0:  # else the profiler counts a part of a warp
        assert abs(num_warps - min(all_of_it, sms * resident * threads / 32)) <= 0.01 * most + 1e-9


def test_a_small_kernel_is_not_rounded_away() -> None:
    small, large = event(0, 1, 1, 1, **occupied(0)), event(0, 1, 1, 10_000, **occupied(25))
    assert active_warps.warps_of(small, 8448) == 4 and active_warps.warps_of(large, 8448) == 2112
    assert active_warps.warps_of(event(0, 1, 1, 10_000), 8448) == 8448  # the profiler does not say


def test_the_course_of_kernels_begins_with_the_first_in_milliseconds() -> None:
    events = [event(5000.0, 500.0, 1, 2), event(5250.0, 500.0, 2, 1), event(6000.0, 100.0, 3, 100)]
    course = active_warps.course_of(events, 16)
    assert course == Course((0.0, 0.25, 0.5, 0.75, 1.0, 1.1), (8.0, 12.0, 4.0, 0.0, 16.0))
    assert active_warps.course_of([], 16).mean == 0.0


class Traces:
    """Traces that are given instead of a profiler's, in turn, and what was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, traces: list[list[DeviceEvent]]):
        self.arguments: list[tuple[int, bool]] = []
        turns = iter(traces)

        def traced(call: Any, calls: int = trace.CALLS, ahead: Any = None) -> list[DeviceEvent]:
            self.arguments.append((calls, ahead is not None))
            return next(turns)

        monkeypatch.setattr(trace, "traced", traced)


def call_of(*durations: float, graph: bool) -> list[DeviceEvent]:
    numbers = count(2)
    times = np.cumsum([100.0, *durations])
    copy_ = event(10.0, 1.0, 1, category="gpu_memcpy")
    return [copy_, *(event(t, d, 2 if graph else next(numbers)) for t, d in zip(times, durations, strict=False))]


@pytest.mark.parametrize("graph", [True, False])
def test_one_call_is_the_shortest_and_a_graph_is_launched_behind_something(
    monkeypatch: pytest.MonkeyPatch, graph: bool
) -> None:
    turns = [call_of(2.0, 3.0 + turn % 4, graph=graph) for turn in range(1, trace.TURNS + 1)]
    traces = Traces(monkeypatch, [call_of(1.0, 1.0, graph=graph), *turns])
    events = trace.of_one_call(lambda: None)
    assert events == (turns[3][1:] if graph else turns[3])  # the copy is not the graph's; the first turn does not count
    assert traces.arguments == [(1, False)] + trace.TURNS * [(1, graph)]


COUNTED = '"ID","{}","{}","{}"\n"","%","warp","ns"\n"0","50","8.0","1000"\n'


@pytest.mark.parametrize(
    ("which", "workloads", "source", "value"),
    [
        ("/usr/bin/ncu", GRAPH, "counters", 10 * 8.0),  # of a call that takes half as long as under Nsight Compute
        ("/usr/bin/ncu", RANGE, "counters", 10 * 8.0),
        ("/usr/bin/broken", GRAPH, "estimated", None),
        (None, GRAPH, "estimated", None),
    ],
)
def test_the_course_is_estimated_whatever_the_mean_is(
    monkeypatch: pytest.MonkeyPatch, which: str | None, workloads: Sequence[str], source: str, value: float | None
) -> None:
    order: list[str] = []

    def profiled(*_: Any) -> str:
        order.append("counters")
        if which == "/usr/bin/broken":
            raise CountersUnavailable("no permission")
        return COUNTED.format(active_warps.METRIC, active_warps.WARPS, active_warps.DURATION)

    many = [event(100.0 + 2 * i, 1.0, i, 1 + i % 5) for i in range(1000)]

    def one_call(_: Any) -> list[DeviceEvent]:
        order.append("trace")
        return [event(0.0, 50.0, 7, category="gpu_memcpy"), *many]

    device = SimpleNamespace(multi_processor_count=10, max_threads_per_multi_processor=2048)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(active_warps.shutil, "which", lambda _: which)
    monkeypatch.setattr(active_warps, "profiled", profiled)
    monkeypatch.setattr(trace, "of_one_call", one_call)
    measurement = active_warps.measure(lambda: None, cell("ios"), workloads, 0.0005)
    assert order == (["counters", "trace"] if which else ["trace"])
    course = measurement.estimated_course
    assert course is not None
    assert len(course.warps) == active_warps.STEPS and course.duration == pytest.approx(1.999)
    assert course.mean == pytest.approx(sum(4 * (1 + i % 5) for i in range(1000)) / 1999)  # a microsecond each, in 1999
    assert measurement.source == source and measurement.value == pytest.approx(
        course.mean if value is None else value, rel=1e-6
    )
    assert (measurement.reason is None) == (source == "counters")
    assert measurement.profiled_ms == (0.001 if source == "counters" else None)


def test_a_cpu_has_no_course() -> None:
    measurement = active_warps.measure(lambda: None, made_cell(), KERNELS, 1.0)
    assert measurement.value is None and measurement.estimated_course is None and "CPU" in (measurement.reason or "")


@pytest.mark.usefixtures("cache_folder")
@pytest.mark.parametrize("system", [pytest.param(s, marks=GPU) for s in ("eager", "cuda_graph", "sequential", "ios")])
def test_a_gpu_has_warps_over_a_call(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    """The course is as long as the call's kernels, and has warps for as long as one of them runs."""
    seen: list[DeviceEvent] = []
    of_one_call = trace.of_one_call
    monkeypatch.setattr(trace, "of_one_call", lambda call: seen.extend(of_one_call(call)) or seen)
    inputs = (torch.randn(2, 3, 64, 64, device="cuda"),)
    prepared = systems.load(cell(system).system.name, **cell(system).system.options).prepare(
        Branches().eval().cuda(), inputs
    )
    for _ in range(5):
        prepared(*inputs)
    course = active_warps.from_timeline(lambda: prepared(*inputs))
    prepared.close()
    spans = [(e.begin_us, e.end_us) for e in seen if isinstance(e, trace.KernelEvent)]
    assert 4 <= len(spans) < 50  # of one call: convolutions that may be merged, what follows each, and what joins them
    span = (max(end for _, end in spans) - min(begin for begin, _ in spans)) / 1e3
    assert course.duration == pytest.approx(span, rel=1e-3) and course.duration < 100
    busy = sum(end - begin for w, (begin, end) in zip(course.warps, pairwise(course.moments), strict=True) if w > 0)
    assert busy == pytest.approx(trace.covered(spans) / 1e3, rel=1e-3)
    properties = torch.cuda.get_device_properties(0)
    most = properties.multi_processor_count * properties.max_threads_per_multi_processor // 32
    assert 0 < course.mean <= max(course.warps) <= most


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("cache_folder")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_record_of_inception_on_a_gpu_holds_its_course(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequential, without counters: the value is the mean of the course, which is about as long as another call."""
    monkeypatch.setattr(active_warps.shutil, "which", lambda _: None)
    session = Session(cell("sequential"), "0", lambda _: None)
    result = measured(session, record(of=cell("sequential")))
    assert result.is_ok and result.active_warps is not None, result.reason
    active, course = result.active_warps, result.active_warps.estimated_course
    assert course is not None and active.source == "estimated" and active.value == pytest.approx(course.mean, rel=1e-3)
    assert course.mean > 0 and len(course.warps) == active_warps.STEPS
    one = trace.of_one_call(session.call)
    span = (max(e.end_us for e in one) - one[0].begin_us) / 1e3
    assert span / 2 < course.duration < 2 * span
