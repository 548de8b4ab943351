"""Bars, dots and marks of charts: what was measured and published, and what is said where nothing was."""

from dataclasses import replace

import pytest
from drawn_charts import (
    CUDA_GRAPH,
    DEPTH_FIRST,
    EAGER,
    NIMBLE,
    REFERENCE,
    Selection,
    changed,
    drawn,
    heights,
    launched,
    measured,
    name_of,
    points,
    reference,
)
from made_records import cell, record, rounds
from made_records import latency as latency_alone

from results.cell import Choice, named
from results.finding import Finding
from results.published.values import exhibit
from results.selection import WORDS, NoResults, by_setting, latency_of, read
from results.siblings import siblings
from scripts import plot
from scripts.charts import bars, claims, latency, limits, search, sm_efficiency, speedup, style, throughput

pytestmark = pytest.mark.usefixtures("closed_figures")


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


def test_machines_are_not_mixed() -> None:
    other = [
        replace(r, environment=replace(r.environment, gpu="NVIDIA V100"), id="v" + r.id) for r in measured((8,)).records
    ]
    selections_by_setting = by_setting([*reference(), *other])
    assert [setting.place for setting in selections_by_setting] == ["NVIDIA H200", "NVIDIA V100"]
    assert [len(m.records) for m in selections_by_setting.values()] == [145, len(other)]
