"""Figures of exhibits against the committed records."""

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from judged_exhibits import EAGER, H200, NIMBLE, NIMBLE_PAPER, OF_THE_PAPER, OPARA, RECORDS, judged, made, under

from results.cell import choose
from results.document import to_json
from results.finding import CANNOT, DOES_NOT_HOLD, HOLDS, IN_PART, NOT_COMPARABLE, UNDECIDED
from results.occupation import SmEfficiency
from results.pack import packed
from results.published.values import select as select_values
from results.record import Record
from results.schedule_file import read_cells
from results.store import Store
from results.warning import Warning
from scripts.exhibits import findings, judgement, recorded
from scripts.exhibits.evidence import Evidence
from scripts.exhibits.preset import Preset, names


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
    every = [r for r in ratios if r is not None]
    ends = [min(getattr(r, end) for r in every) for end in ("ratio", "low", "high")]
    assert [exhibit_findings[0].ours, exhibit_findings[0].low, exhibit_findings[0].high] == ends

    def slower(record: Record) -> Record:
        if record.comparison is None or (record.cell.model.name, record.cell.system.key) != ("resnet50", NIMBLE_PAPER):
            return record
        rounds = tuple(tuple(100 * ms for ms in turn) for turn in record.comparison.rounds)
        return replace(record, comparison=replace(record.comparison, rounds=rounds))

    _, evidence, slow = judged("nimble/supplement_figure1", [slower(record) for record in OF_THE_PAPER])
    assert all(f.verdict != HOLDS and f.reason == "the least of 8, on resnet50; one process" for f in slow)
    verdict = judgement.judge(Preset.read("nimble/supplement_figure1"), evidence, slow, small=False)
    assert "every network: nimble_paper over eager" in verdict.reason and "on resnet50" in verdict.reason


@pytest.mark.parametrize("exhibit", ["nimble/supplement_figure1", "opara/figure5"])
def test_an_extreme_and_what_holds_for_every_network_are_of_all_networks_or_of_none(exhibit: str) -> None:
    """One network less, and neither is there: of those that are left it would be another."""
    figure5 = under("opara_paper", OPARA, Store(H200 / "figure5.jsonl.gz").read().all)
    of_opara = under("nimble_released", NIMBLE, figure5)
    records = OF_THE_PAPER if exhibit.startswith("nimble") else of_opara
    of_several = [f for f in judged(exhibit, records)[2] if f.what.startswith(("every network", "largest", "smallest"))]
    assert len([f for f in of_several if f.ours is not None]) >= 2
    lacking = [r for r in records if r.cell.model.label != "inception_v3"]
    of_several = [f for f in judged(exhibit, lacking)[2] if f.what.startswith(("every network", "largest", "smallest"))]
    assert {(f.ours, f.verdict) for f in of_several} == {(None, CANNOT)}
    assert all("inception_v3 was not measured" in f.reason for f in of_several)


def test_claims_in_words_of_single_networks_stand_each_by_itself() -> None:
    name = "nimble/figure8_imagenet"
    records = list(Store(H200 / "imagenet-training.jsonl.gz").read().records.values())
    _, evidence, both = judged(name, records)
    assert evidence.measured is not None and len(both) == 2
    for finding, model in zip(both, ("resnet50", "bert"), strict=True):
        ratio = evidence.measured.over((model, 32), NIMBLE, EAGER)
        assert ratio is not None and finding.ours == ratio.ratio
    assert [finding.verdict for finding in both] == [DOES_NOT_HOLD, UNDECIDED]  # 1.6x is more than hardly
    _, _, one = judged(name, [r for r in records if r.cell.model.name == "bert"])
    assert [finding.ours is None for finding in one] == [True, False] and one[1] == both[1]


@pytest.mark.parametrize("name", names())
def test_what_a_claim_says_in_words_a_rule_may_refuse(name: str) -> None:
    exhibit = Preset.read(name)
    rules = {"order of magnitude": "at_least"} | dict.fromkeys(("hardly", "alike", "as long as"), "alike")
    for words, rule in rules.items():
        assert words not in exhibit.claim or rule in {claim.rule for claim in exhibit.claims}, words


def test_efficiency_that_counters_counted_comes_before_estimates() -> None:
    counted, *others = recorded.recorded(Preset.read("opara/figure1"))
    measured = [finding for finding in counted.findings if finding.ours is not None]
    assert measured and all("estimated" not in finding.reason for finding in measured)
    assert any("estimated" in finding.reason for other in others for finding in other.findings)


def test_timelines_that_a_paper_calls_alike_are_judged_as_such() -> None:
    """Opara's figure 7: on BERT as many streams as Nimble, and a call as long."""
    best, *_ = recorded.recorded(Preset.read("opara/figure7"))
    assert best.evidence.place == "NVIDIA H200" and best.evidence.on_gpu
    of_bert = [finding for finding in best.findings if finding.what.startswith("bert: ")]
    assert [(finding.rule, finding.published) for finding in of_bert] == [("alike", 1.0), ("count", 1.0)]
    assert of_bert[0].ours is not None and of_bert[1].verdict == DOES_NOT_HOLD
    for streams in (finding for finding in best.findings if finding.what.endswith("streams")):
        assert streams.rule == "count" and streams.bounds == (streams.ours, streams.ours)  # two counts are of no process
    (call_of_t5,) = (f for f in best.findings if f.what.startswith("t5: ") and f.rule == "direction")
    assert call_of_t5.verdict == UNDECIDED and call_of_t5.bounds[0] < 1 < call_of_t5.bounds[1]  # of one process
    assert best.verdict.extent == "2 of 4" and best.verdict.verdict == IN_PART
    assert "2 are undecided" in best.verdict.reason and "t5: " in best.verdict.reason


def test_sweeps_of_several_processes_are_judged_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, gain in enumerate((1.04, 1.05, 1.06)):
        documents = []
        pairs = itertools.product(("resnet34", "resnet50"), (("sequential", gain), ("ios", 1.0)))
        for identifier, (model, (system, scale)) in enumerate(pairs):
            one = made(system, 1, scale, "resnet50")
            assert one.comparison is not None
            turns = replace(one.comparison, group=f"process {number} of {model}")
            cell = replace(one.cell, model=choose("model", model))
            documents.append(to_json(replace(one, cell=cell, id=f"{identifier:016x}", comparison=turns)))
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
    pairs = [("nimble_released", b) for b in scales], [("opara_paper", b) for b in scales]
    records = [made(s, b, scales[b] if s == "nimble_released" else 1.0) for pair in pairs for s, b in pair]
    lacking = records[1]  # Nimble's at batch 2
    judge = partial(judged, "opara/figure9")
    figures = judge([r for r in records if r is not lacking])[2]
    assert {f.reason for f in figures if f.is_comparable} == {"nimble_released was not measured at batch 2"}
    unable = replace(lacking, status="unsupported", reason="why")
    figures = judge([unable if r is lacking else r for r in records])[2]
    assert {round(f.ours, 6) for f in figures if f.ours} == {1.05, 1.2}


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
