"""The table at the end of a sweep."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_results import record, rounds

from runners.sweep.summary import print_summary

HOST = {"median": 12345.678, "ci95": [12345.678, 12345.678], "min": 1.0, "p90": 1.0, "p99": 1.0}
MEASURED = {
    "latency": {"statistics": {"host": HOST, "device": HOST}},
    "throughput": {"statistics": {"median": 123456.7}},
    "memory": {"peak_bytes": 2**33},
    "sm_efficiency": {"value": 0.5, "source": "counters", "reason": None, "when": "after the rounds"},
    "correctness": {"relative_error": 1.2e-5},
    "limits": {"critical_path_ms": 1.0, "busy_ms": 2.0},
    "environment": {"gpu": "NVIDIA H200", "cpu": "a CPU"},
}


def shown(records: list[dict[str, Any]], width: int) -> str:
    output = io.StringIO()
    print_summary(records, Path("folder"), Console(file=output, width=width, force_terminal=True, color_system=None))
    return output.getvalue()


@pytest.mark.parametrize("width", [80, 120, 160, 200])
def test_the_table_fits_the_terminal(width: int) -> None:
    systems = ("eager", "torch_compile", "nimble")
    rows = [record(s, **MEASURED | {"comparison": rounds("g", [float(i + 1)])}) for i, s in enumerate(systems)]
    table = shown(rows, width)
    assert max(map(len, table.splitlines())) <= width
    assert all(word in table for word in (*systems, "12345.678", "1.00x", "0.33x"))
    if width >= 200:
        assert all(word in table for word in ("50% (c)", "1.2e-05", "8,192.0", "123,456.7", "(12345.7x)", "[12345.678,"))


def test_of_a_rewritten_model_the_limit_is_that_of_its_own_operators() -> None:
    rows = [record(s, **MEASURED | {"comparison": rounds("g", [1.0])}) for s in ("nimble", "nimble_fused")]
    rows[1]["limits"] = MEASURED["limits"] | {"rewritten": {"critical_path_ms": 0.5, "busy_ms": 1.0}}
    table = shown(rows, 200)
    assert "1.000 (12345.7x)" in table and "0.500 (24691.4x)" in table


def test_training_shows_its_throughput_however_narrow_the_terminal() -> None:
    rows = [record(s, **MEASURED) for s in ("eager", "nimble")]
    assert "123,456.7" not in shown(rows, 80)
    for row in rows:
        row["config"] = row["config"] | {"runner": {"name": "training"}}
    assert "samples/s" in shown(rows, 80) and "123,456.7" in shown(rows, 80)


@pytest.mark.parametrize("width", [80, 200])
def test_active_warps_say_where_they_are_from(width: int) -> None:
    found = {
        "value": 1276.84,
        "source": "estimated",
        "reason": None,
        "estimated_course": {"ms": [0.0, 1.0], "warps": [1276.84]},
    }
    rows = [record(s, active_warps=found, environment=MEASURED["environment"]) for s in ("sequential", "ios")]
    assert "1,276.8 (e)" in shown(rows, width) and "1,276.8 (estimated)" in shown(rows[:1], width)
    nowhere = {"value": None, "source": None, "reason": "a CPU has no warps", "estimated_course": None}
    assert "a CPU has no warps" in shown([record("ios", active_warps=nowhere, environment=MEASURED["environment"])], width)


@pytest.mark.parametrize("width", [80, 200])
def test_one_cell_is_shown_downwards(width: int) -> None:
    table = shown([record("eager", **MEASURED)], width)
    assert max(len(line) for line in table.splitlines() if not line.startswith("record")) <= width
    for word in ("12345.678", "50% (counters)", "1.2e-05", "8,192.0 MiB", "12345.68 times", "NVIDIA H200"):
        assert word in table


@pytest.mark.parametrize(
    ("told", "lines"),
    [
        (
            {"compile_s": 5.82, "compiled_now": False, "functions": 33, "tuned": 11, "trials": 24, "tuning_s": 91.0},
            ["compiled in 5.8 s, kept since", "24 trials in 91.0 s", "11 of 33 functions tuned"],
        ),
        ({"export_s": 4.2, "exported_now": True}, ["exported in 4.2 s"]),
        (
            {"compile_s": 2.2, "search_s": 42.4, "tried": [{}, {}], "not_tried": 5}
            | {"mode": "default", "layout": "channels_last", "freezing": True},
            ["compiled in 2.2 s", "2 of 7 variants tried in 42.4 s", "default, layout channels_last, frozen"],
        ),
    ],
)
def test_what_a_compiler_took_stands_beside_the_latency(told: dict[str, Any], lines: list[str]) -> None:
    table = shown([record("tvm", **MEASURED, compilation=told)], 80)
    assert all(line in table for line in lines) and "compilation" in table


def test_what_was_not_measured_and_why_stands_below() -> None:
    failed = record("torch_compile", status="out_of_memory", reason="no 1 TiB here", environment={"cpu": "a CPU"})
    doubtful = record("eager", **MEASURED | {"warnings": ["latency scatters: by [half]"]})
    table = shown([doubtful, failed], 120)
    assert "torch_compile b1: out_of_memory: no 1 TiB here" in table
    assert "eager b1: warning: latency scatters: by [half]" in table
    assert "over eager" not in table  # nothing was measured in turn


def test_brackets_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = MEASURED | {"sm_efficiency": {"value": None, "source": None, "reason": "install 'this[extra]'"}}
    print_summary([record("eager", **unknown)], tmp_path / "runs[bold]")
    told = capsys.readouterr().out
    assert "install 'this[extra]'" in told and "runs[bold]" in told


def test_what_varies_in_a_sweep_is_a_column() -> None:
    rows = [record("eager", **MEASURED) for _ in range(2)]
    rows[1]["config"] = rows[1]["config"] | {"precision": "fp16", "model": {"name": "bert", "sequence": 64}}
    rows.append(
        record("nimble", id="x", config=rows[1]["config"] | {"model": {"name": "bert", "sequence": 128}}, **MEASURED)
    )
    rows[1]["id"] = "y"
    table = shown(rows, 200)
    assert all(word in table for word in ("precision", "fp16", "bert (sequence=64)", "bert "))
    assert "layout" not in table.splitlines()[2]
