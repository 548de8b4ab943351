"""What counts as evidence of an exhibit: its own conditions and loads, every network of a claim, no system that is wrong."""

import statistics
from dataclasses import replace
from math import exp, log, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged_exhibits import EAGER, H200, NIMBLE, RECORDS
from made_records import cell, latency, record, rounds
from scipy.stats import t as student

from results.cell import choose
from results.latencies import latencies_ms
from results.quantity import Measured, Quantity
from results.record import Record
from results.selection import Selection
from results.statistics import FEW, STUDENT, interval, median_interval, resampled_medians
from results.store import Store
from results.warning import Warning
from scripts.exhibits import findings
from scripts.exhibits.evidence import Evidence, choices, select
from scripts.exhibits.missing import Missing
from scripts.exhibits.number import Number, least, speedup
from scripts.exhibits.preset import Preset
from scripts.exhibits.quantities import ratios_of_traces, saturation, sm_efficiency

ROW = "nasnet", 1
SLO_RATE = Quantity("slo_rate", "largest rate", "req/s", 10.0, is_more_better=True)


def judged(name: str, records: list[Record]) -> list[findings.Finding]:
    read = Preset.read(name)
    sweeps = [read.sweep, *({**read.sweep, **change} for change in read.also)]
    return findings.findings(read, Evidence(select(records, sweeps)))


def test_a_claim_of_every_network_is_of_none_where_one_has_no_speed() -> None:
    records = list(Store(H200 / "ios.jsonl.gz").read().records.values())
    (before,) = [f for f in judged("ios/schedules", records) if f.what == "every network: ios over greedy"]
    assert before.ours is not None and before.reason.startswith("the least of 4")
    wrong = [
        replace(r, status="incorrect", reason="wrong")
        if (r.cell.model.name, r.cell.system.label) == ("randwire", "ios")
        else r
        for r in records
    ]
    (after,) = [f for f in judged("ios/schedules", wrong) if f.what == "every network: ios over greedy"]
    assert after.ours is None and "incorrect" in after.reason


@pytest.mark.parametrize("system", ["eager", "nimble"])
def test_a_system_that_is_wrong_now_has_no_number_of_before(system: str) -> None:
    measured = [
        record(one, latency=latency(ms), when="2026-01-01", comparison=rounds("g", [ms]))
        for one, ms in (("eager", 2.0), ("nimble", 1.0))
    ]
    assert Selection(measured).over(ROW, NIMBLE, EAGER) is not None
    wrong = record(system, status="incorrect", reason="wrong", when="2026-01-02")
    assert Selection([*measured, replace(wrong, id="f" * 16)]).over(ROW, NIMBLE, EAGER) is None


def test_what_a_wrong_system_served_before_does_not_count() -> None:
    (orca,) = [
        r
        for r in Store(H200 / "serving.jsonl.gz").read().records.values()
        if r.cell.runner.get("concurrency") == 512 and r.cell.system.label == "orca (max_batch_size=128)"
    ]
    row, system = ("gpt_13b", 1), orca.cell.system.key
    assert saturation(Evidence(Selection([orca])), row, system) > 40
    wrong = replace(orca, id="f" * 16, status="incorrect", reason="wrong", serving=None, when="2030-01-01")
    for quantity in (saturation, sm_efficiency):
        with pytest.raises(Missing, match="incorrect"):
            quantity(Evidence(Selection([orca, wrong])), row, system)


def test_systems_that_served_the_same_traces_are_compared_trace_by_trace() -> None:
    """Traces differ more than the systems do: one is longer than another."""
    by_system = {r.cell.system.choice: r for r in Store(H200 / "serving-extensions.jsonl.gz").read().records.values()}
    paged, prefixes = (by_system[name] for name in ("orca_paged", "orca_prefixes"))

    def throughputs(one: Record) -> list[float]:
        assert one.serving is not None
        return [
            len(t.requests.due_s) / (max(map(max, t.requests.token_s)) - t.requests.due_s[0]) for t in one.serving.traces
        ]

    ratios = [a / b for a, b in zip(throughputs(prefixes), throughputs(paged), strict=True)]
    figure = next(f for f in judged("orca/extensions", [paged, prefixes]) if "orca_prefixes over" in f.what)
    assert figure.ours == pytest.approx(statistics.median(ratios))
    assert figure.low <= min(ratios) and max(ratios) <= figure.high
    assert prefixes.serving is not None
    row, (first, second) = ("gpt_13b", 1), (prefixes.cell.system.key, paged.cell.system.key)
    for other in (
        replace(prefixes, cell=replace(prefixes.cell, runner=choose("runner", "serving", rate=7.0))),
        replace(prefixes, serving=replace(prefixes.serving, traces=[replace(t, seed=99) for t in prefixes.serving.traces])),
    ):
        assert ratios_of_traces(Evidence(Selection([paged, other])), row, first, second, saturation) == []
    fewer = replace(prefixes.serving, traces=prefixes.serving.traces[:2])
    of_other_traces = [paged, replace(prefixes, serving=fewer)]  # by each one's median and interval
    wide = next(f for f in judged("orca/extensions", of_other_traces) if "orca_prefixes over" in f.what)
    assert wide.high / wide.low > 1.1 * figure.high / figure.low


def test_of_times_between_tokens_the_shorter_is_the_better_trace_by_trace() -> None:
    """Records of other systems, as if they were of Azure's trace."""
    by_system = {r.cell.system.choice: r for r in Store(H200 / "serving-extensions.jsonl.gz").read().records.values()}
    model = choose("model", "gpt_13b", positions=16384)
    runner = choose("runner", "serving", trace="conv.csv", concurrency=64)

    def of_azure(name: str, like: str) -> Record:
        one = by_system[like]
        return replace(one, cell=replace(one.cell, model=model, runner=runner, system=choose("system", name)))

    chunked, paged = of_azure("orca_chunked", "orca_prefixes"), of_azure("orca_paged", "orca_asynchronous")

    def p99(one: Record) -> list[float]:
        assert one.serving is not None
        return [float(np.percentile(latencies_ms(trace.requests)["itl"], 99)) for trace in one.serving.traces]

    ratios = [longer / shorter for longer, shorter in zip(p99(paged), p99(chunked), strict=True)]
    figure = next(f for f in judged("orca/azure_trace", [chunked, paged]) if "p99 between tokens" in f.what)
    assert min(ratios) > 1.1 and figure.ours == pytest.approx(statistics.median(ratios))


def test_records_of_another_arithmetic_are_not_taken_for_an_exhibits() -> None:
    sweep = {"model": "nasnet", "system": "eager,nimble", "batch": "1"}
    usual, half = (record("nimble", of=cell("nimble", precision=precision)) for precision in ("tf32", "fp16"))
    later = replace(half, when="2027-01-01")
    for wanted, changes in ((usual, {}), (half, {"precision": "fp16"})):
        selection = select([usual, later], [sweep | changes])
        assert selection is not None and [r.id for r in selection.records] == [wanted.id]
    assert select([record("nimble", of=cell("nimble", layout="channels_last"))], [sweep]) is None


def served(**options: object) -> Record:
    """A record of a capacity with these options of the load."""
    base = cell("orca", "gpt_13b", precision="fp16")
    one = replace(base, runner=choose("runner", "capacity", **options))  # type: ignore[arg-type]
    return record("orca", of=one, measured={"capacity": Measured((SLO_RATE,), {}, "2026-01-01")})


def test_the_best_of_several_batch_sizes_is_as_wide_as_all_of_them_need() -> None:
    records = [
        replace(one, cell=replace(one.cell, system=choose("system", name, max_batch_size=size)), id=f"{size:04}{name:0>12}")
        for name, sizes in (("orca", (8, 32, 64)), ("request_level", (8,)))
        for size in sizes
        for one in [served(requests=200)]
    ]
    figure = next(f for f in judged("orca/figure4.8", records) if f.ours is not None)
    assert figure.what.startswith("gpt_13b: orca over request_level,") and figure.chosen_from == 3
    of_one = replace(figure, chosen_from=1)
    assert figure.bounds[0] < of_one.bounds[0] < 1 < of_one.bounds[1] < figure.bounds[1]


def test_records_of_another_load_are_not_taken_for_an_exhibits() -> None:
    sweep = {"model": "gpt_13b", "system": "orca", "runner": "capacity", "precision": "fp16"}
    plain, equal = served(), served(prompt_tokens="272", new_tokens="64")
    lengths = {"runner.prompt_tokens": "272", "runner.new_tokens": "64"}
    for wanted, changes in ((plain, {}), (equal, lengths)):
        selection = select([plain, equal], [sweep | changes])
        assert selection is not None and [r.id for r in selection.records] == [wanted.id]
    assert select([plain, equal], [sweep | {"runner.new_tokens": "32"}]) is None


def test_a_trace_is_told_by_its_files_name() -> None:
    one = replace(cell("orca", "gpt_13b", precision="fp16"), runner=choose("runner", "serving", trace="a/azure.csv.gz"))
    sweep = {"model": "gpt_13b", "system": "orca", "runner": "serving", "precision": "fp16"}
    for trace, is_taken in (("/b/azure.csv.gz", True), ("burst.csv", False), ("null", False), (None, False)):
        selection = select([record("orca", of=one)], [sweep | ({"runner.trace": trace} if trace else {})])
        assert (selection is not None) is is_taken


def test_the_least_of_several_is_as_sure_as_the_least_sure() -> None:
    sure = Number(2.0, 1.9, 2.1, "on one", processes=3)
    unsure = Number(3.0, 1.5, 4.0, "on another", is_in_turn=False)
    assert least([unsure, sure]) == Number(2.0, 1.5, 2.1, "the least of 2, on one", is_in_turn=False, processes=1)


def test_what_a_host_slowed_in_any_process_widens_a_ratio() -> None:
    def process(number: int, warnings: tuple[Warning, ...]) -> list[Record]:
        return [
            replace(
                record(system, latency=latency(ms), when=f"2026-01-0{number}", comparison=rounds(f"g{number}", [ms] * 5)),
                warnings=warnings if system == "nimble" else (),
                id=f"{number}{len(system):015x}",
            )
            for system, ms in (("eager", 2.0), ("nimble", 1.0))
        ]

    doubted = process(1, (Warning("differs_in_rounds", {"ratio": 1.3}),))
    one_process = speedup(Selection(doubted), ROW, NIMBLE, EAGER)
    both_processes = speedup(Selection([*doubted, *process(2, ())]), ROW, NIMBLE, EAGER)
    assert one_process.rounds_differ == both_processes.rounds_differ == "nimble 1.30 times as long in the rounds as alone"
    assert one_process.high == pytest.approx(2.6) and both_processes.high >= 2.59


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=9))
def test_the_interval_of_a_median(samples: list[float]) -> None:
    """Of few samples Student's, by scipy; of more the bootstrap's percentiles."""
    low, high = median_interval(samples)
    logs = np.log(samples)
    expected = interval(resampled_medians(samples))
    if len(samples) < FEW:
        ends = student.interval(0.95, len(samples) - 1, logs.mean(), logs.std(ddof=1) / sqrt(len(samples)))
        expected = exp(ends[0]), exp(ends[1])
    assert (low, high) == pytest.approx(expected, rel=1e-3, nan_ok=True) or np.ptp(logs) == 0
    assert low <= np.median(samples) * (1 + 1e-12) and high >= np.median(samples) * (1 - 1e-12)


@pytest.mark.parametrize("count", sorted(STUDENT))
def test_few_samples_hold_the_truth_as_often_as_an_interval_says(count: int) -> None:
    generator, trials = np.random.default_rng(count), 4000
    draws = np.exp(0.03 * generator.standard_normal((trials, count)))
    inside = sum(low <= 1 <= high for low, high in map(median_interval, draws.tolist()))
    assert abs(inside / trials - 0.95) < 3 * sqrt(0.95 * 0.05 / trials)
    assert log(median_interval([2.0, 2.0])[1]) == pytest.approx(log(2.0)) and median_interval([3.0]) == (3.0, 3.0)


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
    came_on_its_own |= {"runner.trace": "from-191.csv", "runner.trace_speed": 1.05, "runner.requests": 145}
    for records, asked, load in ((mixed, sweep, 64), (mixed, came_on_its_own, 0), (saturated, sweep, 64)):
        chosen = select(records, [asked])
        assert chosen is not None and len(chosen.systems) == 2
        assert {record.cell.runner.options["concurrency"] for record in chosen.records} == {load}
    assert select(came, [sweep]) is None
