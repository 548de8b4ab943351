"""runner=timeline: what ran when, and on which stream."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run, without_progress
from hypothesis import given
from hypothesis import strategies as st
from made_records import cell
from modules import Branches
from torch import nn

import systems
from results.limits import Limits
from results.timeline import COMPUTE, MEMORY, UNKNOWN, Bar, Timeline, from_trace, to_trace
from runners.cell import timeline
from runners.cell.messages import Shown
from runners.request.request import Request, SweepOptions
from runners.showings import timeline as showing
from systems.base import Prepared, Unsupported
from systems.compilers.compiled import Compiled
from systems.profiling import intensity, profiler, trace
from systems.profiling.measurements import Measurements
from systems.profiling.profile import Kernel, OperatorProfile
from systems.profiling.profiler import to_entry
from systems.profiling.trace import DeviceEvent, launched_graph, replayed
from systems.scheduling.execution.scheduled import Scheduled
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


pytestmark = pytest.mark.usefixtures("cache_folder")


def recorded(system: str, classify: str = "table", device: str = "cpu") -> tuple[Timeline, Program, Prepared]:
    torch.manual_seed(0)
    module, inputs = Branches().eval().to(device), (torch.randn(2, 3, 64, 64, device=device),)
    prepared = systems.load(system).prepare(module, inputs)
    program = prepared.program if isinstance(prepared, Scheduled) else capture(module, inputs)
    run_timeline = timeline.record(prepared, program, inputs, classify, cell(system, runner="timeline"))
    prepared.close()
    return run_timeline, program, prepared


@pytest.mark.parametrize("system", ["nimble", "opara"])
def test_a_schedule_is_seen_as_it_ran(system: str) -> None:
    run_timeline, program, prepared = recorded(system)
    assert isinstance(prepared, Scheduled) and run_timeline.source == "worker threads"
    assert run_timeline.num_scheduled_streams == len(run_timeline.streams) == prepared.schedule.stream_count
    bars = {bar.details["operator"]: bar for bar in run_timeline.bars}
    assert sorted(bars) == list(range(len(program.graph))) and min(bar.start for bar in run_timeline.bars) == 0.0
    for v, bar in bars.items():
        assert bar.name == program.graph.operators[v].name and bar.stream == prepared.schedule.streams[v]
        assert bar.duration > 0 and bar.kind == (MEMORY if intensity.in_table(bar.name) else COMPUTE)
    for u, v in program.graph.edges:
        assert bars[u].end <= bars[v].start + 1e-9
    assert_one_at_a_time(run_timeline)


@pytest.mark.parametrize("classify", ["table", "measured"])
def test_a_system_without_a_schedule_is_seen_by_the_profiler(monkeypatch: pytest.MonkeyPatch, classify: str) -> None:
    monkeypatch.setattr(intensity, "ridge_point", lambda *_: 1.0)  # above it are the convolutions, whatever machine this is
    run_timeline, _, _ = recorded("eager", classify)
    assert [bar.name for bar in run_timeline.bars] == ["conv2d", "relu", "conv2d", "sigmoid", "cat"]
    assert [bar.kind for bar in run_timeline.bars] == [COMPUTE, MEMORY, COMPUTE, MEMORY, MEMORY]
    assert (
        run_timeline.streams == [0]
        and run_timeline.num_scheduled_streams is None
        and run_timeline.bars[0].details["shapes"] == [[2, 3, 64, 64], [64, 3, 3, 3], [64]]
    )
    assert_one_at_a_time(run_timeline)


def test_of_what_is_compiled_the_operators_within_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace as of torch.compile, with the names of its notes, its region, and the kernels that Inductor made; these are of
    several operators, so that the table knows them no more than the capture does.
    """
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
    monkeypatch.setattr(timeline, "exported", lambda _: trace.read({"traceEvents": events}))
    program = capture(nn.Conv2d(3, 4, 3).eval(), (torch.randn(2, 3, 8, 8),))
    monkeypatch.setattr(timeline, "kinds", lambda *_: [COMPUTE])
    bars = timeline._profiled(lambda: None, timeline._by_shapes(program, "measured"), "measured")
    bar_summaries = [(bar.name, bar.kind, round(bar.start * 1e3)) for bar in bars]
    fused, linear = ("fused_convolution_relu", UNKNOWN, 0), ("_linear_pointwise", UNKNOWN, 65)
    assert bar_summaries == [fused, ("convolution", COMPUTE, 10), linear]
    bars = timeline._profiled(lambda: None, {}, "table")
    assert [bar.kind for bar in bars] == [UNKNOWN, COMPUTE, COMPUTE]


def test_of_torchscript_the_branches_too_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it runs the second branch the output of the first lies on its stack, and torch.profiler lists all of that."""
    monkeypatch.setattr(intensity, "ridge_point", lambda *_: 1.0)
    run_timeline, _, _ = recorded("torchscript", "measured")
    assert [bar.kind for bar in run_timeline.bars] == [COMPUTE, MEMORY, COMPUTE, MEMORY, MEMORY]


def test_operators_that_nobody_sees_are_no_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Compiled):
        def run(self, inputs: Any) -> Any: ...

    class Session:
        def __init__(self, *_: Any):
            self.prepared = object.__new__(Elsewhere)

        def prepare(self) -> None:
            pass

    monkeypatch.setattr(timeline, "Session", Session)
    with pytest.raises(Unsupported, match="runs its own"):
        timeline.of_cell(cell(), "", lambda _: None, "table")


def assert_one_at_a_time(run_timeline: Timeline) -> None:
    for stream in run_timeline.streams:
        bars = sorted((bar for bar in run_timeline.bars if bar.stream == stream), key=lambda bar: bar.start)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(bars))


def test_an_operator_that_the_capture_does_not_know_is_of_unknown_kind() -> None:
    inputs = (torch.randn(3, 4),)
    prepared = systems.load("eager").prepare(nn.ReLU(), inputs)
    for classify, program, kind in (
        ("measured", None, UNKNOWN),
        ("measured", capture(nn.ReLU(), (torch.randn(4, 4),)), UNKNOWN),  # of another shape
        ("measured", capture(nn.ReLU(), inputs), MEMORY),
        ("table", None, MEMORY),
    ):
        assert [bar.kind for bar in timeline.record(prepared, program, inputs, classify, cell("eager")).bars] == [kind]


def test_a_call_without_an_operator_is_an_empty_timeline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = (torch.randn(2),)
    eager_cell = cell("eager", runner="timeline")
    run_timeline = timeline.record(
        systems.load("eager").prepare(nn.Identity(), inputs), None, inputs, "measured", eager_cell
    )
    assert run_timeline.bars == ()
    monkeypatch.setattr(showing, "ask", lambda *_: Shown(run_timeline.to_json()))
    file = tmp_path / "t.json"
    request = Request(
        (eager_cell,), SweepOptions(tmp_path, False, 1.0, None, rounds=0, max_load=1.0, gpus=(0,), output=file)
    )
    assert showing.Timeline(eager_cell.runner).run(request) == 0 and from_trace(json.loads(file.read_text())) == [
        run_timeline
    ]
    assert capsys.readouterr().out == f"{file}: nasnet, eager, batch 1, cpu: 0 operators on 0 streams in 0.000 ms\n"


# On a GPU, from events in the form of torch.profiler's, written by hand: two streams, the second with kernels that overlap.


def event(name: str, ts: float, dur: float, stream: int, category: str = "kernel", blocks: int = 8) -> DeviceEvent:
    arguments: dict[str, Any] = {"stream": stream, "correlation": 1}
    if category == "kernel":
        arguments |= {"grid": [blocks, 1, 1], "block": [64, 2, 1]}
    entry = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": arguments}
    (one,) = trace.on_device(trace.read({"traceEvents": [entry]}))
    return one


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

    def launched(*correlations: int) -> list[DeviceEvent]:
        return [replace(e, correlation=c) for e, c in zip(EVENTS, correlations, strict=True)]

    graph = launched(1, 2, 2, 2, 2, 3)
    assert launched_graph(graph) == 2 and replayed(graph) == graph[1:5]
    assert timeline.kernel_bars(replayed(graph), {})[0].start == 0.0
    for all_of_it in (launched(1, 2, 3, 4, 5, 6), launched(1, 1, 2, 2, 3, 4)):  # no graph, or several
        assert launched_graph(all_of_it) is None and replayed(all_of_it) == all_of_it


def test_kernels_that_overlap_on_a_stream_get_rows_of_their_own() -> None:
    assert timeline.apart(EVENTS) == [(7, 0), (13, 0), (13, 1), (13, 1), (13, 0), (7, 0)]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(0, 2)), min_size=1))
def test_rows_hold_one_kernel_at_a_time_and_are_as_few_as_can_be(spans: list[tuple[int, int, int]]) -> None:
    events = [event("k", ts, dur, stream) for ts, dur, stream in sorted(spans)]
    lanes = timeline.apart(events)
    for stream in {s for _, _, s in spans}:
        of = [(e.begin_us, e.end_us) for e in events if e.stream == stream]
        busiest = max(sum(begin <= t < end for begin, end in of) for t in range(40))
        assert {lane for s, lane in lanes if s == stream} == set(range(busiest))
    for i, a in enumerate(events):
        for b, lane in zip(events[i + 1 :], lanes[i + 1 :], strict=True):
            assert lane != lanes[i] or a.end_us <= b.begin_us


def test_kernels_are_recognised_by_what_the_operators_launch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    program = capture(Branches().eval(), (torch.randn(1, 3, 8, 8),))
    convolution, relu = EVENTS[1].name, EVENTS[2].name
    names = {"conv2d": convolution, "relu": relu, "sigmoid": relu}
    kernels = [
        (Kernel(names[o.name], 0.1, (2, 4, 1), (128, 1, 1), 32, 0),) if o.name in names else ()
        for o in program.graph.operators
    ]
    monkeypatch.setattr(profiler, "on_gpu", lambda _: [OperatorProfile(0.1, k) for k in kernels])
    elsewhere = to_entry(OperatorProfile(0.1, (Kernel(EVENTS[5].name, 0.1, (8, 1, 1), (128, 1, 1), 32, 0),)))
    Measurements("opara", program.device).add(  # what they launched in another process
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
    run_timeline, program, _ = recorded(system, device="cuda")
    names = Counter(bar.name for bar in run_timeline.bars)
    assert {"conv2d", "relu", "cat"} <= {part for name in names for part in name.split("/")}
    assert {bar.kind for bar in run_timeline.bars} >= {COMPUTE, MEMORY} and len(run_timeline.bars) >= len(program.graph) - 1
    assert all(bar.duration > 0 for bar in run_timeline.bars)
    assert (run_timeline.num_scheduled_streams is None) == (system in ("eager", "cuda_graph"))
    assert_one_at_a_time(run_timeline)


def test_a_trace_has_a_moment_for_each_limit() -> None:
    limits = Limits(0.5, 2.0, sm_area_ms=0.75, traffic_ms=0.0, launch_ms=0.25, when="now")
    bare = Timeline(cell("nimble", runner="timeline"), "kernels", (Bar(0, "conv2d", 0.0, 1.0, COMPUTE),))
    bounded = replace(bare, limits=limits)
    assert list(limits.bounds.items()) == [
        ("SM area", 0.75),
        ("critical path", 0.5),
        ("launch", 0.25),
        ("memory traffic", 0.0),
    ]
    trace = to_trace([bare, bounded])
    moments = [(e["pid"], e["name"], e["ts"]) for e in trace["traceEvents"] if e["ph"] == "i"]
    assert moments == [(2, f"limit: {name}", ms * 1e3) for name, ms in limits.bounds.items()]
    assert from_trace(json.loads(json.dumps(trace))) == [bare, bounded]


# The command line


@pytest.mark.slow
def test_two_systems_make_one_trace(run: Run, folder: Path) -> None:
    arguments = ["-m", "runner=timeline", "model=custom", "model.factory=tiny:make", "runner.classify=table", "batch=2"]
    done = run(*arguments, "system=nimble,opara", "output=t.json")
    assert done.returncode == 0, done.stderr
    nimble, opara = from_trace(json.loads((folder / "t.json").read_text()))
    assert nimble.title == "custom (factory=tiny:make), nimble, batch 2, cpu"
    assert opara.title == "custom (factory=tiny:make), opara, batch 2, cpu"
    assert Counter(bar.name for bar in nimble.bars) == Counter(bar.name for bar in opara.bars)
    assert {bar.kind for bar in opara.bars} == {COMPUTE, MEMORY} and len(opara.streams) == 2
    assert [line.split(": ")[0] for line in done.stdout.splitlines()] == 2 * [str(folder / "t.json")]
    assert nimble.limits is not None and nimble.limits.operators == len(nimble.bars)
    assert all(f", critical path {t.limits.critical_path_ms:.3f} ms" in done.stdout for t in (nimble, opara) if t.limits)
    assert set(folder.iterdir()) - {folder / "__pycache__"} == {folder / "tiny.py", folder / "t.json"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["runner.classify=guess"], "measured, table"),
        (["system=opara", "system.resource=memory"], "shared_memory, largest_share"),
        (["output=."], "a folder"),
    ],
)
def test_a_wrong_request_is_one_line(run_here: Run, arguments: list[str], says: str) -> None:
    done = run_here("runner=timeline", "model=custom", "model.factory=tiny:make", "device=cpu", *arguments)
    assert done.returncode == 2 and done.stdout == "" and len(without_progress(done.stderr)) == 1 and says in done.stderr


@pytest.mark.slow
def test_a_system_that_does_not_run_here_leaves_the_others(run: Run, folder: Path) -> None:
    arguments = ["-m", "runner=timeline", "model=custom", "model.factory=tiny:make", "runner.classify=table"]
    done = run(*arguments, "system=cuda_graph,eager", "output=t.json", "device=cpu", "precision=fp32")
    assert done.returncode == 0 and "cuda_graph on custom: unsupported" in done.stderr
    (eager,) = from_trace(json.loads((folder / "t.json").read_text()))
    assert eager.title == "custom (factory=tiny:make), eager, batch 1, fp32, cpu"
