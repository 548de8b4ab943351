"""A simulated figure is shown only while simulations are near to engines that served the same traces for real."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from conftest import ROOT
from made_records import cell

from results.agreement import LATENCY, THROUGHPUT, Lengths, Point
from results.cell import choose
from results.files import read_json
from results.finding import HOLDS, NOT_SHOWN
from results.pack import documents_of, packed
from results.record import Record
from results.store import Store
from runners.serving.options import costs_file
from scripts import agreement
from scripts.agreement import farthest, points, points_of, standing
from scripts.charts.serving import RING, SIZE
from scripts.exhibits import judgement
from scripts.exhibits.evidence import Evidence, select
from scripts.exhibits.findings import findings
from scripts.exhibits.pictures import pictures
from scripts.exhibits.preset import Preset
from scripts.exhibits.recorded import recorded

COMMITTED = "gpt_13b-h200"
LENGTHS, EQUAL = Lengths("32-512", "1-128"), Lengths("272", "64")
EXHIBIT = "orca/figure4.8_simulated"
CELL = cell("orca", "gpt_13b", "simulation")
NUM_SHORT = 4  # real points of traces of 60 requests
NO_RECORD = "no record here is of an engine that served requests of such lengths"


@pytest.fixture(scope="module")
def slow_costs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of the committed costs, but that each iteration takes a fifth longer. Its points are those of short traces."""
    folder = tmp_path_factory.mktemp("costs")
    document = read_json(costs_file(COMMITTED))
    document["table"]["seconds"] = [1.2 * seconds for seconds in document["table"]["seconds"]]
    (folder / "slow.json").write_text(json.dumps(document))
    records: list[Any] = documents_of(agreement.REFERENCE / "h200" / "serving.jsonl.gz")
    short = [record for record in records if record["cell"]["runner"]["options"].get("requests") == 60]
    (folder / "h200").mkdir()
    (folder / "h200" / "serving.jsonl.gz").write_bytes(packed(short))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "REFERENCE", folder)
        assert len(points(str(folder / "slow.json"))) == NUM_SHORT  # and kept
    return str(folder / "slow.json")


@pytest.mark.slow
def test_committed_costs_are_as_near_as_simulated_figures_need() -> None:
    among = points_of(COMMITTED, LENGTHS)
    assert len(among) == 18 and all(point.is_near for point in among)
    throughput, latency = farthest(among)
    assert throughput <= THROUGHPUT and latency <= LATENCY
    real = {r.id: r for r in Store(ROOT / "results" / "reference" / "h200" / "serving.jsonl.gz").read().all}
    for point in among:
        record = real[point.record]
        measured = record.measured["simulation"].quantity(f"normalized_real_at_{point.rate:g}")
        assert record.cell.model.choice == "gpt_13b" and measured is not None and measured.value == point.normalized_ms_real


@pytest.mark.slow
def test_requests_of_one_length_stand_by_their_own_points() -> None:
    """Static batches of them are farther off than a simulated figure may be, and those of other lengths are near."""
    equal = points_of(COMMITTED, EQUAL)
    assert {point.rate for point in equal} == {2.0, 3.0} and len(equal) == 4
    assert sorted(point.is_near for point in equal) == [False, False, True, True]
    is_near, how = standing(COMMITTED, EQUAL)
    assert not is_near and how.startswith("2 of 4 real points are not within 5% and 10%")
    assert standing(COMMITTED, LENGTHS)[0]
    assert standing(COMMITTED, Lengths("1", "1")) == (False, NO_RECORD)


@pytest.mark.slow
def test_costs_that_are_off_are_refused(slow_costs: str) -> None:
    is_near, how = standing(slow_costs, LENGTHS)
    assert not is_near and how.startswith(f"{NUM_SHORT} of {NUM_SHORT} real points are not within 5% and 10%")
    assert standing(COMMITTED, LENGTHS)[0]
    assert standing("gpt_31b-h200", LENGTHS) == (False, "its costs, gpt_31b-h200, are not there any more")


def test_systems_that_no_real_point_is_of_are_named() -> None:
    of_static_batches = standing(COMMITTED, LENGTHS, ["orca", "request_level_microbatches", "request_level_padded"])[1]
    assert of_static_batches.endswith(", and no real point is of request_level_microbatches")
    assert standing(COMMITTED, LENGTHS, ["orca", "request_level"]) == standing(COMMITTED, LENGTHS)


@pytest.mark.slow
def test_costs_of_another_gpu_go_by_the_points_of_committed_ones(tmp_path: Path) -> None:
    """No real point is theirs."""
    document = read_json(costs_file(COMMITTED)) | {"device": "NVIDIA B300"}
    file = tmp_path / "other.json.gz"
    file.write_bytes(gzip.compress(json.dumps(document).encode()))
    assert points(str(file)) == ()
    is_near, how = standing(str(file), LENGTHS)
    assert is_near and how.startswith("at 18 real points of other costs ")


def test_costs_of_parts_go_by_points_of_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one GPU say nothing of sums over layers, or of stages."""
    own = {COMMITTED: points(COMMITTED)}
    monkeypatch.setattr(agreement, "points", lambda costs: own.get(costs, ()))
    for parts, lacks in (((1, 8), "in parts of each layer"), ((2, 1), "in stages"), ((2, 8), "in stages")):
        document = read_json(costs_file(COMMITTED)) | {"parts": {"pipeline": parts[0], "tensor": parts[1]}}
        file = tmp_path / f"{parts}.json"
        file.write_text(json.dumps(document))
        is_near, how = standing(str(file), LENGTHS)
        assert not is_near and f"an engine {lacks} that served" in how
    own["gpt_13b-pp2-h200"] = own[COMMITTED]
    assert standing(str(tmp_path / "(2, 1).json"), LENGTHS)[0] and not standing(str(tmp_path / "(2, 8).json"), LENGTHS)[0]


@pytest.mark.parametrize(
    ("simulated", "is_near"),
    [((1.04, 9.1), True), ((1.06, 10.0), False), ((0.94, 10.0), False), ((1.0, 11.1), False), ((1.0, None), False)],
)
def test_a_point_is_near_in_both_numbers(simulated: tuple[float, float | None], is_near: bool) -> None:
    assert Point("id", CELL, 8.0, 1.0, simulated[0], 10.0, simulated[1]).is_near is is_near


def test_a_rate_that_neither_clock_keeps_up_with_has_a_throughput_alone() -> None:
    assert Point("id", CELL, 8.0, 1.0, 1.04, None, None).is_near
    assert not Point("id", CELL, 8.0, 1.0, 1.06, None, None).is_near
    assert not Point("id", CELL, 8.0, 1.0, 1.0, None, 10.0).is_near


@pytest.mark.slow
def test_a_simulated_exhibit_has_no_verdict_where_its_costs_are_off(slow_costs: str) -> None:
    preset = Preset.read(EXHIBIT)
    (best, *_) = recorded(preset)
    assert best.tells and best.verdict.verdict == HOLDS and f"With {COMMITTED} at 18 real points" in best.verdict.reason
    measured = best.evidence.measured
    assert measured is not None

    def with_slow_costs(record: Record) -> Record:
        runner = choose("runner", "simulated", **(record.cell.runner.options | {"costs": slow_costs}))
        return replace(record, cell=replace(record.cell, runner=runner))

    evidence = Evidence(select([with_slow_costs(record) for record in measured.records], [preset.sweep]))
    verdict = judgement.judge(preset, evidence, findings(preset, evidence), small=False)
    assert (verdict.verdict, verdict.extent, verdict.measured) == (NOT_SHOWN, "0 of 3", "")
    assert verdict.reason.startswith("Not shown: ") and "are not within" in verdict.reason


def test_no_page_shows_what_has_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judgement, "standing", lambda costs, lengths, systems=(): (False, "simulations are off"))
    (best, *_) = recorded(Preset.read(EXHIBIT))
    assert best.verdict.verdict == NOT_SHOWN and not best.tells


def test_the_chart_of_what_is_simulated_has_the_real_points_of_its_lines() -> None:
    preset = Preset.read(EXHIBIT)
    (best, *_) = recorded(preset)
    charts, _ = pictures(preset, best.evidence, best.findings)
    figure = charts["serving"].figure
    (axes,) = figure.axes
    rings = [line for line in axes.lines if line.get_markersize() == RING["markersize"]]
    drawn = sorted((x, y) for line in rings for x, y in line.get_xydata().tolist())
    with_lines = [
        (point.throughput_real, latency_ms)
        for point in points_of(COMMITTED, LENGTHS)
        if point.cell.system.get(SIZE) != 16 and (latency_ms := point.normalized_ms_real) is not None
    ]
    assert drawn == sorted(with_lines) and len(drawn) == 14
    low, high = axes.get_xlim()
    assert all(low < x < high for x, _ in drawn)
    legend = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert "measured" in legend and "falls behind" in legend and any(line.get_marker() == "x" for line in axes.lines)
    for chart in charts.values():
        plt.close(chart.figure)


def test_where_no_engine_was_measured_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "points", lambda costs: ())
    assert standing(COMMITTED, LENGTHS) == (False, NO_RECORD)
