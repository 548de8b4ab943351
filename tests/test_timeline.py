"""Timelines: what ran when, the trace that holds it, and the picture made of it."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.colors
import pytest
import torch
from conftest import ROOT, Run
from hypothesis import given
from hypothesis import strategies as st
from modules import Branches
from PIL import Image
from torch import nn

import scripts.timeline as picture
import systems
from models.model import Model
from results.timeline import COMPUTE, KINDS, MEMORY, UNKNOWN, Bar, Timeline, from_trace, to_trace
from runners import kernels, timeline
from systems.base import Prepared, Unsupported
from systems.compiled import Compiled
from systems.opara import intensity, profiler
from systems.opara.profiler import Kernel, OperatorProfile
from systems.scheduling.capture import capture
from systems.scheduling.costs import Cache
from systems.scheduling.program import Program

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


pytestmark = pytest.mark.usefixtures("cache_folder")


def recorded(system: str, classify: str = "table", device: str = "cpu") -> tuple[Timeline, Program, Prepared]:
    torch.manual_seed(0)
    module, inputs = Branches().eval().to(device), (torch.randn(2, 3, 64, 64, device=device),)
    prepared = systems.load(system).prepare(module, inputs)
    program = prepared.program or capture(module, inputs)
    found = timeline.record(prepared, program, inputs, classify, system)
    prepared.close()
    return found, program, prepared


@pytest.mark.parametrize("system", ["nimble", "opara"])
def test_a_schedule_is_seen_as_it_ran(system: str) -> None:
    found, program, prepared = recorded(system)
    assert prepared.schedule is not None and found.source == "worker threads"
    assert found.scheduled == len(found.streams) == prepared.schedule.stream_count
    bars = {bar.details["operator"]: bar for bar in found.bars}
    assert sorted(bars) == list(range(len(program.graph))) and min(bar.start for bar in found.bars) == 0.0
    for v, bar in bars.items():
        assert bar.name == program.graph.operators[v].name and bar.stream == prepared.schedule.streams[v]
        assert bar.duration > 0 and bar.kind == (MEMORY if intensity.in_table(bar.name) else COMPUTE)
    for u, v in program.graph.edges:
        assert bars[u].end <= bars[v].start + 1e-9
    assert_one_at_a_time(found)


@pytest.mark.parametrize("classify", ["table", "measured"])
def test_a_system_without_a_schedule_is_seen_by_the_profiler(monkeypatch: pytest.MonkeyPatch, classify: str) -> None:
    monkeypatch.setattr(intensity, "ridge_point", lambda *_: 1.0)  # above it are the convolutions, whatever machine this is
    found, _, _ = recorded("eager", classify)
    assert [bar.name for bar in found.bars] == ["conv2d", "relu", "conv2d", "sigmoid", "cat"]
    assert [bar.kind for bar in found.bars] == [COMPUTE, MEMORY, COMPUTE, MEMORY, MEMORY]
    assert (
        found.streams == [0]
        and found.scheduled is None
        and found.bars[0].details["shapes"] == [[2, 3, 64, 64], [64, 3, 3, 3], [64]]
    )
    assert_one_at_a_time(found)


def test_of_what_is_compiled_the_operators_within_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace as of torch.compile, with the names of its notes, its region, and the kernels that Inductor made."""
    traced = [
        (0, 10, "TorchDynamo Cache Lookup", []),
        (10, 90, "Torch-Compiled Region: 0/0", []),
        (12, 4, "AOTDispatcher Runtime Wrapper Prologue", []),
        (20, 5, "graph_0_cpp_fused_convolution_relu_0", []),
        (30, 50, "aten::convolution", [[2, 3, 8, 8], [4, 3, 3, 3]]),
        (31, 40, "aten::_convolution", [[2, 3, 8, 8], [4, 3, 3, 3]]),
        (85, 5, "mkldnn::_linear_pointwise", [[2, 4], [4, 4]]),
    ]
    place = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1}
    events = [place | {"ts": t, "dur": d, "name": n, "args": {"Input Dims": shapes}} for t, d, n, shapes in traced]
    monkeypatch.setattr(timeline, "exported", lambda _: {"traceEvents": events})
    program = capture(nn.Conv2d(3, 4, 3).eval(), (torch.randn(2, 3, 8, 8),))
    monkeypatch.setattr(timeline, "kinds", lambda *_: [COMPUTE])
    bars = timeline._profiled(lambda: None, timeline._by_shapes(program, "measured"), "measured")
    found = [(bar.name, bar.kind, round(bar.start * 1e3)) for bar in bars]
    fused, linear = ("fused_convolution_relu", UNKNOWN, 0), ("_linear_pointwise", UNKNOWN, 65)
    assert found == [fused, ("convolution", COMPUTE, 10), linear]


def test_operators_that_nobody_sees_are_no_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Compiled):
        def run(self, inputs: Any) -> Any: ...

    class Session:
        def __init__(self, *_: Any):
            self.prepared, self.model = object.__new__(Elsewhere), Model("relu", nn.ReLU(), ())

        def prepare(self) -> None:
            pass

    monkeypatch.setattr(timeline, "Session", Session)
    with pytest.raises(Unsupported, match="runs its own"):
        timeline.run({"device": "cpu"}, "", lambda _: None)


def assert_one_at_a_time(found: Timeline) -> None:
    for stream in found.streams:
        of = sorted((bar for bar in found.bars if bar.stream == stream), key=lambda bar: bar.start)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(of))


def test_an_operator_that_the_capture_does_not_know_is_of_unknown_kind() -> None:
    inputs = (torch.randn(3, 4),)
    prepared = systems.load("eager").prepare(nn.ReLU(), inputs)
    for classify, program, kind in (
        ("measured", None, UNKNOWN),
        ("measured", capture(nn.ReLU(), (torch.randn(4, 4),)), UNKNOWN),  # of another shape
        ("measured", capture(nn.ReLU(), inputs), MEMORY),
        ("table", None, MEMORY),
    ):
        assert [bar.kind for bar in timeline.record(prepared, program, inputs, classify, "x").bars] == [kind]


# On a GPU, from events in the form of torch.profiler's, written by hand: two streams, the second with kernels that overlap.


def event(name: str, ts: float, dur: float, stream: int, category: str = "kernel", blocks: int = 8) -> dict[str, Any]:
    arguments: dict[str, Any] = {"stream": stream, "correlation": 1}
    if category == "kernel":
        arguments |= {"grid": [blocks, 1, 1], "block": [64, 2, 1]}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": arguments}


EVENTS = [
    event("Memcpy DtoD", 1000.0, 2.0, 7, "gpu_memcpy"),
    event("void cudnn::conv<float>(x)", 1003.0, 9.0, 13),
    event("void at::relu<float, 4>()", 1005.0, 3.0, 13),
    event("void cudnn::conv<float>(x)", 1009.0, 4.0, 13, blocks=2),
    event("void at::relu<float, 4>()", 1012.0, 1.0, 13),
    event("triton_poi_fused_0", 1020.0, 1.0, 7),
]


def test_of_a_replayed_graph_nothing_is_seen_but_the_graph() -> None:
    """What a graph runs has the correlation of its launch; the copies before and after have their own."""

    def launched(*correlations: int) -> list[dict[str, Any]]:
        return [{**e, "args": {**e["args"], "correlation": c}} for e, c in zip(EVENTS, correlations, strict=True)]

    graph = launched(1, 2, 2, 2, 2, 3)
    assert kernels.launched_graph(graph) == 2 and kernels.replayed(graph) == graph[1:5]
    assert timeline.kernel_bars(kernels.replayed(graph), {})[0].start == 0.0
    for all_of_it in (launched(1, 2, 3, 4, 5, 6), launched(1, 1, 2, 2, 3, 4)):  # no graph, or several
        assert kernels.launched_graph(all_of_it) is None and kernels.replayed(all_of_it) == all_of_it


def test_kernels_that_overlap_on_a_stream_get_rows_of_their_own() -> None:
    assert timeline.apart(EVENTS) == [(7, 0), (13, 0), (13, 1), (13, 1), (13, 0), (7, 0)]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(0, 2)), min_size=1))
def test_rows_hold_one_kernel_at_a_time_and_are_as_few_as_can_be(spans: list[tuple[int, int, int]]) -> None:
    events = [event("k", ts, dur, stream) for ts, dur, stream in sorted(spans)]
    lanes = timeline.apart(events)
    for stream in {s for _, _, s in spans}:
        of = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["args"]["stream"] == stream]
        busiest = max(sum(begin <= t < end for begin, end in of) for t in range(40))
        assert {lane for s, lane in lanes if s == stream} == set(range(busiest))
    for i, a in enumerate(events):
        for b, lane in zip(events[i + 1 :], lanes[i + 1 :], strict=True):
            assert lane != lanes[i] or a["ts"] + a["dur"] <= b["ts"]


def test_kernels_are_recognised_by_what_the_operators_launch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    program = capture(Branches().eval(), (torch.randn(1, 3, 8, 8),))
    convolution, relu = EVENTS[1]["name"], EVENTS[2]["name"]
    names = {"conv2d": convolution, "relu": relu, "sigmoid": relu}
    kernels = [
        (Kernel(names[o.name], 8, 128, 32, 0, None, 0.1),) if o.name in names else () for o in program.graph.operators
    ]
    monkeypatch.setattr(profiler, "on_gpu", lambda _: [OperatorProfile(0.1, k) for k in kernels])
    elsewhere = asdict(OperatorProfile(0.1, (Kernel(EVENTS[5]["name"], 8, 128, 32, 0, None, 0.1),)))
    Cache("opara", program.device).add(  # what they launched in another process
        {f"operator {program.signature(v)}": elsewhere for v in range(len(program.graph))}
    )
    bars = timeline.kernel_bars(EVENTS, timeline._by_kernel(program, "table"))
    assert [(bar.stream, bar.name, bar.kind) for bar in bars] == [
        (0, "Memcpy DtoD", MEMORY),
        (1, "conv2d", COMPUTE),
        (2, "relu/sigmoid", MEMORY),
        (2, "conv", UNKNOWN),  # as many blocks as no operator alone launches
        (1, "relu/sigmoid", MEMORY),
        (0, "triton_poi_fused_0", UNKNOWN),
    ]
    assert bars[0].start == 0.0 and bars[1].start == pytest.approx(0.003) and bars[1].duration == pytest.approx(0.009)
    assert timeline._by_kernel(None, "table") == {}


@pytest.mark.parametrize("system", [pytest.param(s, marks=GPU) for s in ("eager", "cuda_graph", "nimble", "opara")])
def test_a_gpu_is_seen_by_its_kernels(system: str) -> None:
    found, program, _ = recorded(system, device="cuda")
    names = Counter(bar.name for bar in found.bars)
    assert {"conv2d", "relu", "cat"} <= {part for name in names for part in name.split("/")}
    assert {bar.kind for bar in found.bars} >= {COMPUTE, MEMORY} and len(found.bars) >= len(program.graph) - 1
    assert all(bar.duration > 0 for bar in found.bars)
    assert (found.scheduled is None) == (system in ("eager", "cuda_graph"))
    assert_one_at_a_time(found)


# The trace


texts, spans = st.text(max_size=8), st.integers(0, 10**6).map(lambda x: x / 1000)
bars_ = st.builds(
    Bar,
    stream=st.integers(0, 200),
    name=texts,
    start=spans,
    duration=spans,
    kind=st.sampled_from(KINDS),
    details=st.dictionaries(texts, st.integers()),
)
timelines_ = st.builds(
    Timeline,
    title=texts,
    source=texts,
    bars=st.lists(bars_, max_size=6).map(tuple),
    scheduled=st.none() | st.integers(1, 99),
)


@given(st.lists(timelines_, max_size=3))
def test_a_trace_reads_back(timelines: list[Timeline]) -> None:
    again = from_trace(json.loads(json.dumps(to_trace(timelines))))
    told = [[(t.title, t.source, t.scheduled, len(t.bars)) for t in some] for some in (again, timelines)]
    assert told[0] == told[1]
    for got, wanted in zip(again, timelines, strict=True):
        expected = sorted(wanted.bars, key=lambda bar: (bar.start, bar.stream))
        for a, b in zip(got.bars, expected, strict=True):
            assert (a.stream, a.name, a.kind, a.details) == (b.stream, b.name, b.kind, b.details)
            assert (a.start, a.duration) == pytest.approx((b.start, b.duration))
        assert Timeline.from_json(json.loads(json.dumps(wanted.to_json()))) == wanted


def test_a_trace_is_in_chromes_format() -> None:
    """The fields that Perfetto's importer asks for; times in microseconds; no two threads of a trace share a number."""
    bars = (Bar(3, "conv2d", 1.5, 0.25, COMPUTE), Bar(0, "relu", 0.0, 1.0, MEMORY))
    trace = to_trace([Timeline("a", "x", bars), Timeline("b", "x", bars)])
    events = trace["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} == {"X", "M"} and len(complete) == 4
    assert all({"pid", "tid", "ts", "dur", "name", "cat", "args"} <= set(e) for e in complete)
    assert (complete[1]["ts"], complete[1]["dur"]) == (1500.0, 250.0)
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len({tid for _, tid in named}) == 4 and sorted(named.values()) == ["stream 0", "stream 0", "stream 3", "stream 3"]
    assert {(e["pid"], e["tid"]) for e in complete} == set(named)
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["a", "b"]


@pytest.mark.parametrize(
    "document",
    [
        *([], {}, {"traceEvents": 1}, {"traceEvents": [{}]}),
        {"traceEvents": [{"ph": "X", "name": "kernel", "cat": "kernel", "pid": 1, "tid": 1, "ts": 0, "dur": 1, "args": {}}]},
        {"traceEvents": [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "x"}}]},
    ],
)
def test_another_document_is_no_timeline(document: Any) -> None:
    with pytest.raises(ValueError, match="not a timeline"):
        from_trace(document)


# The picture

EXAMPLE = [
    Timeline("one", "x", (Bar(0, "conv2d", 0.0, 4.0, COMPUTE), Bar(2, "relu", 1.0, 2.0, MEMORY))),
    Timeline("two", "x", (Bar(0, "conv2d", 0.0, 3.0, COMPUTE), Bar(0, "add", 3.0, 1.0, UNKNOWN))),
]


def drawn(axes: Any) -> list[tuple[float, float, float, str]]:
    """(left, width, row, colour) of each bar."""
    return sorted(
        (p.get_x(), p.get_width(), p.get_y() + p.get_height() / 2, matplotlib.colors.to_hex(p.get_facecolor()))
        for p in axes.patches
    )


def test_a_picture_has_a_panel_a_system_a_row_a_stream_and_a_bar_an_operator() -> None:
    figure = picture.draw(EXAMPLE)
    first, second = figure.axes
    red, blue, grey = (picture.COLOURS[kind] for kind in (COMPUTE, MEMORY, UNKNOWN))
    assert drawn(first) == [(0.0, 4.0, 0.0, red), (1.0, 2.0, 1.0, blue)]  # stream 2 is the second that there is
    assert drawn(second) == [(0.0, 3.0, 0.0, red), (3.0, 1.0, 0.0, grey)]
    assert first.get_xlim() == second.get_xlim() == (0.0, 4.0)
    assert [t.get_text() for t in first.get_yticklabels()] == ["0", "2"] and "one" in first.get_title(loc="left")
    assert {t.get_text() for t in first.texts} == {"conv2d", "relu"}
    assert [t.get_text() for t in figure.legends[0].texts] == list(KINDS)
    picture.plt.close(figure)


def test_streams_that_are_not_the_schedules_are_told_of() -> None:
    bars = EXAMPLE[0].bars  # on two
    told = {n: picture.draw([Timeline("a", "seen", bars, n)]).axes[0].get_title(loc="left") for n in (None, 2, 1, 28)}
    assert told[None] == told[2] == "a: 4.000 ms (seen)"
    assert told[1].endswith("(seen; 1 stream scheduled)") and told[28].endswith("(seen; 28 streams scheduled)")
    picture.plt.close("all")


def test_many_streams_have_the_height_of_few_and_fewer_numbers() -> None:
    heights = []
    for count in (90, 180):
        bars = tuple(Bar(s, "conv2d", 0.0, 4.0, COMPUTE) for s in range(count))
        figure = picture.draw([Timeline("many", "x", bars), *EXAMPLE])
        heights.append(figure.get_figheight())
        axes = figure.axes[0]
        points = 72 * axes.get_position().height * heights[-1]
        assert len(axes.get_yticklabels()) * picture.LINE <= points * 1.1 and not axes.texts  # no bar is as high as its name
        picture.plt.close(figure)
    assert heights[0] == pytest.approx(heights[1]) and heights[0] < picture.TALLEST + 3.5


def test_a_window_shows_what_runs_within_it() -> None:
    figure = picture.draw(EXAMPLE, (3.2, 3.8))
    assert [len(axes.patches) for axes in figure.axes] == [1, 1] and figure.axes[0].get_xlim() == (3.2, 3.8)
    picture.plt.close(figure)


def test_pictures_are_written_from_the_command_line(tmp_path: Path) -> None:
    for number, part in enumerate(EXAMPLE):
        (tmp_path / f"{number}.json").write_text(json.dumps(to_trace([part])))
    command = [sys.executable, str(ROOT / "scripts" / "timeline.py"), "0.json", "1.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.split() == ["0.png", "0.svg"], done.stderr
    with Image.open(tmp_path / "0.png") as image:
        found = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    for kind in KINDS:
        assert tuple(round(255 * c) for c in matplotlib.colors.to_rgb(picture.COLOURS[kind])) in found
    svg = ElementTree.parse(tmp_path / "0.svg").getroot()
    assert svg.tag.endswith("}svg")
    assert all(picture.COLOURS[kind] in (tmp_path / "0.svg").read_text() for kind in KINDS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bad.json"], "not a timeline"),
        (["nowhere.json"], "No such file"),
        (["empty.json"], "nothing to draw"),
        (["good.json", "--window", "3", "2"], "is empty"),
        (["good.json", "--output", "picture.what"], "what"),
        (["good.json", "--output", "nowhere/picture.png"], "No such file"),
    ],
)
def test_what_cannot_be_drawn_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "empty.json").write_text(json.dumps(to_trace([])))
    (tmp_path / "good.json").write_text(json.dumps(to_trace(EXAMPLE)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["timeline.py", *arguments])
    with pytest.raises(SystemExit) as end:
        picture.main()
    told = capsys.readouterr()
    assert end.value.code == 2 and says in told.err.splitlines()[-1] and told.out == ""


# The command line


@pytest.mark.slow
def test_two_systems_make_one_trace(run: Run, folder: Path) -> None:
    asked = ["-m", "runner=timeline", "model=custom", "model.factory=tiny:make", "runner.classify=table", "batch=2"]
    done = run(*asked, "system=nimble,opara", "output=t.json")
    assert done.returncode == 0, done.stderr
    nimble, opara = from_trace(json.loads((folder / "t.json").read_text()))
    assert nimble.title == "custom, nimble, batch 2, cpu" and opara.title == "custom, opara, batch 2, cpu"
    assert Counter(bar.name for bar in nimble.bars) == Counter(bar.name for bar in opara.bars)
    assert {bar.kind for bar in opara.bars} == {COMPUTE, MEMORY} and len(opara.streams) == 2
    assert [line.split(": ")[0] for line in done.stdout.splitlines()] == 2 * [str(folder / "t.json")]
    assert set(folder.iterdir()) - {folder / "__pycache__"} == {folder / "tiny.py", folder / "t.json"}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["runner.classify=guess"], "measured, table"),
        (["system=opara", "system.resource=memory"], "shared_memory, largest_share"),
        (["output=."], "a folder"),
    ],
)
def test_a_wrong_request_is_one_line(run: Run, asked: list[str], says: str) -> None:
    done = run("runner=timeline", "model=custom", "model.factory=tiny:make", "device=cpu", *asked)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1 and says in done.stderr


@pytest.mark.slow
def test_a_system_that_does_not_run_here_leaves_the_others(run: Run, folder: Path) -> None:
    asked = ["-m", "runner=timeline", "model=custom", "model.factory=tiny:make", "runner.classify=table"]
    done = run(*asked, "system=cuda_graph,eager", "output=t.json", "device=cpu")
    assert done.returncode == 0 and "cuda_graph on custom: unsupported" in done.stderr
    assert [t.title for t in from_trace(json.loads((folder / "t.json").read_text()))] == ["custom, eager, batch 1, cpu"]


@pytest.mark.parametrize(
    ("name", "asked", "says", "own_process"),
    [
        ("timeline", [], "required: TRACE.json", True),
        ("timeline", ["nowhere.json"], "nowhere.json: No such file", False),
        ("timeline", ["trace.json", "--window", "9", "10"], "nothing to draw in it", False),
        ("timeline", ["trace.json", "--output", "trace.json/x.png"], "trace.json/x.png: Not a directory", False),
        ("benchmark_scheduling", ["trace.json"], "not a schedule file", True),
        ("benchmark_ios_search", ["trace.json"], "not a schedule file", True),
        ("benchmark_ios_search", ["trace.json", "--r", "-1"], "--r -1 is not an integer of at least 0", False),
    ],
)
def test_a_wrong_request_of_a_script_is_one_line(
    script: Run, tmp_path: Path, name: str, asked: list[str], says: str, own_process: bool
) -> None:
    bar = Bar(0, "conv2d", 0.0, 1.0, COMPUTE)
    (tmp_path / "trace.json").write_text(json.dumps(to_trace([Timeline("a model", "by hand", (bar,))])))
    if own_process:
        command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *asked]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    else:
        done = script(name, *asked, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1 and says in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
