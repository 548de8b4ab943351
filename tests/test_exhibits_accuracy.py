"""WindTunnel's tables: gains of AUC from records, and what is said of files that nobody has given."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_records import record
from scipy.stats import ttest_1samp

from results.accuracy import Accuracy, SeedAccuracy, TableCounts
from results.cell import Cell, Conditions, choose
from results.finding import CANNOT, DIRECTION, DOES_NOT_HOLD, HOLDS, IN_PART, NOT_RUN, Finding
from results.record import Record
from results.selection import NoResults, by_setting
from scripts.charts import accuracy as charts
from scripts.charts import claims, style
from scripts.exhibits import accuracy, findings, judgement
from scripts.exhibits.evidence import Evidence, select
from scripts.exhibits.preset import Preset

CONDITIONS = Conditions(1, "cuda", precision="tf32_products")
FLIGHT: dict[str, Any] = {"dataset": "flight", "path": "flights", "split": "order", "form": "whole"}


def learned(
    system: str, aucs: list[float], gain: tuple[float, float, float] | None = None, model: str = "pipeline", **options: Any
) -> Record:
    """A record of a system on a table.

    Args:
        aucs: of seeds 0 and on.
        gain: over the pipeline, with the ends of its interval.
        options: of the model; those with system_ in front are of the system.
    """
    of_system = {key.removeprefix("system_"): value for key, value in options.items() if key.startswith("system_")}
    of_model = {key: value for key, value in options.items() if not key.startswith("system_")}
    own = Cell(
        choose("model", model, **of_model), choose("system", system, **of_system), choose("runner", "accuracy"), CONDITIONS
    )
    seeds = tuple(SeedAccuracy(i, auc, 1e-6, 0.5, 1.0, 2.0) for i, auc in enumerate(aucs))
    mean = float(np.mean(aucs))
    value, low, high = gain or (None, None, None)
    part = Accuracy(
        mean, mean - 0.01, mean + 0.01, 0.5, seeds, 700, 150, 150, "rows", "whole", value, low, high, parameters=9
    )
    return record(of=own, accuracy=part)


def judged(name: str, records: list[Record], **sweep: str) -> dict[str, Finding]:
    read = Preset.read(name)
    read = replace(read, sweep=read.sweep | sweep)
    evidence = Evidence(select(records, [read.sweep, *({**read.sweep, **change} for change in read.also)]))
    return {finding.what: finding for finding in findings.findings(read, evidence)}


def test_a_gain_is_judged_by_its_interval_and_its_size() -> None:
    published = 0.6913 - 0.6783
    gains = {"pre1": (0.9 * published, 0.001, 0.02), "pre2": (0.001, 0.0005, 0.0015), "pre3": (0.002, -0.001, 0.005)}
    records = [
        learned("windtunnel", [0.7], gain, preprocessing=pre, pipeline="pipe1", **FLIGHT) for pre, gain in gains.items()
    ]
    by_what = judged("windtunnel/table5.3_flight", records, **{"model.path": "flights"})
    verdicts = [by_what[f"flight/{pre}: windtunnel(pipe1) over ml(pipe1)"].verdict for pre in gains]
    assert verdicts == [HOLDS, DIRECTION, DOES_NOT_HOLD]
    first = by_what["flight/pre1: windtunnel(pipe1) over ml(pipe1)"]
    assert first.published == pytest.approx(published) and (first.low, first.high) == (0.001, 0.02)
    other = by_what["flight/pre1: windtunnel(pipe2) over ml(pipe2)"]
    assert other.verdict == CANNOT and other.reason == "windtunnel was not measured on flight/pre1, pipe2"
    assert len(by_what) == 13  # nine gains, DeepGBM's over Pipe2, and the largest over DeepGBM


def test_a_difference_without_paired_scores_is_students_over_seeds() -> None:
    warm, cold = [0.81, 0.82, 0.80, 0.815, 0.805], [0.80, 0.805, 0.797, 0.80, 0.801]
    records = [
        learned(s, aucs, (0.01, 0.0, 0.02), "nycflights13_pre2_pipe2", form="whole")
        for s, aucs in (("windtunnel", warm), ("windtunnel_cold", cold))
    ]
    by_what = judged("windtunnel/table5.5_nycflights13", records)
    finding = by_what["nycflights13/pre2: windtunnel(pipe2) over windtunnel(pipe2; cold)"]
    interval = ttest_1samp(np.subtract(warm, cold), 0).confidence_interval(0.95)
    assert (
        finding.verdict == HOLDS
        and finding.low == pytest.approx(interval.low)
        and finding.high == pytest.approx(interval.high)
    )
    by_what = judged(
        "windtunnel/table5.5_nycflights13",
        [
            learned("windtunnel", warm, None, "nycflights13_pre2_pipe2", form="whole"),
            learned("windtunnel_cold", cold[:1], None, "nycflights13_pre2_pipe2", form="whole"),
        ],
    )
    assert "share 1 seed" in by_what[finding.what].reason


def test_levels_and_shares_are_told_apart() -> None:
    few = {"form": "whole", "training_share": 0.01, "system_batch_size": 256}
    records = [
        learned("windtunnel", [0.80, 0.81], None, "nycflights13_pre2_pipe2", form="whole"),
        learned("windtunnel", [0.79, 0.79], None, "nycflights13_pre2_pipe2", form="whole", system_level=2),
        learned("windtunnel", [0.60, 0.60], None, "nycflights13_pre2_pipe2", **few),
        learned("windtunnel", [0.62, 0.63], None, "nycflights13_pre2_pipe2", **few, system_level=2),
    ]
    by_what = judged("windtunnel/table5.6_nycflights13", records)
    ours = {what.partition(":")[0]: f.ours for what, f in by_what.items() if "level=4" in what}
    assert ours == {
        "nycflights13/pre2": pytest.approx(0.015),
        "nycflights13(10%)/pre2": None,
        "nycflights13(1%)/pre2": pytest.approx(-0.025),
    }


def test_of_files_that_were_not_given_nothing_is_said() -> None:
    for name in ("table5.2", "table5.3_criteo", "table5.4", "table5.5", "table5.6"):
        read = Preset.read(f"windtunnel/{name}")
        nothing = Evidence()
        judged_here = findings.findings(read, nothing)
        assert {f.verdict for f in judged_here} == {CANNOT} and all("were not given" in f.reason for f in judged_here)
        assert judgement.judge(read, nothing, judged_here, small=False).verdict == NOT_RUN


def test_rows_of_a_table_are_counted() -> None:
    whole = learned("pipeline", [0.7], preprocessing="pre2", pipeline="pipe1", **{**FLIGHT, "split": "rows"})
    assert whole.accuracy is not None
    counted = replace(
        whole, accuracy=replace(whole.accuracy, training_rows=14_000_000, validation_rows=3_800_000, test_rows=3_800_000)
    )
    by_what = judged("windtunnel/table5.2", [counted], **{"model.path": "flights"})
    assert by_what["flight: rows"].ours == 21.6 and by_what["flight: rows"].verdict == HOLDS
    assert by_what["flight: positive rows"].reason == "its record counts rows alone"
    assert counted.accuracy is not None
    table = TableCounts(numeric=2, categorical=6, categories=500, positive_share=0.21)
    counted = replace(counted, accuracy=replace(counted.accuracy, table=table))
    by_what = judged("windtunnel/table5.2", [counted], **{"model.path": "flights"})
    stands = {what: (finding.ours, finding.verdict) for what, finding in by_what.items() if what.startswith("flight")}
    assert stands == {
        "flight: rows": (21.6, HOLDS),
        "flight: numeric features": (2, HOLDS),
        "flight: categorical features": (6, HOLDS),
        "flight: categories in the training rows": (500, DOES_NOT_HOLD),
        "flight: positive rows": (21, IN_PART),
    }


def test_a_gain_in_words_is_a_share_of_the_others_auc() -> None:
    """ "Up to 3.4 %" over DeepGBM: of its 0.7726, by Table 5.3, where the difference is 0.0263."""
    records = [
        learned("windtunnel", [0.798, 0.800, 0.799], (0.05, 0.04, 0.06), preprocessing="pre3", pipeline="pipe3", **FLIGHT),
        learned("deepgbm", [0.772, 0.773, 0.774], preprocessing="pre3", pipeline="pipe2", **FLIGHT),
    ]
    finding = judged("windtunnel/table5.3_flight", records, **{"model.path": "flights"})[
        "flight/pre3: windtunnel(pipe3) over deepgbm, of its AUC"
    ]
    assert finding.published == 3.4 and finding.unit == "%" and finding.verdict == HOLDS
    assert finding.ours == pytest.approx(100 * 0.026 / 0.773) and finding.low is not None and 0 < finding.low < 3.4


def test_words_that_name_no_table_or_system() -> None:
    with pytest.raises(ValueError, match="is no table"):
        accuracy.Table.of("criteo/pre2/pipe2")
    with pytest.raises(ValueError, match="is no system"):
        accuracy.Side.of("windtunnel(pipe2")


def test_charts_of_auc_show_intervals(tmp_path: Path) -> None:
    records = [
        learned("windtunnel", [0.81, 0.82], (0.015, 0.012, 0.018), "nycflights13_pre2_pipe2", form="whole"),
        learned("pipeline", [0.79, 0.80], None, "nycflights13_pre2_pipe2", form="whole"),
    ]
    (measured,) = by_setting(records, style.order).values()
    auc, gain = charts.draw(measured), charts.draw_gain(measured)
    (axes,) = auc.figure.axes
    assert sorted(
        float(np.asarray(line.get_xdata())[0]) for line in axes.lines if line.get_marker() not in ("None", None, "")
    ) == [
        0.795,
        0.815,
    ]
    (axes,) = gain.figure.axes
    low, high = axes.get_xlim()
    assert low < 0 and high > 0.018
    with pytest.raises(NoResults, match="no record holds AUC over the pipeline's"):
        charts.draw_gain(by_setting(records[1:], style.order).popitem()[1])
    for chart in (auc, gain):
        style.save(chart.figure, tmp_path / f"{chart.name}.png")
        assert (tmp_path / f"{chart.name}.png").stat().st_size > 5000


def test_claims_may_lie_below_zero() -> None:
    shown = [
        Finding("a", "gain_direction", "AUC", 0.0, -0.01, -0.02, 0.001),
        Finding("b", "gain", "AUC", 0.02, 0.03, 0.02, 0.04),
    ]
    chart = claims.draw(shown, "windtunnel", "title")
    (axes,) = chart.figure.axes
    assert axes.get_xlim()[0] < -0.02 and axes.get_xscale() == "linear"


def test_rows_that_are_parted_by_date_tell_nothing_of_drawn_ones() -> None:
    model = "nycflights13_pre2_pipe2"
    drawn = learned("windtunnel", [0.8], (0.02, 0.01, 0.03), model, form="whole")
    by_date = learned("windtunnel", [0.7], (-0.02, -0.03, -0.01), model, form="whole", split="order")
    what = "nycflights13/pre2: windtunnel(pipe2) over ml(pipe2)"
    for records in ([drawn, by_date], [by_date, drawn]):
        assert judged("windtunnel/table5.3_nycflights13", records)[what].ours == 0.02
    assert judged("windtunnel/table5.3_nycflights13", [by_date])[what].ours is None
