"""Timelines as a trace, which Perfetto opens, and the picture made of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib.colors
import pytest
from conftest import ROOT, Run
from hypothesis import given
from hypothesis import strategies as st
from made_records import cell
from PIL import Image

import scripts.timeline as picture
from results.timeline import COMPUTE, KINDS, MEMORY, UNKNOWN, Bar, Timeline, from_trace, to_trace
from scripts.charts.names import written

ONE, TWO = cell(), cell("opara", batch=8, precision="fp16")

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
    cell=st.sampled_from([cell(), cell("nimble_fused", "bert", batch=8, precision="fp16"), cell("of_old", "x, y")]),
    source=texts,
    bars=st.lists(bars_, max_size=6).map(tuple),
    num_scheduled_streams=st.none() | st.integers(1, 99),
)


@given(st.lists(timelines_, max_size=3))
def test_a_trace_reads_back(timelines: list[Timeline]) -> None:
    again = from_trace(json.loads(json.dumps(to_trace(timelines))))
    summaries = [[(t.cell, t.source, t.num_scheduled_streams, len(t.bars)) for t in some] for some in (again, timelines)]
    assert summaries[0] == summaries[1]
    for got, wanted in zip(again, timelines, strict=True):
        expected = sorted(wanted.bars, key=lambda bar: (bar.start, bar.stream))
        for a, b in zip(got.bars, expected, strict=True):
            assert (a.stream, a.name, a.kind, a.details) == (b.stream, b.name, b.kind, b.details)
            assert (a.start, a.duration) == pytest.approx((b.start, b.duration))
        assert Timeline.from_json(json.loads(json.dumps(wanted.to_json()))) == wanted


def test_a_trace_is_in_chromes_format() -> None:
    """The fields that Perfetto's importer asks for; times in microseconds; no two threads of a trace share a number."""
    bars = (Bar(3, "conv2d", 1.5, 0.25, COMPUTE), Bar(0, "relu", 0.0, 1.0, MEMORY))
    trace = to_trace([Timeline(ONE, "x", bars), Timeline(TWO, "x", bars)])
    events = trace["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} == {"X", "M"} and len(complete) == 4
    assert all({"pid", "tid", "ts", "dur", "name", "cat", "args"} <= set(e) for e in complete)
    assert (complete[1]["ts"], complete[1]["dur"]) == (1500.0, 250.0)
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len({tid for _, tid in named}) == 4 and sorted(named.values()) == ["stream 0", "stream 0", "stream 3", "stream 3"]
    assert {(e["pid"], e["tid"]) for e in complete} == set(named)
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "nasnet, nimble, batch 1, cpu",
        "nasnet, opara, batch 8, fp16, cpu",
    ]


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
    Timeline(ONE, "x", (Bar(0, "conv2d", 0.0, 4.0, COMPUTE), Bar(2, "relu", 1.0, 2.0, MEMORY))),
    Timeline(TWO, "x", (Bar(0, "conv2d", 0.0, 3.0, COMPUTE), Bar(0, "add", 3.0, 1.0, UNKNOWN))),
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
    assert [t.get_text() for t in first.get_yticklabels()] == ["0", "2"] and "Nimble" in first.get_title(loc="left")
    assert {t.get_text() for t in first.texts} == {"conv2d", "relu"}
    assert [t.get_text() for t in figure.legends[0].texts] == list(KINDS)
    picture.plt.close(figure)


def test_streams_that_are_not_the_schedules_are_told_of() -> None:
    bars = EXAMPLE[0].bars  # on two
    titles = {n: picture.draw([Timeline(ONE, "seen", bars, n)]).axes[0].get_title(loc="left") for n in (None, 2, 1, 28)}
    assert titles == {
        None: "Nimble: 4.000 ms",
        2: "Nimble: 4.000 ms (2 streams)",
        1: "Nimble: 4.000 ms (1 stream scheduled, 2 seen)",
        28: "Nimble: 4.000 ms (28 streams scheduled, 2 seen)",
    }
    picture.plt.close("all")


def test_a_picture_names_the_machine_and_the_precision() -> None:
    """As the trace has them; the kind of device where it names no machine, as older ones do not; none of a virtual clock."""
    bars = EXAMPLE[0].bars
    for machine, source, place in (
        ("NVIDIA X, torch 1.0", "seen", f"NVIDIA X, torch 1.0, {ONE.conditions.precision}, "),
        ("", "seen", f"a CPU, {ONE.conditions.precision}, "),
        ("", "virtual clock", ""),
    ):
        read = from_trace(json.loads(json.dumps(to_trace([Timeline(ONE, source, bars, machine=machine)]))))
        figure = picture.draw(read, remark="a note")
        assert figure.legends[0].get_title().get_text() == f"{place}{written(ONE.model.label)}, batch 1, {source}"
        assert figure.get_supxlabel() == "a note"
        picture.plt.close(figure)


def test_the_title_has_what_timelines_share_and_a_panel_what_is_its_own() -> None:
    figure = picture.draw(EXAMPLE)
    assert figure.legends[0].get_title().get_text() == "a CPU, NASNet-A (mobile), x"
    panels = [axes.get_title(loc="left") for axes in figure.axes]
    assert panels == ["tf32, batch 1, Nimble: 4.000 ms", "fp16, batch 8, Opara: 4.000 ms"]
    picture.plt.close(figure)


def test_many_streams_have_the_height_of_few_and_fewer_numbers() -> None:
    heights = []
    for count in (90, 180):
        bars = tuple(Bar(s, "conv2d", 0.0, 4.0, COMPUTE) for s in range(count))
        figure = picture.draw([Timeline(ONE, "x", bars), *EXAMPLE])
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


def test_bars_without_a_duration_are_drawn() -> None:
    """Also where all of them are at one moment, and not beside the window."""
    first, later = (
        Timeline(ONE, "x", tuple(Bar(s, "add", t, 0.0, MEMORY) for s, t in enumerate(at))) for at in ((0, 0), (0, 5.0))
    )
    for timelines, window, end, numbers in (
        ([first], None, picture.INSTANT, [2]),
        ([later], None, 5.0, [2]),
        ([first, later], (5.0, 6.0), 6.0, [0, 1]),
    ):
        figure = picture.draw(timelines, window)
        assert [len(axes.patches) for axes in figure.axes] == numbers and figure.axes[0].get_xlim()[1] == end
        picture.plt.close(figure)


def test_pictures_are_written_from_the_command_line(script: Run, tmp_path: Path) -> None:
    for number, part in enumerate(EXAMPLE):
        (tmp_path / f"{number}.json").write_text(json.dumps(to_trace([part])))
    command = [sys.executable, str(ROOT / "scripts" / "timeline.py"), "0.json", "1.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.split() == ["0.png", "0.svg"], done.stderr
    done = script("timeline", "0.json", "--output", "new/deep/0.svg", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "new" / "deep" / "0.svg").is_file(), done.stderr
    with Image.open(tmp_path / "0.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 20)}
    for kind in KINDS:
        assert tuple(round(255 * c) for c in matplotlib.colors.to_rgb(picture.COLOURS[kind])) in colours
    svg = ElementTree.parse(tmp_path / "0.svg").getroot()
    assert svg.tag.endswith("}svg")
    assert all(picture.COLOURS[kind] in (tmp_path / "0.svg").read_text() for kind in KINDS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bad.json"], "not a timeline, as runner=timeline writes one: it lacks 'traceEvents'"),
        (["nowhere.json"], "No such file"),
        (["empty.json"], "nothing to draw"),
        (["good.json", "--window", "3", "2"], "no span of time"),
        (["good.json", "--window", "0", "inf"], "no span of time"),
        (["good.json", "--output", "picture.what"], "what"),
        (["good.json", "--output", "good.json/deeper/picture.png"], "good.json is not a folder"),
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
    output = capsys.readouterr()
    assert end.value.code == 2 and says in output.err.splitlines()[-1] and output.out == ""


@pytest.mark.parametrize(
    ("arguments", "says", "own_process"),
    [
        ([], "required: TRACE.json", True),
        (["nowhere.json"], "nowhere.json: No such file", False),
        ([str(ROOT / "README.md")], "README.md: no JSON: Expecting value", False),
        (["trace.json", "--window", "9", "10"], "nothing to draw in it", False),
        (["trace.json", "--output", "trace.json/x.png"], "trace.json is not a folder", False),
    ],
)
def test_a_wrong_request_is_one_line(
    script: Run, tmp_path: Path, arguments: list[str], says: str, own_process: bool
) -> None:
    bar = Bar(0, "conv2d", 0.0, 1.0, COMPUTE)
    (tmp_path / "trace.json").write_text(json.dumps(to_trace([Timeline(ONE, "by hand", (bar,))])))
    if own_process:
        command = [sys.executable, str(ROOT / "scripts" / "timeline.py"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    else:
        done = script("timeline", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1 and says in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
