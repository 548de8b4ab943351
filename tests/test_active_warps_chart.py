"""Active warps over a call: the chart, and the exhibit that shows it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import pytest
from made_records import ENVIRONMENT, cell, record
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from results.course import Course
from results.occupation import ActiveWarps
from results.record import Record
from results.selection import NoResults
from results.selection import Selection as Selected
from scripts.charts import active_warps as chart
from scripts.charts import style
from scripts.charts.chart import Chart
from scripts.charts.style import LOOKS
from scripts.exhibits.evidence import Evidence, select
from scripts.exhibits.findings import findings
from scripts.exhibits.pictures import pictures
from scripts.exhibits.preset import Preset


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    plt.close("all")


def Selection(records: list[Record]) -> Selected:
    return Selected(records, style.order)


PLACE = replace(ENVIRONMENT, gpu="NVIDIA H200", host="there")


def made(system: str, active: ActiveWarps | None, model: str = "inception_v3", **more: Any) -> Record:
    """A record of runner=active_warps, as if from a GPU."""
    own = cell(system, model, "active_warps", device="cuda")
    return record(of=own, environment=PLACE, active_warps=active, **more)


def active(value: float, source: str, *steps: float) -> ActiveWarps:
    """Steps of a tenth of a millisecond."""
    return ActiveWarps(value, source, None, estimated_course=Course(tuple(i / 10 for i in range(len(steps) + 1)), steps))


SEQUENTIAL = active(276.8, "counters", 800.0, 0.0, 100.0, 300.0)
IOS = active(1250.0, "estimated", 1500.0, 1000.0)


def pictured_warps() -> Figure:
    """Two systems and two models, one of which timed out under one of them."""
    timeout = made("ios", None, "squeezenet", status="timeout", reason="too long")
    others = [made("sequential", active(9.0, "counters", 9.0, 12.0), "squeezenet"), timeout]
    return chart.draw(Selection([made("sequential", SEQUENTIAL), made("ios", IOS), *others])).figure


def test_each_system_has_a_panel_with_its_course_and_its_mean() -> None:
    drawn = chart.draw(Selection([made("ios", IOS), made("sequential", SEQUENTIAL)]))
    first, second = drawn.figure.axes
    assert [axes.get_title(loc="left") for axes in (first, second)] == ["sequential", "IOS"]
    assert "Inception-v3, batch 1" in drawn.figure.legends[0].get_title().get_text()
    assert first.get_title(loc="right") == "mean 277 counted, 300 estimated"
    assert second.get_title(loc="right") == "mean 1,250 estimated"
    assert first.get_xlim() == second.get_xlim() == (0, 0.4) and first.get_ylim() == second.get_ylim()
    assert first.get_ylim()[0] == 0 and first.get_ylim()[1] > 1500
    for axes, system, of in ((first, "sequential", SEQUENTIAL), (second, "ios", IOS)):
        for patch in (p for p in axes.patches if isinstance(p, StepPatch)):
            values, edges, _ = patch.get_data()
            assert of.estimated_course is not None
            assert list(values) == list(of.estimated_course.warps) and list(edges) == list(of.estimated_course.moments)
            assert to_rgb(patch.get_edgecolor() if not patch.get_fill() else patch.get_facecolor()) == pytest.approx(
                to_rgb(LOOKS[system].colour)
            )
        (level,) = axes.collections
        ((left, right),) = [(a[0], b[0]) for a, b in level.get_segments() if a[1] == b[1] == of.value]
        assert (left, right) == (0, of.estimated_course.moments[-1])
    assert "estimated" in drawn.caption and drawn.name == "active_warps"


def test_the_legend_tells_a_mean_from_an_estimate() -> None:
    """Each source of a mean has a dash of its own, and stands in the legend where a panel has it."""
    course, counted, estimated = (
        "course of a call, estimated from its kernels",
        *(words for words, _ in chart.MEANS.values()),
    )
    both = [made("ios", IOS), made("sequential", SEQUENTIAL)]
    for records, words in (
        (both, [course, counted, estimated]),
        (both[:1], [course, estimated]),
        (both[1:], [course, counted]),
    ):
        figure = chart.draw(Selection(records)).figure
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == words
        dashes = {str(axes.collections[0].get_linestyle()) for axes in figure.axes}
        assert len(dashes) == len(records)


def test_models_have_scales_of_their_own_and_what_is_missing_says_why() -> None:
    others = [
        made("sequential", active(9.0, "estimated", 9.0), "squeezenet"),
        made("ios", None, "squeezenet", status="timeout", reason="too long"),
        made("sequential", ActiveWarps(1.0, "counters", None), "nasnet"),
    ]
    figure = chart.draw(Selection([made("ios", IOS), made("sequential", SEQUENTIAL), *others])).figure
    titles = [axes.get_title(loc="left").split(", ") for axes in figure.axes]
    assert titles == [[s, m] for m in ("Inception-v3", "SqueezeNet") for s in ("sequential", "IOS")]
    assert [axes.get_xlim()[1] for axes in figure.axes] == [0.4, 0.4, 0.1, 0.1]
    assert [t.get_text() for t in figure.axes[3].texts] == ["timed out"] and not figure.axes[3].patches


@pytest.mark.parametrize("course", [None, Course()])
def test_means_alone_leave_the_chart_of_the_claims(course: Course | None) -> None:
    """So do those of records that hold no course."""
    means = [made(s, ActiveWarps(v, "counters", None, estimated_course=course)) for s, v in (("sequential", 2), ("ios", 3))]
    with pytest.raises(NoResults, match=r"^no record holds the course of warps.*force=true.*$"):
        chart.draw(Selection(means))
    charts, refused = exhibited(means)
    assert list(charts) == ["claims"] and list(refused) == ["active_warps"]


def test_the_exhibit_shows_the_course_first_and_the_claim_as_before() -> None:
    records = [made("sequential", SEQUENTIAL), made("ios", replace(IOS, source="counters"))]
    charts, refused = exhibited(records)
    assert list(charts) == ["active_warps", "claims"] and not refused


def exhibited(records: list[Record]) -> tuple[dict[str, Chart], dict[str, str]]:
    preset = Preset.read("ios/active_warps")
    evidence = Evidence(select(records, [preset.sweep]))
    return pictures(preset, evidence, findings(preset, evidence))
