"""The words of charts: none is cut off, none lies on another, and each part has its place."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from conftest import ROOT
from drawn_charts import (
    CUDA_GRAPH,
    DEPTH_FIRST,
    EAGER,
    REFERENCE,
    Selection,
    check_words,
    drawn,
    launched,
    measured,
    reference,
    several,
)
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from test_active_warps_chart import pictured_warps

from results.published.values import exhibit
from results.selection import Selection as Selected
from results.selection import read
from scripts.charts import (
    bars,
    batch_course,
    claims,
    latency,
    limits,
    memory,
    search,
    sm_efficiency,
    speedup,
    style,
    throughput,
)
from scripts.charts.names import written
from scripts.exhibits import findings
from scripts.exhibits.evidence import Evidence
from scripts.exhibits.preset import Preset, names

pytestmark = pytest.mark.usefixtures("closed_figures")
SERVED = Path("results") / "reference" / "h200" / "serving-extensions.jsonl.gz"


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


def test_a_chart_of_one_model_has_a_group_for_each_batch() -> None:
    figure = speedup.draw(launched(), DEPTH_FIRST).figure
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_xticklabels()] == [f"batch {batch}" for batch in launched().batches]
    assert "GoogLeNet" in figure.legends[0].get_title().get_text()
    several_models = speedup.draw(measured((8, 32)), CUDA_GRAPH).figure
    labels = {" ".join(text.get_text().split()) for axes in several_models.axes for text in axes.get_xticklabels()}
    rows = measured((8, 32)).rows
    assert {label.replace("- ", "-") for label in labels} == {f"{written(model)} batch {batch}" for model, batch in rows}
