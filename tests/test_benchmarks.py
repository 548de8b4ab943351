"""The scripts that time schedulers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import benchmark_advice, benchmark_scheduling
from conftest import ROOT, Run
from dags import from_edges

import models
from systems.scheduling.graph.capture import capture
from systems.scheduling.plans.stream_allocator import allocate_streams
from systems.scheduling.plans.stream_assignment import assign_streams


def test_each_schedule_file_has_a_row(script: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same model too, which passes may have rewritten; with what either scheduler makes of its graph."""
    monkeypatch.setattr(benchmark_scheduling, "SIZES", ())
    rows = []
    for name, edges in (("plain", [(0, 1), (0, 2), (1, 3), (2, 3)]), ("rewritten", [(0, 2), (1, 2), (1, 3)])):
        graph = from_edges(4, edges)
        schedule = assign_streams(graph)
        document = schedule.to_json(model="net", batch=1, device="cpu")
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
        counts = 4, len(edges), graph.width, schedule.stream_count, max(allocate_streams(graph)) + 1, len(schedule.waits)
        rows.append(f"net ({name}.json) {' '.join(map(str, counts))}")
    done = script("benchmark_scheduling", "plain.json", "rewritten.json", cwd=tmp_path)
    shown = [" ".join(line.replace("│", " ").split()) for line in done.stdout.splitlines()]
    for row in rows:
        assert sum(line.startswith(f"{row} ") for line in shown) == 1
    assert sum(line.startswith("random, local 1,300 ") for line in shown) == 1 and done.returncode == 0


def test_models_of_the_zoo_are_captured(script: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_scheduling, "SIZES", ())
    done = script("benchmark_scheduling", "--zoo", "squeezenet", "vgg16")
    shown = [line.replace("│", " ").split() for line in done.stdout.splitlines()]
    loaded = models.load("squeezenet", 1)
    graph = capture(loaded.module, loaded.inputs).graph
    (row,) = (cells for cells in shown if cells[:1] == ["squeezenet"])
    assert row[1:4] == [str(len(graph)), str(len(graph.edges)), str(graph.width)] and done.returncode == 0
    assert row[4:6] == [str(assign_streams(graph).stream_count), str(max(allocate_streams(graph)) + 1)]
    assert sum(cells[:1] == ["vgg16"] for cells in shown) == 1


@pytest.mark.parametrize(
    ("name", "arguments", "says", "own_process"),
    [
        ("benchmark_scheduling", ["trace.json"], "not a schedule file", False),
        ("benchmark_scheduling", ["--zoo", "squeezenett"], "did you mean squeezenet", False),
        ("benchmark_advice", ["squeezenett"], "did you mean squeezenet", False),
        ("benchmark_ios_search", ["trace.json"], "not a schedule file", True),
        ("benchmark_serving", ["--nothing"], "unrecognized arguments: --nothing", False),
        ("benchmark_launches", ["--steps", "3"], "--steps is 3, and has to be even", False),
        ("benchmark_ios_search", ["trace.json", "--r", "-1"], "--r -1 is not an integer of at least 0", False),
    ],
)
def test_a_wrong_request_is_one_line(
    script: Run, tmp_path: Path, name: str, arguments: list[str], says: str, own_process: bool
) -> None:
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": []}))
    if own_process:
        command = [sys.executable, str(ROOT / "tests" / "benchmarks" / f"{name}.py"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    else:
        done = script(name, *arguments, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1 and says in done.stderr


def test_a_gain_without_a_forecast_is_a_miss_and_counts_in_what_is_best() -> None:
    """Nimble's is right, IOS's is the largest and has no forecast."""
    setting = benchmark_advice.Setting("deepfm", 1, "fp16")
    gains = [
        benchmark_advice.Gain(setting, system, benchmark_advice.IN_RECORDS, benchmark_advice.BY_PROFILE, measured, predicted)
        for system, measured, predicted in (("nimble", 1.01, 1.02), ("ios", 1.4, None))
    ]
    settings, number, within, all_within, right, *_ = benchmark_advice.shares(gains)
    assert (settings, number, within, all_within, right) == ("1", "2", "50.0%", "0.0%", "0.0%")
    assert benchmark_advice.is_right(gains[:1]) and benchmark_advice.most_predicted(gains[1:]) == 1.0
