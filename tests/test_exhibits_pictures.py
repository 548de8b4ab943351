"""Pictures of exhibits: what is drawn, and the papers' values in them."""

import re
from dataclasses import replace

import pytest
from judged_exhibits import EAGER, H200, NIMBLE_PAPER, OPARA, OPARA_PAPER, RECORDS, judged, made

from results.cell import named
from results.finding import HOLDS
from results.pack import sweep_of
from results.schedule import BlockSearch
from results.selection import NoResults, Selection
from results.store import Store
from scripts.charts.names import written
from scripts.charts.speedup import published_marks
from scripts.charts.style import PAPERS
from scripts.exhibits import findings, judgement, recorded
from scripts.exhibits.evidence import Evidence, select
from scripts.exhibits.pictures import pictures
from scripts.exhibits.preset import Preset


def test_the_papers_values_are_marked_where_they_are_judged() -> None:
    """Latencies as ratios, by the labels of the preset."""
    networks = ("inception_v3", "randwire", "nasnet_large", "squeezenet_bypass")
    systems = [named("system", name) for name in ("greedy", "ios_merge", "ios")]
    read = Preset.read("ios/schedules")
    rows = [(network, 1) for network in networks]
    marks = published_marks(findings.published_speedups(read), read.baseline, rows, systems)
    marked = {f"{row[0]}: {system} over sequential": mark.value for (row, system), (mark,) in marks.items()}
    judged_here = {f.what: f.published for f in judged("ios/schedules")[2]}
    assert len(marked) == 12 and marked == {what: pytest.approx(judged_here[what]) for what in marked}
    assert marked["squeezenet_bypass: greedy over sequential"] == pytest.approx(0.86 / 0.98)
    # Systems and a metric of other names, and a model whose name here is another network's in another paper.
    read = Preset.read("opara/figure2")
    marks = published_marks(findings.published_speedups(read), read.baseline, [("googlenet", 1)], [OPARA])
    assert not marks  # the largest over batches, of another classification of operators
    read = Preset.read("opara/figure8")
    marks = published_marks(findings.published_speedups(read), read.baseline, [("inception_v3", 1)], [OPARA, OPARA_PAPER])
    assert [(mark.value, mark.legend) for mark in marks[("inception_v3", 1), OPARA_PAPER]] == [
        (1.41, "opara paper, 2080 SUPER")
    ]
    read = Preset.read("ios/batch_sizes")
    ios = named("system", "ios")
    marks = published_marks(findings.published_speedups(read), read.baseline, [("inception_v3", 16)], [ios])
    assert [mark.legend for mark in marks[("inception_v3", 16), ios]] == ["ios paper, V100, ≈ read off a figure"]
    marks = published_marks(
        findings.published_speedups(Preset.read("nimble/figure7")), EAGER, [("nasnet", 1)], [NIMBLE_PAPER]
    )
    assert [mark.value for mark in marks[("nasnet", 1), NIMBLE_PAPER]] == [22.34]
    # A ratio to the baseline of the chart, whichever side of the verdict's that is; nothing of what is absent here.
    read = Preset.read("ios/frameworks")
    values = [v for v in findings.published_speedups(read) if v.zoo_model == "inception_v3"]
    assert {str(v.our_system): v.value for v in values} == {
        "tensorrt": pytest.approx(4.03 / 5.21),
    }


def test_the_batches_of_one_model_are_one_chart_without_marks_of_another_order() -> None:
    read = Preset.read("opara/figure2")
    records = Store(H200 / "opara.jsonl.gz").read().records.values()
    measured = select(list(records), [read.sweep])
    assert measured is not None and len(measured.batches) == 5
    charts, _ = pictures(read, Evidence(measured), [])
    assert list(charts) == ["speedup"] and "papers' values" not in charts["speedup"].caption
    (axes,) = charts["speedup"].figure.axes
    assert len(axes.get_xticklabels()) == 5 and len(axes.patches) == 5
    assert not any(line.get_marker() == PAPERS["opara"] for line in axes.lines)


def test_charts_stand_in_the_order_of_the_preset() -> None:
    read = replace(Preset.read("opara/figure8"), charts=["speedup", "memory", "throughput"])
    charts, refused = pictures(read, Evidence(select(RECORDS, [read.sweep | {"system": "cuda_graph,nimble"}])), [])
    assert [name.partition("-")[0] for name in dict.fromkeys(charts)][:2] == ["speedup", "memory"], refused


def test_each_sweep_that_an_exhibit_goes_by_is_committed() -> None:
    named_sweeps = {part for sweeps in recorded.ELSEWHERE.values() for sweep in sweeps for part in sweep.split(" + ")}
    assert named_sweeps | {recorded.FIRST_TABLE} <= {sweep_of(file) for file in recorded.SWEEPS.glob("*.jsonl.gz")}


def test_the_folder_of_pictures_holds_what_the_page_shows() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in H200.parent.glob("*.md"))
    assert {file.name for file in (H200 / "exhibits").iterdir()} == set(re.findall(r"\(h200/exhibits/([^)]+)\)", text))


@pytest.mark.parametrize("name", ["nimble/figure2a", "nimble/figure2c", "nimble/table1"])
def test_exhibits_are_drawn(name: str) -> None:
    read, evidence, exhibit_findings = judged(name)
    charts, refused = pictures(read, evidence, exhibit_findings)
    assert "claims" in charts and set(read.charts) <= {n.partition("-")[0] for n in (*charts, *refused)}
    texts = {text.get_text() for chart in charts.values() for axes in chart.figure.axes for text in axes.get_yticklabels()}
    shown = "".join("".join(text.split()) for text in texts)
    assert all("".join(written(f.what).split()) in shown for f in exhibit_findings)


def test_what_was_read_off_a_figure_is_marked_wherever_it_is_shown() -> None:
    """In the terminal and the README's sentences, in the verdict, in the chart of figures and in that of speedups."""
    read = Preset.read("ios/batch_sizes")
    records = list(Store(H200 / "ios.jsonl.gz").read().records.values())
    evidence = Evidence(select(records, [read.sweep]))
    exhibit_findings = findings.findings(read, evidence)
    verdict = judgement.judge(read, evidence, exhibit_findings, small=False)
    assert all(finding.is_by_eye for finding in exhibit_findings)
    assert judgement.published(exhibit_findings[0]) == f"≈{1 / (155 / 255):.2f}x"
    assert verdict.published.count("≈") == 2 and "published ≈" in verdict.reason
    charts, _ = pictures(read, evidence, exhibit_findings)
    texts = [text.get_text() for axes in charts["claims"].figure.axes for text in axes.texts]
    assert texts.count("≈") == len(exhibit_findings)
    legends = [text.get_text() for legend in charts["speedup"].figure.legends for text in legend.get_texts()]
    assert "IOS paper, V100, ≈ read off a figure" in legends
    # What the paper prints has no such mark.
    _, _, printed = judged("nimble/figure7")
    assert not any("≈" in judgement.published(finding) for finding in printed)


def test_the_least_of_a_range_is_told_from_the_most() -> None:
    named_so = [finding.what for finding in judged("opara/figure1")[2][-2:]]
    assert [what.partition(" over")[0] for what in named_so] == ["the least", "the most"]


def test_what_was_not_measured_is_not_drawn() -> None:
    read, evidence, exhibit_findings = judged("ios/blockwise")
    charts, refused = pictures(read, evidence, exhibit_findings)
    assert not charts and "claims" in refused
    with pytest.raises(NoResults):
        Selection([])


def test_blocks_are_drawn_from_the_search_of_a_record() -> None:
    record = made("ios", 1, 1.0)
    several = BlockSearch(units=3, width=2, transitions=9, milliseconds=1.0, sequential_milliseconds=1.5)
    blocks = (several, replace(several, units=1, milliseconds=0.1), replace(several, milliseconds=0.5))
    assert record.schedule is not None
    search = replace(record.schedule.search, parts=blocks)
    record = replace(record, schedule=replace(record.schedule, search=search))
    read, evidence, exhibit_findings = judged("ios/blockwise", [record])
    charts, _ = pictures(read, evidence, exhibit_findings)
    assert len(charts["blocks"].figure.axes[0].patches) == 4  # two blocks of several units, two bars each
    assert exhibit_findings[0].ours == pytest.approx(3.0) and exhibit_findings[0].verdict == HOLDS


def test_the_papers_shares_stand_at_the_presets_models() -> None:
    """BERT is of another length there than the zoo's, and no bar of it is missing where that one was measured."""
    preset = Preset.read("opara/figure1")
    best = recorded.recorded(preset)[0]
    records = Store(recorded.SWEEPS / "figure1.jsonl.gz").read().all
    drawn = pictures(preset, best.run.evidence(records), best.findings)[0]
    for batch, values in ((1, [2.53, 12.04, 18.5]), (16, [9.12, 21.48, 54.8])):
        (axes,) = drawn[f"sm_efficiency-counters-b{batch}"].figure.axes
        marks = [line for line in axes.lines if line.get_marker() == PAPERS["opara"]]
        assert sorted(float(y) for mark in marks for y in mark.get_ydata()) == values
    assert not any(chart.figure.get_supxlabel() for chart in drawn.values())
    few = [record for record in records if record.cell.model.choice != "bert"]
    lacking = pictures(preset, best.run.evidence(few), best.findings)[0]["sm_efficiency-counters-b1"].figure
    assert "not measured here: BERT (sequence=32), batch 1" in lacking.get_supxlabel().replace("\n", " ")
