"""Two sets of results side by side."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Run
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from made_records import ENVIRONMENT, chosen, latency, memory, record, rounds, throughput
from made_records import cell as cell_of

from results.record import Record
from results.regression import IMPROVEMENT, METRICS, REGRESSION, SAME, UNCERTAIN, changes, only_in
from results.store import Store
from scripts.compare import table

WHEN = "2026-01-01"
SAMPLES = st.lists(st.floats(0.5, 2.0), min_size=3, max_size=20)


def cell(system: str = "nimble", host: str = "a", batch: int = 1, **more: Any) -> Record:
    """A record of a system on a host, with every measurement that may be compared."""
    parts: dict[str, Any] = {
        "latency": latency(1.0, 1.01, 0.99, 1.0),
        "throughput": throughput(100.0, 101.0, 99.0),
        "memory": memory(2**20),
        "preparation_s": 2.0,
        "comparison": rounds("g", [1.0], [1.0], [1.0]),
        "when": WHEN,
    }
    return record(of=cell_of(system, batch=batch), environment=replace(ENVIRONMENT, host=host), **(parts | more))


def timed(samples: list[float], **more: Any) -> Record:
    return cell(latency=latency(*samples), **more)


@examples(50)
@given(SAMPLES, st.floats(0.2, 5.0), st.floats(0.0, 0.5))
def test_a_cell_that_is_slower_by_more_than_the_threshold_is_a_regression(
    samples: list[float], factor: float, threshold: float
) -> None:
    (change,) = changes([timed(samples)], [timed([x * factor for x in samples], host="b")], "latency", "eager")
    assert change.worse == pytest.approx(factor) and change.low is not None and change.high is not None
    assert change.low <= factor * 1.0001 and factor <= change.high * 1.0001
    verdict = change.verdict(threshold)
    if factor < 1 / (1 + threshold):
        assert verdict in (IMPROVEMENT, UNCERTAIN)
    elif factor <= 1 + threshold:
        assert verdict == SAME
    else:
        assert verdict in (REGRESSION, UNCERTAIN)
    assert (verdict == REGRESSION) == (change.low > 1 + threshold)


@examples(30)
@given(SAMPLES, SAMPLES)
def test_the_other_way_round_it_is_the_inverse(a: list[float], b: list[float]) -> None:
    (there,) = changes([timed(a)], [timed(b)], "latency", "eager")
    (back,) = changes([timed(b)], [timed(a)], "latency", "eager")
    assert there.worse is not None and back.worse == pytest.approx(1 / there.worse)
    assert (there.before, there.after) == (back.after, back.before)


@pytest.mark.parametrize("metric", METRICS)
def test_a_set_is_the_same_as_itself(metric: str) -> None:
    records = [cell("eager"), cell("nimble"), cell("nimble", batch=8)]
    differences = changes(records, copy.deepcopy(records), metric, "eager")
    assert differences and all(change.verdict(0.0) == SAME for change in differences)


def test_what_is_better_depends_on_the_metric() -> None:
    before, after = cell(), cell(throughput=throughput(80.0, 80.0), memory=memory(2**21), preparation_s=1.0)
    verdicts = {m: changes([before], [after], m, "eager")[0].verdict(0.05) for m in ("throughput", "memory", "preparation")}
    assert verdicts == {"throughput": REGRESSION, "memory": REGRESSION, "preparation": IMPROVEMENT}


@examples(30)
@given(st.floats(0.1, 10.0))
def test_a_speedup_is_compared_whatever_the_machine(machine: float) -> None:
    """The whole machine is slower by a factor; within it, nimble lost a fifth of its speed."""
    slow = [[4.0], [4.4], [4.0]]
    before = [cell("eager", comparison=rounds("g", *slow)), cell(comparison=rounds("g", [1.0], [1.1], [1.0]))]
    after = [
        cell("eager", "b", comparison=rounds("h", *([x * machine for x in r] for r in slow))),
        cell("nimble", "b", comparison=rounds("h", *([x * machine * 1.25] for x in (1.0, 1.1, 1.0)))),
    ]
    differences = changes(before, after, "speedup", "eager")
    (change,) = [c for c in differences if c.key[2] == "nimble"]
    assert (change.before, change.after) == (pytest.approx(4.0), pytest.approx(3.2))
    assert change.worse == pytest.approx(1.25) and change.verdict(0.05) == REGRESSION


def test_regressions_come_first_and_the_surest_of_them() -> None:
    before = [cell(batch=b) for b in (1, 2, 4, 8, 16)]
    after = [
        cell(batch=1),
        timed([1.5, 1.5, 1.5, 1.5], batch=2),
        timed([0.5, 0.5, 0.5, 0.5], batch=4),
        cell(batch=8, status="incorrect", reason="wrong"),
        timed([1.2, 1.2, 1.2, 1.2], batch=16),
    ]
    differences = changes(before, after, "latency", "eager")
    assert [(change.key[1], change.verdict(0.05)) for change in differences] == [
        ("8", REGRESSION),
        ("2", REGRESSION),
        ("16", REGRESSION),
        ("1", SAME),
        ("4", IMPROVEMENT),
    ]
    assert differences[0].after is None and differences[0].statuses == (
        "ok",
        "incorrect",
    )  # an incorrect system has no speed


def test_a_system_that_began_to_run_is_an_improvement_and_one_that_never_did_is_the_same() -> None:
    broken = cell(status="failed", reason="no")
    assert changes([broken], [cell()], "latency", "eager")[0].verdict(0.05) == IMPROVEMENT
    assert changes([broken], [cell(status="failed", reason="x")], "latency", "eager")[0].verdict(0.05) == SAME


@pytest.mark.parametrize("runner", ["training", "simulated"])
def test_a_record_of_another_kind_or_load_is_of_another_cell(runner: str) -> None:
    """Three times the latency, newer, and beside the same batch of `bench`."""
    more = {"latency": latency(3.0, 3.0, 3.0), "when": "2026-02-01"}
    kind = record(of=cell_of("nimble", runner=runner), environment=ENVIRONMENT, **more)
    loaded = replace(cell_of("nimble"), runner=chosen("runner", "serving", concurrency=512))
    load = record(of=loaded, environment=ENVIRONMENT, **more)
    (change,) = changes([cell()], [cell(), kind, load], "latency", "eager")
    assert change.verdict(0.05) == SAME
    assert [key[-2:] for key in only_in([cell(), kind, load], [cell()])] == [("inference", "concurrency=512"), (runner, "")]


def test_conditions_that_differ_are_columns() -> None:
    conditions: list[dict[str, Any]] = [{}, {"algorithms": "timed"}]
    records = [record(of=cell_of("nimble", **one), latency=latency(1.0, 1.0)) for one in conditions]
    records.append(record(of=cell_of("nimble", runner="training"), latency=latency(1.0, 1.0)))
    shown = table(changes(records, records, "latency", "eager"), "latency", 0.05)
    texts = [list(column.cells) for column in shown.columns]
    assert sorted(texts[3]) == ["heuristic", "heuristic", "timed"] and sorted(texts[4]) == ["inference"] * 2 + ["training"]


def test_the_newest_record_of_a_cell_counts_and_what_one_side_lacks_is_named() -> None:
    old, new = timed([9.0, 9.0, 9.0]), timed([1.0, 1.0, 1.0], host="newer", when="2026-02-01")
    (change,) = changes([old, new], [cell()], "latency", "eager")
    assert change.before == 1.0
    assert [key[:3] for key in only_in([cell(), cell(batch=8)], [cell(host="b")])] == [("nasnet", "8", "nimble")]


Compare = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def compare(script: Run, tmp_path: Path) -> Compare:
    """Runs the script over two sets of records."""

    def compare(a: list[Record], b: list[Record], *more: str) -> "subprocess.CompletedProcess[str]":
        for name, records in (("a", a), ("b", b)):
            store = Store(tmp_path / name)
            store.make()
            for one in records:
                store.write(one)
        return script("compare", str(tmp_path / "a"), str(tmp_path / "b"), *more)

    return compare


def test_exit_status_1_beyond_the_threshold(compare: Compare) -> None:
    slower = timed([1.1, 1.11, 1.09, 1.1], host="b")
    done = compare([cell()], [slower])
    assert done.returncode == 1 and ": 1 regression\n" in done.stdout and "1.100 [" in done.stdout, done.stdout + done.stderr
    assert "before: a CPU, a, torch 2.11" in done.stdout and "after:  a CPU, b, torch 2.11" in done.stdout
    done = compare([cell()], [slower], "--threshold", "0.2")
    assert done.returncode == 0 and "1 unchanged" in done.stdout and "nimble" not in done.stdout
    assert "nimble" in compare([cell()], [slower], "--threshold", "0.2", "--all").stdout


def test_cells_of_one_side_alone_are_told(compare: Compare) -> None:
    done = compare([cell(), cell(batch=8)], [cell(host="b")])
    assert done.returncode == 0 and "1 cell, nasnet, 8, nimble the first" in done.stdout
    assert compare([cell(), cell(batch=8)], [cell(host="b")], "--complete").returncode == 1


def test_a_cell_has_its_speedup_from_whichever_rounds_it_shared_with_the_baseline(compare: Compare) -> None:
    """Eager took part in two sweeps; the rounds of the first one are kept beside those of the second."""
    first = [cell("eager"), cell("nimble")]
    second = [cell(system, comparison=rounds("h", [2.0], [2.0], [2.0])) for system in ("eager", "opara")]
    done = compare([*first, *second], [*first, *second], "--metric", "speedup")
    assert done.returncode == 0 and "2 unchanged" in done.stdout, done.stdout + done.stderr


def test_cells_without_the_metric_on_one_side_are_told(compare: Compare) -> None:
    """Both sets have every cell, and the later one has lost the rounds of one."""
    systems = "eager", "nimble", "opara"
    after = [cell("eager"), cell("nimble"), cell("opara", comparison=None)]
    for more, status in (((), 0), (("--complete",), 1)):
        done = compare([cell(system) for system in systems], after, "--metric", "speedup", *more)
        assert done.returncode == status and "1 unchanged" in done.stdout, done.stdout + done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("no speedup in ")]
        assert line.endswith("b: 1 cell, nasnet, 1, opara the first") and "only in" not in done.stdout
    assert "no speedup" not in compare(after, [cell(system) for system in systems], "--metric", "speedup").stdout


@pytest.mark.parametrize(
    ("b", "more", "message"),
    [
        ([cell()], ["--threshold", "-1"], "--threshold -1 is not a share"),
        ([cell()], ["--threshold", "nan"], "--threshold nan is not a share"),
        ([cell()], ["--threshold", "much"], "invalid float value: 'much'"),
        ([cell()], ["--metric", "beauty"], "invalid choice: 'beauty'"),
        ([cell(batch=8)], [], "have no cell in common that tells of latency"),
        ([cell()], ["--metric", "speedup", "--baseline", "tvm"], "tells of speedups over tvm"),
        ([], [], "no record in"),
    ],
)
def test_a_bad_request_is_a_line(compare: Compare, b: list[Record], more: list[str], message: str) -> None:
    done = compare([cell()], b, *more)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_cells_that_failed_on_both_sides_tell_of_nothing(compare: Compare) -> None:
    both = [cell(), cell("opara", status="failed", reason="no")]
    done = compare(both, both, "--metric", "speedup", "--baseline", "tvm")
    assert done.returncode == 2 and "tells of speedups over tvm" in done.stderr and done.stdout == ""


def test_a_folder_that_is_not_there_and_a_file_that_is_no_record(compare: Compare, script: Run, tmp_path: Path) -> None:
    command = [sys.executable, "scripts/compare.py", "nowhere", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr == (
        "compare.py: nowhere is not there: results are in a folder, or in a file *.jsonl.gz\n"
    )
    long = script("compare", "x" * 300, str(tmp_path))
    assert long.returncode == 2 and long.stderr.endswith("x: File name too long\n") and long.stderr.count("\n") == 1
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "foreign.json").write_text(json.dumps({"mine": 1}))
    done = compare([cell()], [cell(host="b")])
    assert done.returncode == 0 and "foreign.json: it has no status" in done.stderr
    for name, b, status in (("a", 1.0, 2), ("b", 1.0, 2), ("b", 9.0, 1)):
        (tmp_path / name / "damaged.json").write_text('{"schema": 2, "status": "ok"')
        done = compare([cell()], [timed([b, b, b], host="b")])
        assert done.returncode == status and "damaged.json: not readable" in done.stderr and "threshold" in done.stdout


def test_the_reference_is_as_good_as_itself() -> None:
    alone, in_turn = (
        list(Store(ROOT / "results" / "reference" / "h200" / f"{s}.jsonl.gz").read().records.values())
        for s in ("overview", "turns")
    )
    assert not changes(alone, alone, "speedup", "eager")  # a profiler had been in these before their rounds
    for metric in METRICS:
        records = in_turn if metric == "speedup" else alone
        differences = changes(records, records, metric, "eager")
        assert len(differences) > 100 and {change.verdict(0.0) for change in differences} <= {SAME, UNCERTAIN}, metric
