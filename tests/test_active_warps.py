"""Active warps over a call: the estimate from a trace, the record, and the chart."""

import copy
from collections.abc import Iterator
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
import yaml
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from modules import Branches
from test_results import record

import systems
from results.course import Course
from results.store import Store
from runners.cell.pending import PROFILED
from runners.cell.session import Session
from runners.measurements import active_warps, kernels
from runners.measurements.sm_efficiency import CountersUnavailable
from scripts.charts import active_warps as chart
from scripts.charts.measured import Measured, NoResults
from scripts.charts.style import LOOKS
from scripts.exhibits.evidence import Evidence, select
from scripts.exhibits.findings import findings
from scripts.exhibits.pictures import pictures
from scripts.exhibits.preset import Preset

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


def test_records_keep_a_course_and_those_without_one_are_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    measured = {"value": 3.0, "source": "counters", "reason": None, "profiled_ms": 1.5}
    old = record("sequential", active_warps=measured)
    new = record("ios", active_warps=measured | {"estimated_course": Course.of([(0.0, 1.25, 7.0)], 10).to_json()})
    new["id"] = "1" * 16
    for one in (old, new):
        store.write(one)
    contents = store.read()
    assert not contents.skipped and contents.records == {old["id"]: old, new["id"]: new}
    assert Course.from_json(contents.records[new["id"]]["active_warps"]["estimated_course"]) == Course((0.0, 1.25), (7.0,))


def cell(system: str, model: str = "inception_v3") -> dict[str, Any]:
    options = yaml.safe_load((ROOT / "conf" / "system" / f"{system}.yaml").read_text(encoding="utf-8"))
    return {
        **{"model": {"name": model}, "system": options, "runner": {"name": "active_warps"}, "batch": 1, "seed": 0},
        **{"device": "cuda", "precision": "tf32", "layout": "contiguous"},
    }


# The estimate, from events in the form of torch.profiler's


def event(ts: float, dur: float, correlation: int, blocks: int = 8, category: str = "kernel", **more: Any) -> dict[str, Any]:
    arguments = {"stream": 7, "correlation": correlation}
    if category == "kernel":
        arguments |= {"grid": [blocks, 1, 1], "block": [64, 2, 1], **more}
    return {"ph": "X", "cat": category, "name": "k", "ts": ts, "dur": dur, "args": arguments}


def occupied(percent: int) -> dict[str, int]:
    return {active_warps.OCCUPANCY: percent}


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
    kernel = {"args": {"grid": [blocks, 1, 1], "block": [threads, 1, 1], **occupied(percent)}}
    found = active_warps.warps_of(kernel, most)
    all_of_it = blocks * ceil(threads / 32)
    assert found <= min(all_of_it, most)
    if threads % 32 == 0:  # else the profiler counts a part of a warp
        assert abs(found - min(all_of_it, sms * resident * threads / 32)) <= 0.01 * most + 1e-9


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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, traces: list[list[dict[str, Any]]]):
        self.asked: list[tuple[int, bool]] = []
        turns = iter(traces)

        def traced(call: Any, calls: int = kernels.CALLS, ahead: Any = None) -> list[dict[str, Any]]:
            self.asked.append((calls, ahead is not None))
            return next(turns)

        monkeypatch.setattr(kernels, "traced", traced)


def call_of(*durations: float, graph: bool) -> list[dict[str, Any]]:
    numbers = count(2)
    times = np.cumsum([100.0, *durations])
    copy_ = event(10.0, 1.0, 1, category="gpu_memcpy")
    return [copy_, *(event(t, d, 2 if graph else next(numbers)) for t, d in zip(times, durations, strict=False))]


@pytest.mark.parametrize("graph", [True, False])
def test_one_call_is_the_shortest_and_a_graph_is_launched_behind_something(
    monkeypatch: pytest.MonkeyPatch, graph: bool
) -> None:
    turns = [call_of(2.0, 3.0 + turn % 4, graph=graph) for turn in range(1, kernels.TURNS + 1)]
    traces = Traces(monkeypatch, [call_of(1.0, 1.0, graph=graph), *turns])
    found = kernels.of_one_call(lambda: None)
    assert found == (turns[3][1:] if graph else turns[3])  # the copy is not the graph's; the first turn does not count
    assert traces.asked == [(1, False)] + kernels.TURNS * [(1, graph)]


COUNTED = '"ID","{}","{}","{}"\n"","%","warp","ns"\n"0","50","8.0","1000"\n'


@pytest.mark.parametrize(
    ("which", "captured", "source", "value"),
    [
        ("/usr/bin/ncu", True, "counters", 10 * 8.0),  # of a call that takes half as long as under Nsight Compute
        ("/usr/bin/ncu", False, "counters", 10 * 8.0),
        ("/usr/bin/broken", True, "estimated", None),
        (None, True, "estimated", None),
    ],
)
def test_the_course_is_estimated_whatever_the_mean_is(
    monkeypatch: pytest.MonkeyPatch, which: str | None, captured: bool, source: str, value: float | None
) -> None:
    order: list[str] = []

    def profiled(*_: Any) -> str:
        order.append("counters")
        if which == "/usr/bin/broken":
            raise CountersUnavailable("no permission")
        return COUNTED.format(active_warps.METRIC, active_warps.WARPS, active_warps.DURATION)

    many = [event(100.0 + 2 * i, 1.0, i, 1 + i % 5) for i in range(1000)]

    def one_call(_: Any) -> list[dict[str, Any]]:
        order.append("trace")
        return [event(0.0, 50.0, 7, category="gpu_memcpy"), *many]

    device = SimpleNamespace(multi_processor_count=10, max_threads_per_multi_processor=2048)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(active_warps.shutil, "which", lambda _: which)
    monkeypatch.setattr(active_warps, "profiled", profiled)
    monkeypatch.setattr(active_warps, "of_one_call", one_call)
    found = active_warps.measure(lambda: None, {"device": "cuda"}, captured, 0.0005)
    assert order == (["counters", "trace"] if which else ["trace"])
    course = Course.from_json(found["estimated_course"])
    assert len(course.warps) == active_warps.STEPS and course.duration == pytest.approx(1.999)
    assert course.mean == pytest.approx(sum(4 * (1 + i % 5) for i in range(1000)) / 1999)  # a microsecond each, in 1999
    assert found["source"] == source and found["value"] == pytest.approx(course.mean if value is None else value)
    assert (found["reason"] is None) == (source == "counters")
    assert found["profiled_ms"] == (0.001 if source == "counters" else None)
    assert set(found) == set(PROFILED["active_warps"])


def test_a_cpu_has_no_course() -> None:
    found = active_warps.measure(lambda: None, {"device": "cpu"}, False, 1.0)
    assert found["value"] is None and found["estimated_course"] is None and set(found) == set(PROFILED["active_warps"])


@pytest.mark.usefixtures("cache_folder")
@pytest.mark.parametrize("system", [pytest.param(s, marks=GPU) for s in ("eager", "cuda_graph", "sequential", "ios")])
def test_a_gpu_has_warps_over_a_call(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    """The course is as long as the call's kernels, and has warps for as long as one of them runs."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(active_warps, "of_one_call", lambda call: seen.extend(kernels.of_one_call(call)) or seen)
    inputs = (torch.randn(2, 3, 64, 64, device="cuda"),)
    prepared = systems.load(**cell(system)["system"]).prepare(Branches().eval().cuda(), inputs)
    for _ in range(5):
        prepared(*inputs)
    course = active_warps.from_timeline(lambda: prepared(*inputs))
    prepared.close()
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in seen if e["cat"] == "kernel"]
    assert 4 <= len(spans) < 50  # of one call: convolutions that may be merged, what follows each, and what joins them
    span = (max(end for _, end in spans) - min(begin for begin, _ in spans)) / 1e3
    assert course.duration == pytest.approx(span, rel=1e-3) and course.duration < 100
    busy = sum(end - begin for w, (begin, end) in zip(course.warps, pairwise(course.moments), strict=True) if w > 0)
    assert busy == pytest.approx(kernels.covered(spans) / 1e3, rel=1e-3)
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
    found = session.measure()
    assert found["status"] == "ok", found["reason"]
    active = found["active_warps"]
    course = Course.from_json(active["estimated_course"])
    assert active["source"] == "estimated" and active["value"] == pytest.approx(course.mean, rel=1e-3)
    assert course.mean > 0 and len(course.warps) == active_warps.STEPS
    one = kernels.of_one_call(session.call)
    span = (max(e["ts"] + e["dur"] for e in one) - one[0]["ts"]) / 1e3
    assert span / 2 < course.duration < 2 * span


# The chart


def made(system: str, active: dict[str, Any] | None, model: str = "inception_v3", **more: Any) -> dict[str, Any]:
    """A record of runner=active_warps, as if from a GPU."""
    environment = {"gpu": "NVIDIA H200", "cpu": "a CPU", "host": "there", "libraries": {"torch": "2.11"}}
    when = {"when": "2026-01-01", "id": f"{model}-{system}"}
    return record(system) | {"config": cell(system, model), "environment": environment, "active_warps": active} | when | more


def active(value: float, source: str, *steps: float) -> dict[str, Any]:
    """Steps of a tenth of a millisecond."""
    course = Course(tuple(i / 10 for i in range(len(steps) + 1)), steps)
    return {"value": value, "source": source, "reason": None, "estimated_course": course.to_json()}


SEQUENTIAL = active(276.8, "counters", 800.0, 0.0, 100.0, 300.0)
IOS = active(1250.0, "estimated", 1500.0, 1000.0)


def pictured_warps() -> Figure:
    """Two systems and two models, one of which timed out under one of them."""
    timeout = made("ios", None, "squeezenet", status="timeout", reason="too long")
    others = [made("sequential", active(9.0, "counters", 9.0, 12.0), "squeezenet"), timeout]
    return chart.draw(Measured([made("sequential", SEQUENTIAL), made("ios", IOS), *others])).figure


def test_each_system_has_a_panel_with_its_course_and_its_mean() -> None:
    drawn = chart.draw(Measured([made("ios", IOS), made("sequential", SEQUENTIAL)]))
    first, second = drawn.figure.axes
    assert [axes.get_title(loc="left") for axes in (first, second)] == ["sequential, inception_v3", "ios, inception_v3"]
    assert first.get_title(loc="right") == "mean 277 (counters), of the estimate 300"
    assert second.get_title(loc="right") == "mean 1,250 (estimated)"
    assert first.get_xlim() == second.get_xlim() == (0, 0.4) and first.get_ylim() == second.get_ylim()
    assert first.get_ylim()[0] == 0 and first.get_ylim()[1] > 1500
    for axes, system, of in ((first, "sequential", SEQUENTIAL), (second, "ios", IOS)):
        for patch in (p for p in axes.patches if isinstance(p, StepPatch)):
            values, edges, _ = patch.get_data()
            assert list(values) == of["estimated_course"]["warps"] and list(edges) == of["estimated_course"]["ms"]
            assert to_rgb(patch.get_edgecolor() if not patch.get_fill() else patch.get_facecolor()) == pytest.approx(
                to_rgb(LOOKS[system].colour)
            )
        (level,) = axes.collections
        ((left, right),) = [(a[0], b[0]) for a, b in level.get_segments() if a[1] == b[1] == of["value"]]
        assert (left, right) == (0, of["estimated_course"]["ms"][-1])
    legend = [text.get_text() for text in drawn.figure.legends[0].texts]
    assert "estimated" in legend[0] and "estimated" in drawn.caption and drawn.name == "active_warps"


def test_models_have_scales_of_their_own_and_what_is_missing_says_why() -> None:
    others = [
        made("sequential", active(9.0, "estimated", 9.0), "squeezenet"),
        made("ios", None, "squeezenet", status="timeout", reason="too long"),
        made("sequential", {"value": 1.0, "source": "counters", "reason": None}, "nasnet"),
    ]
    figure = chart.draw(Measured([made("ios", IOS), made("sequential", SEQUENTIAL), *others])).figure
    titles = [axes.get_title(loc="left").split(", ") for axes in figure.axes]
    assert titles == [[s, m] for m in ("inception_v3", "squeezenet") for s in ("sequential", "ios")]
    assert [axes.get_xlim()[1] for axes in figure.axes] == [0.4, 0.4, 0.1, 0.1]
    assert [t.get_text() for t in figure.axes[3].texts] == ["timed out"] and not figure.axes[3].patches


@pytest.mark.parametrize("course", [{}, {"estimated_course": None}, {"estimated_course": {"ms": [], "warps": []}}])
def test_means_alone_leave_the_chart_of_the_claims(course: dict[str, Any]) -> None:
    """So do those of records from before the course was kept."""
    means = [
        made(s, {"value": v, "source": "counters", "reason": None, **course}) for s, v in (("sequential", 2), ("ios", 3))
    ]
    with pytest.raises(NoResults, match=r"^no record holds the course of warps.*force=true.*$"):
        chart.draw(Measured(means))
    charts, refused = exhibited(means)
    assert list(charts) == ["claims"] and list(refused) == ["active_warps"]


def test_the_exhibit_shows_the_course_first_and_the_claim_as_before() -> None:
    records = [made("sequential", SEQUENTIAL), made("ios", copy.deepcopy(IOS) | {"source": "counters"})]
    charts, refused = exhibited(records)
    assert list(charts) == ["active_warps", "claims"] and not refused


def exhibited(records: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    preset = Preset.read("ios/active_warps")
    evidence = Evidence(select(records, [preset.sweep]))
    return pictures(preset, evidence, findings(preset, evidence))
