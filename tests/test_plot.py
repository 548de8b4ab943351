"""Charts: what they show, what they must not show, and that they can be read."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from weakref import WeakSet

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import pytest
from conftest import ROOT, Run
from hypothesis import example, given
from hypothesis import strategies as st
from made_records import cell, chosen, record, rounds
from made_records import latency as latency_alone
from matplotlib.figure import Figure
from matplotlib.text import Text
from test_active_warps_chart import pictured_warps

from results.cell import Cell, Choice, Conditions, choose, named
from results.finding import Finding
from results.published.values import exhibit
from results.quantity import Measured, Quantity
from results.record import Record
from results.selection import WORDS, NoResults, by_setting, latency_of, read
from results.selection import Selection as Selected
from results.serving import Iterations, ServedRequests, ServedTrace, Serving
from results.siblings import siblings
from results.store import Store
from scripts import plot
from scripts.charts import (
    bars,
    batch_course,
    claims,
    dots,
    latency,
    limits,
    memory,
    quantity,
    search,
    serving,
    sm_efficiency,
    speedup,
    style,
    throughput,
)
from scripts.charts.names import written
from scripts.exhibits import findings
from scripts.exhibits.evidence import Evidence
from scripts.exhibits.preset import Preset, names
from scripts.page import content
from scripts.table import DASH

REFERENCE = ROOT / "results" / "reference" / "h200"
DEPTH_FIRST = named("system", "opara", launch_order="depth_first")
SERVED = Path("results") / "reference" / "h200" / "serving-extensions.jsonl.gz"
EAGER, NIMBLE, CUDA_GRAPH = (named("system", name) for name in ("eager", "nimble", "cuda_graph"))


def Selection(records: Sequence[Record]) -> Selected:
    return Selected(records, style.order)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


@cache
def reference() -> list[Record]:
    return read([REFERENCE / "overview.jsonl.gz"])


def measured(batches: tuple[int, ...] = (1,)) -> Selected:
    return Selection(reference()).only(batches=batches)


@cache
def several() -> Selected:
    """Of sweeps over different systems, most of which were not measured on most models."""
    folders = [REFERENCE / f"{name}.jsonl.gz" for name in ("overview", "ios", "ios-pruning", "tuned")]
    return Selection(read(folders)).only(models=["nasnet", "inception_v3", "bert", "squeezenet_bypass"])


@cache
def launched() -> Selected:
    """One model at several batches, under systems of which one has a long label."""
    return Selection(read([REFERENCE / "opara.jsonl.gz"])).only(
        models=["googlenet"], systems=["opara", DEPTH_FIRST.label, "opara (launch_order=reverse)"]
    )


def changed(model: str, system: str, **new: Any) -> Selected:
    """The reference at batch 1 with something of one record replaced."""
    own = model, system
    return Selection([replace(r, **new) if name_of(r) == own else r for r in measured().records])


def name_of(record: Record) -> tuple[str, str]:
    return record.cell.model.name, record.cell.system.label


laid_out = WeakSet[Figure]()  # a test looks at a figure several times, and laying it out takes half a second


def lay_out(figure: Figure) -> None:
    """Give each part of a figure its place, once."""
    if figure not in laid_out:
        figure.draw_without_rendering()
        laid_out.add(figure)


def texts(figure: Figure) -> list[Text]:
    """The words that a figure shows, once it is laid out, without the ticks that lie outside of an axis."""
    lay_out(figure)
    visible_texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]  # type: ignore[attr-defined]
    hidden: set[int] = set()
    for axes in figure.axes:
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            spare = axis.majorTicks[len(axis.get_major_ticks()) :]  # of an earlier layout
            hidden |= {id(label) for tick in spare for label in (tick.label1, tick.label2)}
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not min(low, high) <= tick.get_loc() <= max(low, high) or not axes.axison:
                    hidden |= {id(tick.label1), id(tick.label2)}
    return [t for t in visible_texts if id(t) not in hidden]  # type: ignore[misc]


def drawn(figure: Figure) -> str:
    return "\n".join(t.get_text() for t in texts(figure))


CHARTS: dict[str, Callable[[], Figure]] = {
    "speedup": lambda: speedup.draw(measured(), EAGER, exhibit("nimble/figure7")).figure,
    "speedup over several batches": lambda: speedup.draw(measured((8, 32)), CUDA_GRAPH).figure,
    "throughput": lambda: throughput.draw(Selection(reference())).figure,
    "latency, first page": lambda: latency.draw(latency.pages(measured())[0]).figure,
    "latency, last page": lambda: latency.draw(latency.pages(measured())[-1]).figure,
    "memory": lambda: memory.draw(measured()).figure,
    "counted": lambda: sm_efficiency.draw(measured(), "counters").figure,
    "estimated": lambda: sm_efficiency.draw(measured(), "estimated").figure,
    "search": lambda: search.draw(measured()).figure,
    "limits": lambda: limits.draw(measured()).figure,
    "limits of one": lambda: limits.draw(measured().only(models=["nasnet"])).figure,
    "speedup of several sweeps": lambda: speedup.draw(several().only(batches=[1])).figure,
    "throughput of several sweeps": lambda: throughput.draw(several()).figure,
    "latency of several sweeps": lambda: latency.draw(several().only(batches=[1])).figure,
    "memory of several sweeps": lambda: memory.draw(several().only(batches=[1])).figure,
    "active warps": pictured_warps,
    "course of batches": lambda: batch_course.draw(Selected(read([ROOT / SERVED]), style.order), 1).figure,
    "speedup over a long label": lambda: speedup.draw(launched(), DEPTH_FIRST).figure,
    "speedup over a long label at one batch": lambda: speedup.draw(launched().only(batches=[8]), DEPTH_FIRST).figure,
    "speedup of one": lambda: speedup.draw(measured().only(models=["nasnet"], systems=["nimble", "eager"])).figure,
}


def check_words(figure: Figure) -> None:
    """In print: no word is under 5.5 points, none is cut off at the paper's edge, and none lies on another."""
    shown = texts(figure)
    boxes = [(t.get_text(), t.get_window_extent()) for t in shown]
    edge = figure.bbox
    for text, box in boxes:
        assert box.x0 >= edge.x0 - 1 and box.x1 <= edge.x1 + 1 and box.y0 >= edge.y0 - 1 and box.y1 <= edge.y1 + 1, text
    assert min(t.get_fontsize() for t in shown) >= 5.5
    for (a, x), (b, y) in combinations(boxes, 2):
        wide, tall = min(x.x1, y.x1) - max(x.x0, y.x0), min(x.y1, y.y1) - max(x.y0, y.y0)
        assert wide < 2 or tall < 2, f"{a!r} lies on {b!r}"


ALIKE = ("latency, last page", "memory of several sweeps", "throughput of several sweeps", "limits of one")
ALIKE += ("speedup over a long label at one batch",)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in CHARTS])
def test_a_chart_can_be_read(name: str) -> None:
    with style.house():
        figure = CHARTS[name]()
        assert figure.get_figwidth() == style.PAGE and figure.get_figheight() < 11
        check_words(figure)
        assert "results/exhibits" not in drawn(figure)  # a schedule's file is told by its name


@pytest.mark.parametrize(
    ("name", "part"),
    [
        pytest.param(name, part, marks=[pytest.mark.slow] * (part != number % 3))
        for number, name in enumerate(names())
        for part in range(3)
    ],
)
def test_claims_can_be_read(name: str, part: int) -> None:
    """Whatever was measured of an exhibit, and however long the reason is where it was not."""
    unknown = findings.findings(Preset.read(name), Evidence())
    part %= min(3, len(unknown))
    long = "the worker ended with status 1 and said nothing but that its device is none of those that it was made for"
    exhibit_findings = [
        replace(f, ours=1.2 * f.published) if i % 3 == part else replace(f, reason=(f.reason, long)[(i + part) % 2])
        for i, f in enumerate(unknown)
    ]
    with style.house():
        figure = claims.draw(exhibit_findings, name.partition("/")[0], "title").figure
        check_words(figure)
        for axes in figure.axes:
            box = axes.get_window_extent()
            assert box.width >= 0.4 * figure.bbox.width
            for note in axes.texts:
                assert note.get_window_extent().x0 >= box.x0 - 1 and note.get_window_extent().x1 <= figure.bbox.x1
    shown = "".join(drawn(figure).split())
    for f in exhibit_findings:
        assert "".join(written(f.what).split()) in shown
        assert f.ours is not None or "".join(written(f.reason).split()) in shown


def test_a_figure_is_the_same_file_again(tmp_path: Path) -> None:
    for number in (1, 2):
        figure = speedup.draw(measured().only(models=["nasnet", "bert"])).figure
        style.save(figure, tmp_path / f"{number}.svg")
        style.save(figure, tmp_path / f"{number}.png")
    for suffix in ("svg", "png"):
        assert (tmp_path / f"1.{suffix}").read_bytes() == (tmp_path / f"2.{suffix}").read_bytes()


def heights(monkeypatch: pytest.MonkeyPatch, draw: Callable[[], Any]) -> dict[tuple[str, str], bars.Bar]:
    """What a chart of bars is given to draw, by model and system."""
    bars_by_cell: dict[tuple[str, str], bars.Bar] = {}
    original = bars.draw_bars

    def spy(m: Any, rows: Any, systems: Any, bar: Any, *more: Any, **named: Any) -> Figure:
        bars_by_cell.update({(row[0], s.label): b for row in rows for s in systems if (b := bar(row, s)) is not None})
        return original(m, rows, systems, bar, *more, **named)

    for module in (speedup, sm_efficiency):
        monkeypatch.setattr(module, "draw_bars", spy)
    draw()
    return bars_by_cell


def points(monkeypatch: pytest.MonkeyPatch, draw: Callable[[], Any]) -> dict[tuple[str, str], Any]:
    """The same of a chart of dots."""
    dots_by_cell: dict[tuple[str, str], Any] = {}
    original = dots.draw_dots

    def spy(m: Any, rows: Any, systems: Any, of: Any, *more: Any, **named: Any) -> Figure:
        dots_by_cell.update({(row[0], s.label): of(row, s) for row in rows for s in systems if of(row, s)})
        return original(m, rows, systems, of, *more, **named)

    for module in (limits, memory, search):
        monkeypatch.setattr(module, "draw_dots", spy)
    draw()
    return dots_by_cell


def test_what_a_system_learns_is_a_part_of_its_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    learned = changed("nasnet", "nimble", learning_s=1000.0)
    whole, _ = points(monkeypatch, lambda: search.draw(learned))["nasnet", "nimble"]
    without, _ = points(monkeypatch, lambda: search.draw(measured()))["nasnet", "nimble"]
    assert whole.value == pytest.approx(without.value + 1000) and not whole.filled


def test_searches_that_knew_of_none_before_are_drawn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cold = {("nasnet", 1, NIMBLE): 3.0, ("nasnet", 8, NIMBLE): 4.0}
    dots_by_cell = points(monkeypatch, lambda: search.draw(measured(), cold))
    assert {cell: [dot.value for dot in dots] for cell, dots in dots_by_cell.items()} == {("nasnet", "nimble"): [3.0]}
    assert len(points(monkeypatch, lambda: search.draw(measured()))["nasnet", "nimble"]) == 2
    with pytest.raises(NoResults):
        search.draw(measured(), {})


def test_bars_are_the_speedups_and_their_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    bars_by_cell = heights(monkeypatch, lambda: speedup.draw(measured(), CUDA_GRAPH))
    for group in siblings(reference()):
        if group.group.conditions.batch == 1:
            ratio = group.over(NIMBLE, CUDA_GRAPH)
            bar = bars_by_cell[group.group.model.name, "nimble"]
            assert ratio is not None and (bar.value, bar.low, bar.high) == (ratio.ratio, ratio.low, ratio.high)
    assert ("nasnet", "cuda_graph") not in bars_by_cell


def test_bars_that_are_all_zero_have_an_axis() -> None:
    """As the share of tokens computed in vain where there are none."""
    shown = measured()
    figure = bars.draw_bars(
        shown, shown.rows, shown.systems, lambda row, s: bars.Bar(0.0), lambda row, s: "", {}, "share", ""
    )
    assert all(low == 0 < high for low, high in (axes.get_ylim() for axes in figure.axes))


def test_what_has_no_baseline_is_named() -> None:
    records = [r for r in measured().records if name_of(r) != ("bert", "eager")]
    chart = speedup.draw(Selection(records))
    assert "1 without eager left out" in drawn(chart.figure) and "not measured in turn: bert." in chart.caption
    assert "left out" not in speedup.draw(measured()).caption.lower()


def test_dots_are_the_distances_to_the_critical_path(monkeypatch: pytest.MonkeyPatch) -> None:
    dots_by_cell = points(monkeypatch, lambda: limits.draw(measured()))
    for one in measured().records:
        (dot,) = dots_by_cell[name_of(one)]
        assert one.latency is not None
        host, of_model = one.latency.host, limits.limits_of(measured(), (one.cell.model.name, 1))
        assert of_model is not None and dot.value == pytest.approx(host.median / of_model.critical_path_ms)
        assert (dot.low, dot.high) == tuple(pytest.approx(end / of_model.critical_path_ms) for end in host.ci95)


@pytest.mark.parametrize(
    "status",
    ["incorrect", "unsupported", *(pytest.param(s, marks=pytest.mark.slow) for s in ("failed", "out_of_memory", "timeout"))],
)
def test_what_is_not_ok_has_no_speed_in_any_chart(monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    """Even where its record holds measurements; and every chart says what it is."""
    wrong = changed("nasnet", "nimble", status=status, reason="because").only(models=["nasnet", "bert"])
    for name in ("speedup", "sm_efficiency"):
        charts = []
        draw = plot.drawings(name, wrong, EAGER, ())[-1]
        bars_by_cell = heights(monkeypatch, lambda draw=draw, charts=charts: charts.append(draw()))
        assert ("nasnet", "nimble") not in bars_by_cell and ("nasnet", "cuda_graph") in bars_by_cell
        assert drawn(charts[0].figure).count(WORDS[status]) == 1
    for name in ("memory", "search", "limits"):
        charts = []
        draw = plot.drawings(name, wrong, EAGER, ())[0]
        dots_by_cell = points(monkeypatch, lambda draw=draw, charts=charts: charts.append(draw()))
        assert ("nasnet", "nimble") not in dots_by_cell and ("nasnet", "cuda_graph") in dots_by_cell
        assert f"Nimble: {WORDS[status]}" in drawn(charts[0].figure)
    assert WORDS[status] in drawn(latency.draw(wrong).figure)
    both = Selection([*wrong.records, *measured((8, 32)).records])
    assert f"batch 1 {WORDS[status]}: Nimble" in drawn(throughput.draw(both).figure).replace("\n", " ")


def test_an_older_speed_of_what_is_incorrect_now_is_not_shown() -> None:
    (record,) = [r for r in measured().records if name_of(r) == ("vgg16", "nimble")]
    newer = replace(record, status="incorrect", reason="wrong", when="2999-01-01", id="new")
    both = Selection([*measured().records, newer])
    assert both.over(("vgg16", 1), NIMBLE, EAGER) is None
    assert both.missing(("vgg16", 1), NIMBLE, latency_of) == "incorrect"
    assert measured().over(("vgg16", 1), NIMBLE, EAGER) is not None


def test_what_another_measurement_lacks_hides_no_speed() -> None:
    """A server that is unsupported says nothing of a call; that the same measurement is unsupported by now does."""
    row = ("nasnet", 1)
    called = record(of=cell(runner="latency"), latency=latency_alone(1.0))
    lacks = {"status": "unsupported", "reason": "because", "when": "2999-01-01"}
    of_another, of_the_same = (record(of=cell(runner=runner), **lacks) for runner in ("serving", "latency"))
    assert Selection([called, of_another]).part(row, NIMBLE, latency_of) == called.latency
    assert Selection([called, of_another]).records_of(row, NIMBLE) == [called]
    assert Selection([called, of_the_same]).part(row, NIMBLE, latency_of) is None
    assert Selection([of_another]).missing(row, NIMBLE, latency_of) == "unsupported"
    wrong = replace(of_another, status="incorrect")
    assert Selection([called, wrong]).part(row, NIMBLE, latency_of) is None


def test_the_newest_record_is_that_of_the_newest_rounds() -> None:
    """A further set of rounds leaves the rest of a record as it was."""
    own = record(latency=latency_alone(1.0), comparison=rounds("old", [1.0]))
    assert own.comparison is not None
    newer = replace(own, comparison=replace(own.comparison, group="new", when="2026-01-02"))
    for records in ([own, newer], [newer, own]):
        assert Selection(records).records == [newer, own]


def test_what_was_not_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [r for r in measured().records if r.cell.model.name in ("nasnet", "bert")]
    lacking = [r for r in records if name_of(r) != ("bert", "nimble")]
    assert "not measured" in drawn(speedup.draw(Selection(lacking)).figure)
    alone = changed("bert", "nimble", comparison=None).only(models=["nasnet", "bert"])
    assert "not in turn" in drawn(speedup.draw(alone).figure)
    with pytest.raises(NoResults, match="measured in turn with nobody"):
        speedup.draw(measured(), Choice("nobody", "nobody"))


def test_many_that_were_not_measured_take_one_place_and_leave_looks_as_they_are() -> None:
    one = several().only(batches=[1])
    lacking = [s for s in one.systems if s != EAGER and one.record(("bert", 1), s, lambda r: r.memory) is None]
    shown = drawn(memory.draw(one).figure)
    assert len(lacking) > 3 and f"{len(lacking)} others not measured" in shown
    assert f"{written(lacking[0].label)}: not measured" not in shown
    assert "TensorRT: unsupported" in shown  # what did not run is told by name
    counted = sm_efficiency.draw(Selection([*measured().records, *several().records]).only(batches=[1]), "counters").figure
    assert "torch.compile" in drawn(counted) and "IOS" not in drawn(counted)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9))
@example([1, 24, 2, 24, 27])
def test_groups_are_packed_in_order_on_as_few_panels_as_hold_them(widths: list[int]) -> None:
    """And the widest panel is as narrow as in any other way to cut them into as many."""
    panels = bars.packed(widths, 50)
    assert [i for panel in panels for i in panel] == list(range(len(widths)))
    widest: dict[int, int] = {}  # by how many panels there are
    for count in range(len(widths)):
        for cuts in combinations(range(1, len(widths)), count):
            panel_width = max(sum(widths[i:j]) for i, j in pairwise((0, *cuts, len(widths))))
            widest[count + 1] = min(panel_width, widest.get(count + 1, panel_width))
    assert len(panels) == min(count for count, width in widest.items() if width <= 50)
    assert max(sum(widths[i] for i in panel) for panel in panels) == widest[len(panels)]


def test_counted_and_estimated_efficiency_never_share_a_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {name_of(r): r.sm_efficiency.source for r in measured().records if r.sm_efficiency is not None}
    assert set(sources.values()) == {"counters", "estimated", None}  # None: counted wrongly, by what is known now
    for source in sm_efficiency.SOURCES:
        bars_by_cell = heights(monkeypatch, lambda source=source: sm_efficiency.draw(measured(), source))  # type: ignore[misc]
        assert {sources[cell] for cell in bars_by_cell} == {source} and len(bars_by_cell) == list(sources.values()).count(
            source
        )
    with pytest.raises(NoResults, match="was counted"):
        sm_efficiency.draw(measured((8,)), "counters")


def test_a_figure_of_nothing_has_its_number() -> None:
    """A GPU that is never idle: beside the paper's 91 % the axis begins far from 0."""
    idle = Finding("eager, GPU idle", "at_least", "%", 91.0, 0.0, 0.0, 0.0)
    assert "← 0" in drawn(claims.draw([idle], "nimble", "title").figure)
    assert "←" not in drawn(claims.draw([replace(idle, ours=80.0, low=80.0, high=80.0)], "nimble", "title").figure)


def test_what_was_counted_is_not_called_missing_among_the_estimated() -> None:
    large = measured().only(models=["nasnet_large", "bert"])
    counted, estimated = (drawn(sm_efficiency.draw(large, source).figure) for source in ("counters", "estimated"))
    # Of nasnet_large two systems were counted, one was estimated, and two were counted wrongly, by what is known now.
    assert estimated.splitlines().count("counted") == 2 and counted.splitlines().count("estimated") == 1
    assert estimated.count("not measured") == counted.count("not measured") == 2


def test_ratios_of_latencies_measured_alone_are_told_from_those_in_turn() -> None:
    """A profiler had been in the processes of the first set before their rounds, not in those of the second."""
    turns = read([REFERENCE / "turns.jsonl.gz"])
    mixed = Selection([*(r for r in reference() if r.cell.model.name == "gpt2"), *turns]).only(batches=[1])
    for selection, title, starred in (
        (measured(), "measured alone", []),
        (mixed, "* measured alone", ["GPT-2 *"]),
        (Selection(turns).only(batches=[1]), "", []),
    ):
        chart = speedup.draw(selection)
        words = drawn(chart.figure).splitlines()
        assert [word for word in words if word.endswith(" *")] == starred
        assert [word.partition("; ")[2] for word in words if word.startswith("NVIDIA")] == [title]
        assert ("a profiler had been" in chart.caption) == bool(title)


def test_a_part_looks_as_the_whole_does() -> None:
    """The variants of a system that are in one chart alone do not change how the others look in it."""
    last = max((s for s in launched().systems if s != DEPTH_FIRST), key=str)
    alone = launched().only(systems=[last.label])
    assert alone.systems == [last] and style.look(last, alone.among) == style.look(last, launched().among)
    assert style.look(last, alone.among) != style.look(last, alone.systems)


def test_notes_stand_below_all_points() -> None:
    """Of sweeps over different systems, where there is much to say of what was not measured."""
    for selection in (Selection(read([REFERENCE / f"{name}.jsonl.gz"])) for name in ("opara", "ios")):
        with style.house():
            figure = throughput.draw(selection).figure
            check_words(figure)
            for axes in figure.axes:
                assert axes.get_window_extent().height > 1.1 * figure.dpi or not axes.axison
                for text in axes.texts:
                    top = text.get_window_extent().y1
                    ends = [axes.transData.transform((0.1, y))[1] for line in axes.lines for y in line.get_ydata()]  # type: ignore[union-attr]
                    assert top < min(end for end in ends if end == end)


def test_published_values_are_marked_where_they_belong() -> None:
    rows, systems = [("nasnet", 1), ("resnet50", 1), ("nasnet", 8)], [NIMBLE, CUDA_GRAPH]
    marks_by_place = speedup.published_marks(exhibit("nimble/figure7"), EAGER, rows, systems)
    assert {place: [mark.value for mark in marks] for place, marks in marks_by_place.items()} == {
        (("nasnet", 1), NIMBLE): [22.34],
        (("resnet50", 1), NIMBLE): [4.32],
    }
    assert speedup.published_marks(exhibit("nimble/figure7"), CUDA_GRAPH, rows, systems) == {}
    single = speedup.published_marks(exhibit("nimble/table1"), named("system", "nimble_single_stream"), rows, systems)
    assert {place: [mark.value for mark in marks] for place, marks in single.items()} == {(("nasnet", 1), NIMBLE): [1.88]}
    everything = [v for source in ("nimble/figure7", "opara/figure5", "opara/figure9") for v in exhibit(source)]
    figure = speedup.draw(measured(), EAGER, everything).figure
    assert "Nimble paper, V100" in drawn(figure) and "Opara" not in drawn(figure)
    # A mark that would leave the axis is at its edge, with its number.
    small = measured().only(models=["mobilenet_v2"])
    assert "9.99" in drawn(speedup.draw(small, EAGER, exhibit("nimble/figure7")).figure)


def test_marks_of_one_paper_on_several_gpus_are_told_apart() -> None:
    (value,) = [v for v in exhibit("nimble/figure7") if (v.system, v.zoo_model) == ("nimble", "mobilenet_v2")]
    one = measured().only(models=["mobilenet_v2"], systems=["eager", "nimble"])
    figure = speedup.draw(one, EAGER, [value, replace(value, device="TITAN", value=3.0), replace(value, device="")]).figure
    (legend,) = figure.legends
    faces = {text.get_text(): handle for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)}
    marks = [handle.get_markerfacecolor() for label, handle in faces.items() if "paper" in label]  # type: ignore[union-attr]
    assert list(faces) == ["Nimble", "Nimble paper, V100", "Nimble paper, TITAN", "Nimble paper"]
    assert len(set(marks)) == 3 and marks[0] == "white"


def test_a_chart_of_one_model_has_a_group_for_each_batch() -> None:
    figure = speedup.draw(launched(), DEPTH_FIRST).figure
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_xticklabels()] == [f"batch {batch}" for batch in launched().batches]
    assert "GoogLeNet" in figure.legends[0].get_title().get_text()
    several_models = speedup.draw(measured((8, 32)), CUDA_GRAPH).figure
    labels = {" ".join(text.get_text().split()) for axes in several_models.axes for text in axes.get_xticklabels()}
    rows = measured((8, 32)).rows
    assert {label.replace("- ", "-") for label in labels} == {f"{written(model)} batch {batch}" for model, batch in rows}


def test_machines_are_not_mixed() -> None:
    other = [
        replace(r, environment=replace(r.environment, gpu="NVIDIA V100"), id="v" + r.id) for r in measured((8,)).records
    ]
    selections_by_setting = by_setting([*reference(), *other])
    assert [setting.place for setting in selections_by_setting] == ["NVIDIA H200", "NVIDIA V100"]
    assert [len(m.records) for m in selections_by_setting.values()] == [145, len(other)]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "scripts/plot.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_command_draws_png_and_svg(tmp_path: Path) -> None:
    arguments = (
        "speedup",
        "sm_efficiency",
        "--results",
        str(REFERENCE / "overview.jsonl.gz"),
        "--models",
        "nasnet,randwire",
        "--output",
        str(tmp_path),
    )
    done = run(*arguments, "-p", "nimble/figure7")
    assert done.returncode == 0, done.stderr
    names = {f"speedup-b{batch}" for batch in (1, 8, 32)} | {f"sm_efficiency-estimated-b{b}" for b in (1, 8, 32)}
    names |= {"sm_efficiency-counters-b1"}
    assert {file.name for file in tmp_path.iterdir()} == {f"{name}.{suffix}" for name in names for suffix in ("png", "svg")}
    assert sorted(done.stdout.split()) == sorted(str(file) for file in tmp_path.iterdir())
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speedupp"], "no chart is named speedupp: there is speedup"),
        (["--results", "nowhere"], "nowhere is not there"),
        (["--results", "README.md"], "README.md is a file"),
        (["--results", str(REFERENCE), "latency"], "latency is a chart, and charts go before --results"),
        (
            ["speedup", "--results", str(REFERENCE / "overview.jsonl.gz"), "--baseline", "nimbel"],
            "no system is named 'nimbel': did you mean nimble?",
        ),
        (["--results", "scripts"], "no record in scripts"),
        (["--results", str(REFERENCE / "overview.jsonl.gz"), "--models", "nasnot"], "no record of the model nasnot"),
        (["--results", str(REFERENCE / "overview.jsonl.gz"), "-p", "nimble/figure70"], "did you mean figure7?"),
        (["--results", str(REFERENCE / "overview.jsonl.gz"), "--formats", "gif"], "--formats gif is none of"),
        (
            ["memory", "--results", str(REFERENCE / "overview.jsonl.gz"), "--output", "README.md"],
            "README.md is not a folder",
        ),
    ],
)
def test_a_bad_request_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["plot.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        plot.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and len(error.splitlines()) == 1, error


def test_a_chart_that_was_asked_for_and_cannot_be_drawn_is_told() -> None:
    done = run("speedup", "--results", str(REFERENCE / "overview.jsonl.gz"), "--baseline", "opara")
    assert done.returncode == 1 and "nothing was measured in turn with opara" in done.stderr


# A quantity that nothing in scripts/ knows the name of


def energetic() -> list[Record]:
    """Records of an energy that describes itself; of one system it has no value."""
    made = []
    for model in ("nasnet", "vgg16"):
        for system, joules in (("eager", 5.0), ("nimble", 3.5), ("ios", None)):
            ends = (None, None) if joules is None else (joules - 0.5, joules + 0.5)
            reason = "no counter here" if joules is None else None
            energy = Quantity("per_call", "energy of a call", "mJ", joules, *ends, source="NVML", reason=reason)
            made.append(record(of=cell(system, model), measured={"energy": Measured((energy,))}))
    return made


def test_a_quantity_without_a_unit_is_drawn_with_none() -> None:
    share = Quantity("idle_share", "share of time", "", 0.25)
    chart = quantity.draw(Selection([record(measured={"engine": Measured((share,))})]), "engine.idle_share")
    assert "share of time" in drawn(chart.figure) and chart.caption.startswith("Share of time; less is better")


def test_bars_compare_cells_and_medians() -> None:
    """What one cell of several has is in no chart, nor is a distribution's tail; a cell that is alone has all but tails."""
    nimble_cell = cell()
    eager_cell = replace(nimble_cell, system=chosen("system", "eager"))

    def of(one: Cell, *names: str) -> Record:
        numbers = tuple(Quantity(name, name, "ms", 1.0) for name in names)
        return record(of=one, measured={"serving": Measured(numbers)})

    two_cells = Selection(
        [
            of(nimble_cell, "wait_p50_ms", "wait_p99_ms", "at_8", "use_p99"),
            of(eager_cell, "wait_p50_ms", "wait_p99_ms", "use_p99"),
        ]
    )
    assert [name for name in plot.usual(two_cells) if "." in name] == ["serving.use_p99", "serving.wait_p50_ms"]
    one_cell = Selection([of(nimble_cell, "wait_p50_ms", "wait_p99_ms", "at_8")])
    assert [name for name in plot.usual(one_cell) if "." in name] == ["serving.at_8", "serving.wait_p50_ms"]


def test_a_single_bar_stands_in_no_chart_beside_other_batches() -> None:
    nimble_cell = cell()
    eager_cell = replace(nimble_cell, system=chosen("system", "eager"))
    larger_cell = replace(nimble_cell, conditions=Conditions(8, nimble_cell.device))
    part = Measured((Quantity("wait_ms", "wait", "ms", 1.0),))
    records = [record(of=one, measured={"serving": part}) for one in (nimble_cell, eager_cell, larger_cell)]
    assert [suffix for suffix, _ in plot.per_batch("serving.wait_ms", Selection(records))] == ["-b1"]
    assert [suffix for suffix, _ in plot.per_batch("serving.wait_ms", Selection(records[1:]))] == ["-b1", "-b8"]


def test_a_quantity_is_drawn_by_its_name_with_its_unit() -> None:
    shown = Selection(energetic())
    assert list(shown.quantities()) == ["energy.per_call"]
    charts, refused = plot.draw_all(shown, ["energy.per_call"], EAGER, ())
    assert not refused
    figure = charts["energy.per_call"].figure
    words = drawn(figure)
    assert "energy of a call, mJ" in words and words.count("not measured") == 2
    (axes,) = figure.axes
    assert sorted(patch.get_height() for patch in axes.patches) == [3.5, 3.5, 5.0, 5.0]  # type: ignore[attr-defined]
    with style.house():
        check_words(figure)
    with pytest.raises(NoResults, match=r"no record holds a value of energy.beauty$"):
        quantity.draw(shown, "energy.beauty")
    with pytest.raises(NoResults, match=r"no record holds a value of energy.per_call: no counter here$"):
        quantity.draw(shown.only(systems=["ios"]), "energy.per_call")


def test_the_command_draws_a_quantity_and_names_the_nearest(tmp_path: Path, script: Run) -> None:
    store = Store(tmp_path / "runs")
    store.make()
    for one in energetic():
        store.write(one)
    done = script("plot", "energy.per_call", "--results", str(tmp_path / "runs"), "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["energy.per_call.png", "energy.per_call.svg"]
    done = script("plot", "energy.per_cal", "--results", str(tmp_path / "runs"))
    assert done.returncode == 2 and "did you mean energy.per_call?" in done.stderr


def test_a_quantity_has_a_column_in_the_report() -> None:
    tables = content.cells(Selection(energetic()), EAGER)
    (table,) = tables.values()
    (place,) = [i for i, column in enumerate(table.columns) if column.heading == "energy of a call, mJ"]
    texts = {row[2].text: row[place].text for row in table.rows}
    assert texts == {"eager": "5 [4.5, 5.5]", "nimble": "3.5 [3, 4]", "ios": DASH}


def test_latency_over_throughput_has_a_line_for_each_largest_batch() -> None:
    """Rates that were not kept up with have a throughput and no latency, and the newest trace of a rate counts."""

    def served(size: int, rate: float, throughput: float, latency_ms: float | None, when: str = "2026-01-01") -> Record:
        reason = None if latency_ms else "unstable"
        numbers = (
            Quantity("request_throughput", "request throughput", "req/s", throughput),
            Quantity("normalized_p50_ms", "normalized latency", "ms", latency_ms, reason=reason),
        )
        runner = choose("runner", "serving", rate=rate)
        one = replace(
            cell(), model=chosen("model", "gpt"), system=chosen("system", "orca", max_batch_size=size), runner=runner
        )
        return record(of=one, serving=Serving(numbers, (), 1, "real"), when=when)

    many = [served(8, 1.0, 0.9, 7.0, "2025-01-01"), served(8, 1.0, 1.0, 5.0), served(8, 4.0, 3.5, None)]
    chart = serving.draw(Selected([*many, served(1, 1.0, 1.0, 9.0)], style.order))
    (axes,) = chart.figure.axes
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines if line.get_marker() != "x"]
    assert ([1.0], [5.0]) in lines and ([1.0], [9.0]) in lines
    lost = [list(line.get_xdata()) for line in axes.lines if line.get_marker() == "x"]
    assert [3.5] in lost
    labels = {text.get_text() for legend in chart.figure.legends for text in legend.get_texts()}
    assert labels == {"Orca", "batches up to 1", "batches up to 8", "falls behind"}
    with pytest.raises(NoResults, match="keeps up"):
        serving.draw(Selected([served(8, 4.0, 3.5, None)], style.order))


def test_lines_of_one_system_with_other_options_look_different() -> None:
    name = "request_level_microbatches"
    systems = [
        chosen("system", name, max_batch_size=batch, microbatch_size=size) for batch, size in ((8, 2), (8, 4), (16, 2))
    ]
    styles = [serving._style(system, systems) for system in systems]
    assert styles[0]["color"] != styles[1]["color"] and styles[0]["linestyle"] != styles[1]["linestyle"]
    assert styles[0]["color"] == styles[2]["color"] and styles[0]["marker"] != styles[2]["marker"]


def test_the_course_of_batches_is_that_of_the_iterations() -> None:
    """An iteration's numbers stand until the next begins, and fall to none where the server has nothing to do."""
    iterations = Iterations((0.0, 0.1, 5.0), (0.1, 0.2, 5.1), (2, 3, 1), (9, 3, 4), (9, 3, 4), (40, 60, 20))
    served = ServedRequests((0.0,), (0.0,), (4,), (1,), ((5.1,),))
    one = replace(cell(), model=chosen("model", "gpt"), system=chosen("system", "orca", max_batch_size=4))

    def record_of(of: Cell, *traces: ServedTrace) -> Record:
        return record(of=of, serving=Serving((), traces, 100, "real"))

    told = record_of(one, ServedTrace(0, True, served, iterations))
    chart = batch_course.draw(Selected([told], style.order))
    top, bottom = chart.figure.axes
    (course, bound), (slots,) = top.lines, bottom.lines
    assert [list(line.get_xdata()) for line in (course, slots)] == [[0.0, 0.1, 0.2, 5.0, 5.1]] * 2
    assert list(course.get_ydata()) == [2, 3, 0, 1, 0] and list(slots.get_ydata()) == [40, 60, 0, 20, 0]
    assert set(bound.get_ydata()) == {4} and top.get_ylim()[1] > 4
    assert "of 100" in bottom.get_title(loc="left") and chart.name == "batch_course"
    plt.close(chart.figure)
    nothing = Iterations((), (), (), (), (), ())
    untold = record_of(replace(one, system=chosen("system", "vllm")), ServedTrace(0, True, served, nothing))
    with pytest.raises(NoResults, match="no record holds the iterations"):
        batch_course.draw(Selected([untold], style.order))
    other = record_of(replace(one, system=chosen("system", "orca_paged")), ServedTrace(0, True, served, iterations))
    both = Selected([told, untold, other], style.order)
    charts, _ = plot.draw_all(both, ["batch_course"], EAGER, ())
    assert list(charts) == ["batch_course-1", "batch_course-2"]
    assert "batch_course" in plot.usual(Selected([told, untold])) and "batch_course" not in plot.usual(both)
