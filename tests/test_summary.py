"""The table at the end of a sweep."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_records import ENVIRONMENT, cell, record, rounds
from rich.console import Console

from results.calls import Correctness, Latency, Memory, Throughput
from results.cell import Cell, Conditions, choose
from results.course import Course
from results.limits import Limits
from results.occupation import ActiveWarps, SmEfficiency
from results.quantity import Measured, Quantity
from results.record import Record
from results.schedule import Compilation, DecisionRow
from results.statistics import Statistics
from results.warning import Warning
from runners.sweep.summary import print_summary

HOST = Statistics(12345.678, (12345.678, 12345.678), 1.0, 1.0, 1.0, 1.0, 1.0, 1)
GPU = replace(ENVIRONMENT, gpu="NVIDIA H200")
RATE = Statistics(123456.7, (123456.7, 123456.7), 1.0, 1.0, 1.0, 1.0, 1.0, 1)
ENERGY = Quantity("joules_per_call", "energy a call", "J", 1.25, 1.2, 1.3, source="NVML")
MEASURED: dict[str, Any] = {
    "latency": Latency(0, (12345.678,), None, HOST, HOST),
    "throughput": Throughput(1, (123456.7,), RATE),
    "memory": Memory("torch allocator", 1, 2**33),
    "sm_efficiency": SmEfficiency(0.5, "counters", None),
    "correctness": Correctness(True, None, 1.2e-5, None, 1e-2),
    "limits": Limits(1.0, 2.0),
    "measured": {"energy": Measured((ENERGY,))},
    "environment": GPU,
}


def shown(records: list[Record], width: int) -> str:
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
        assert all(
            word in table for word in ("50% (c)", "1.25", "1.2e-05", "8,192.0", "123,456.7", "(12345.7x)", "[12345.678,")
        )


def test_a_table_that_goes_to_a_file_is_as_wide_as_it_needs() -> None:
    rows = [record(s, **MEASURED) for s in ("eager", "nimble")]
    output = io.StringIO()
    print_summary(rows, Path("folder"), Console(file=output, width=80))
    assert max(map(len, output.getvalue().splitlines())) > 120 and "8,192.0" in output.getvalue()


def test_of_a_rewritten_model_the_limit_is_that_of_its_own_operators() -> None:
    rows = [record(s, **MEASURED | {"comparison": rounds("g", [1.0])}) for s in ("nimble", "nimble_fused")]
    rows[1] = replace(rows[1], limits=Limits(1.0, 2.0, rewritten=Limits(0.5, 1.0)))
    table = shown(rows, 200)
    assert "1.000 (12345.7x)" in table and "0.500 (24691.4x)" in table


def test_a_warning_of_learning_and_of_measuring_is_told_once() -> None:
    twice = (Warning("notice", {"text": "the cache is full"}), Warning("notice", {"text": "the cache is full"}))
    table = shown([replace(record("nimble", **MEASURED), warnings=twice)], 200)
    assert table.count("the cache is full") == 1 and "nimble, nimble" not in table


def test_one_cell_says_what_bounds_it() -> None:
    of_passes = Limits(0.5, 1.0, sm_area_ms=0.25, traffic_ms=0.75, launch_ms=0.1)
    table = shown([record("nimble_fused", **MEASURED | {"limits": replace(Limits(1.0, 2.0), rewritten=of_passes)})], 120)
    line = next(line for line in table.splitlines() if "bounded by" in line)
    assert "memory traffic, 0.750 ms, latency is 16460.90 times that" in line
    assert "launch of as many kernels" in table and "0.250 ms" in table


def test_training_shows_its_throughput_however_narrow_the_terminal() -> None:
    rows = [record(s, **MEASURED) for s in ("eager", "nimble")]
    assert "123,456.7" not in shown(rows, 80)
    rows = [replace(row, cell=cell(row.cell.system.choice, runner="training")) for row in rows]
    assert "samples/s" in shown(rows, 80) and "123,456.7" in shown(rows, 80)


@pytest.mark.parametrize("width", [80, 200])
def test_active_warps_say_where_they_are_from(width: int) -> None:
    estimated = ActiveWarps(1276.84, "estimated", None, None, Course((0.0, 1.0), (1276.84,)))
    rows = [record(s, active_warps=estimated, environment=GPU) for s in ("sequential", "ios")]
    assert "1,276.8 (e)" in shown(rows, width) and "1,276.8 (estimated)" in shown(rows[:1], width)
    nowhere = ActiveWarps(None, None, "a CPU has no warps")
    assert "a CPU has no warps" in shown([record("ios", active_warps=nowhere, environment=GPU)], width)


@pytest.mark.parametrize("width", [80, 200])
def test_one_cell_is_shown_downwards(width: int) -> None:
    table = shown([record("eager", **MEASURED)], width)
    assert max(len(line) for line in table.splitlines() if not line.startswith("record")) <= width
    for word in (
        "12345.678",
        "50% (counters)",
        "1.2e-05",
        "8,192.0 MiB",
        "1.25 [1.2, 1.3] J",
        "12345.68 times",
        "NVIDIA H200",
    ):
        assert word in table


def test_the_tail_of_latencies_stands_in_its_order() -> None:
    statistics = Statistics(2.0, (1.9, 2.1), min=1.0, p10=1.5, p90=3.0, p99=4.0, mean=2.0, n=9)
    table = shown([record("eager", **MEASURED | {"latency": Latency(0, (2.0,), None, statistics, None)})], 120)
    assert "min, p90, p99" in table and "1.000, 3.000, 4.000 ms" in table and "2.000 [1.900, 2.100] ms" in table


@pytest.mark.parametrize(
    ("compilation", "lines"),
    [
        (
            Compilation(compile_s=5.82, compiled_now=False, functions=33, tuned=11, trials=24, tuning_s=91.0),
            ["compiled in 5.8 s, kept since", "24 trials in 91.0 s", "11 of 33 functions tuned"],
        ),
        (Compilation(export_s=4.2, exported_now=True), ["exported in 4.2 s"]),
        (
            Compilation(
                mode="default",
                layout="channels_last",
                freezing=True,
                compile_s=2.2,
                search_s=42.4,
                num_untried=5,
                decisions=(DecisionRow("torch_compile", "the model", 1, "a", {"a": 1.0, "b": None}),),
            ),
            ["compiled in 2.2 s", "2 of 7 variants tried in 42.4 s", "default, layout channels_last, frozen"],
        ),
    ],
)
def test_what_a_compiler_took_stands_beside_the_latency(compilation: Compilation, lines: list[str]) -> None:
    table = shown([record("tvm", **MEASURED, compilation=compilation)], 80)
    assert all(line in table for line in lines) and "compilation" in table


def test_what_was_learned_stands_beside_the_preparation() -> None:
    table = shown([record("ios", **MEASURED, learning_s=12.34, preparation_s=2.0)], 120)
    assert "12.3 s" in table and "learning" in table and "2.0 s" in table


def test_what_was_not_measured_and_why_stands_below() -> None:
    failed = record("torch_compile", status="out_of_memory", reason="no 1 TiB here")
    doubtful = record("eager", **MEASURED, warnings=(Warning("notice", {"text": "a doubt [half]"}),))
    table = shown([doubtful, failed], 120)
    assert "torch_compile b1: out_of_memory: no 1 TiB here" in table
    assert "eager b1: warning: a doubt [half]" in table
    assert "over eager" not in table  # nothing was measured in turn


def test_what_several_systems_share_stands_below_once() -> None:
    busy = (Warning("busy_rounds", {"load": 0.76, "cores": 2}),)
    other = cell("eager", "vgg16")
    records = [record(system, **MEASURED, warnings=busy) for system in ("eager", "nimble")]
    table = shown([*records, record(of=other, **MEASURED, warnings=busy)], 120)
    assert table.count("other processes took 76%") == 2
    assert "nasnet b1, eager, nimble: warning: no ratio" in table and "vgg16 eager b1: warning: no ratio" in table


def test_brackets_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = MEASURED | {"sm_efficiency": SmEfficiency(None, None, "install 'this[extra]'")}
    print_summary([record("eager", **unknown)], tmp_path / "runs[bold]")
    printed = capsys.readouterr().out
    assert "install 'this[extra]'" in printed and "runs[bold]" in printed


def test_what_varies_in_a_sweep_is_a_column() -> None:
    conditions, runner = Conditions(1, "cpu", "fp16"), choose("runner", "bench")

    def bert(system: str, sequence: int) -> Cell:
        return Cell(choose("model", "bert", sequence=sequence), choose("system", system), runner, conditions)

    rows = [record(of=of, **MEASURED) for of in (cell("eager"), bert("eager", 64), bert("nimble", 128))]
    table = shown(rows, 200)
    assert all(word in table for word in ("precision", "fp16", "bert (sequence=64)", "bert "))
    assert "layout" not in table.splitlines()[2]
