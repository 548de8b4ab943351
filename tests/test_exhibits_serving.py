"""Exhibits of systems that serve: Orca's figures and verdicts."""

from dataclasses import replace
from math import exp, hypot, log
from statistics import NormalDist

import pytest
from judged_exhibits import H200, judged
from made_records import cell, record

from results.cell import choose
from results.finding import CANNOT, HOLDS, NOT_COMPARABLE, UNDECIDED
from results.quantity import Measured, Quantity
from results.record import Record
from results.store import Store
from scripts.exhibits import findings, quantities
from scripts.exhibits.preset import Preset, names


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
    _, _, judged_findings = judged("orca/figure4.8", many)
    by_what = {f.what.removeprefix("gpt_13b: ").partition(",")[0]: f for f in judged_findings}
    best = by_what["orca over request_level"]
    assert best.ours == pytest.approx(20.0) and best.verdict == HOLDS and "not in turn" in best.reason
    wider = NormalDist().inv_cdf(1 - 0.05 / 2 / 3) / NormalDist().inv_cdf(1 - 0.05 / 2)  # as the best of three
    assert best.low == best.high and best.bounds == pytest.approx((20 / 1.1**wider, 20 * 1.1**wider))
    # Of several traces each side has an interval: a low ratio is of a low rate over a high one.
    some = [served_at("orca", 1, 3.0, 2.0, 4.0), served_at("request_level", 1, 2.0, 1.9, 3.0)]
    (first, *_) = [f for f in judged("orca/figure4.8", some)[2] if f.what.startswith("gpt_13b: orca over request_level,")]
    down, up = hypot(log(3 / 2), log(3 / 2)), hypot(log(4 / 3), log(2 / 1.9))
    assert (first.low, first.ours, first.high) == pytest.approx((1.5 * exp(-down), 1.5, 1.5 * exp(up)))
    assert first.bounds[0] < 1 and first.bounds[1] > first.published and first.verdict == UNDECIDED
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
    assert [f.verdict for f in (over_sequential, over_nimble, nimble, over_engine)] == [HOLDS, HOLDS, UNDECIDED, UNDECIDED]
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
