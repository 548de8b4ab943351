"""The seam for measurements: what is derived from their files, and adding one by the steps of runners/README.md."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY, environment
from made_records import record

import conf
from results.cell import Choice, choose
from runners.checks import BadRequest
from runners.measurements.base import DASH
from runners.measurements.registry import compositions, in_order_of_columns, measurements, plan
from runners.showings.registry import showings

CODE = ("conf", "hydra_plugins", "models", "runners", "systems")

IMPORT = """
import importlib, pkgutil, sys
import runners.execute, runners.measurements, runners.showings
for package in (runners.measurements, runners.showings):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print(*sys.modules)
"""


def test_importing_measurements_does_not_import_torch() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = set(run.stdout.split())
    assert "runners.measurements.kernels" in modules and "runners.showings.timeline" in modules
    assert not {"torch", "transformers", "torchvision"} & modules


def test_every_file_of_conf_has_a_runner_and_every_runner_a_file() -> None:
    for choice in conf.choices("runner"):
        runner = choose("runner", choice)
        assert runner.name in showings() or plan(runner).measurements, choice
    names = {choose("runner", choice).name for choice in conf.choices("runner")}
    assert {*showings(), *compositions()} <= names and {*measurements()} - names == {"kernels"}  # of others only


def test_a_composition_makes_what_its_file_lists_in_that_order() -> None:
    bench = plan(choose("runner", "bench"))
    assert [m.name for m in bench.measurements] == [
        "correctness",
        *str(choose("runner", "bench").get("measurements")).split(),
    ]
    assert [m.name for m in bench.first] == ["memory"] and [m.name for m in bench.timed] == [
        "latency",
        "throughput",
        "energy",
    ]
    assert [m.name for m in bench.profiled] == ["sm_efficiency", "kernels", "limits"] and bench.is_compared
    fewer = plan(choose("runner", "bench", measurements="energy latency"))
    assert [m.name for m in fewer.timed] == ["energy", "latency"] and fewer.profiled == ()


def test_which_cells_are_compared_follows_from_what_they_measure() -> None:
    compared = {
        choice
        for choice in conf.choices("runner")
        if choice not in showings() and plan(choose("runner", choice)).is_compared
    }
    assert compared == {"bench", "latency", "training"}


@pytest.mark.parametrize("names", ["latency latency", "latencies"])
def test_a_list_that_cannot_be_is_refused(names: str) -> None:
    with pytest.raises(BadRequest, match="measurement"):
        plan(choose("runner", "bench", measurements=names))


def test_options_are_checked_by_their_measurement() -> None:
    for choice, options, says in (
        ("latency", {"samples": 0}, "positive integer"),
        ("sm_efficiency", {"sm_efficiency": "counter"}, "did you mean counters"),
        ("bench", {"sm_efficiency": "counter"}, "did you mean counters"),
        ("training", {"learning_rate": -1.0}, "at least 0"),
    ):
        with pytest.raises(BadRequest, match=says):
            plan(choose("runner", choice, **options))  # type: ignore[arg-type]


def test_a_record_without_a_measurement_has_no_text_of_it() -> None:
    bare = record()
    for measurement in in_order_of_columns():
        for row in (*(measurement.rows or ()), *measurement.columns):
            assert row.text(bare) == DASH, row.heading


def test_columns_have_one_order() -> None:
    headings = [column.heading for measurement in in_order_of_columns() for column in measurement.columns]
    of_servers = ["req/s", "tokens/s", "normalized ms", "TTFT p99", "ITL p99", "at once", "in vain"]
    of_servers += ["req/s at SLO", "SLO ms", "ms at it", "batch ms", "increment ms", "idle"]
    of_servers += ["simulated req/s", "simulated ms"]
    of_devices = ["SM", "warps", "error", "limit ms"]
    of_tables = ["AUC", "95 %", "over pipeline", "log loss", "fit + tune s", "tuned rows/s", "µs a row", "parameters"]
    assert headings == ["latency ms", "device ms", "samples/s", "MiB", "J", *of_servers, *of_devices, *of_tables]
    assert len(set(headings)) == len(headings)


def test_a_runner_that_does_not_exist_has_no_plan() -> None:
    with pytest.raises(BadRequest, match="runner=latenci is not one of"):
        plan(Choice("latenci", "latenci"))


def fenced(page: str, language: str) -> list[str]:
    """The blocks of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


@pytest.mark.slow
def test_a_measurement_is_added_by_the_steps_of_the_page(tmp_path: Path) -> None:
    """In a copy of the project: a file, a config file, and then the command line."""
    project = tmp_path / "project"
    for part in CODE:
        shutil.copytree(ROOT / part, project / part, ignore=shutil.ignore_patterns("__pycache__"))
    (project / "results").mkdir()
    for file in (ROOT / "results").glob("*.py"):
        shutil.copy(file, project / "results")
    shutil.copy(ROOT / "run.py", project)
    (tmp_path / "tiny.py").write_text(TINY)
    page = (ROOT / "runners" / "README.md").read_text(encoding="utf-8")
    (code,), (config,) = fenced(page, "python"), fenced(page, "yaml")
    (project / "runners" / "measurements" / "first_call.py").write_text(code)
    (project / "conf" / "runner" / "first_call.yaml").write_text(config)

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command_line = [
            sys.executable,
            str(project / "run.py"),
            "model=custom",
            "model.factory=tiny:make",
            "device=cpu",
            *arguments,
        ]
        shell = environment(TMPDIR=str(tmp_path))
        return subprocess.run(command_line, cwd=tmp_path, env=shell, capture_output=True, text=True, timeout=240)

    done = run("-m", "runner=first_call", "system=eager,nimble", "results=r")
    assert done.returncode == 0, done.stderr
    documents = [json.loads(file.read_text()) for file in (tmp_path / "r").glob("*.json")]
    assert len(documents) == 2 and "first call ms" in done.stdout
    for document in documents:
        (quantity,) = document["measured"]["first_call"]["quantities"]
        assert quantity["value"] > 0 and quantity["unit"] == "ms" and "latency" not in document
        assert f"{quantity['value']:.1f}" in done.stdout
    wrong = run("runner=first_call", "runner.repeats=0", "system=eager")
    assert wrong.returncode == 2 and "runner.repeats=0 is not a positive integer" in wrong.stderr
