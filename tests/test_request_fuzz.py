"""Whatever is asked: a right request is composed, a wrong one is one line and status 2, and no record is lost."""

import os
import sys
from pathlib import Path

import pytest
from conftest import Run
from made_requests import request_of

from results.store import read_record
from runners import command as program
from runners.checks import MOST_LETTERS, BadRequest
from runners.request.request import Request

PROCESSES = 8  # requests that are real processes too


def answer(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The line in which a command line is refused; None where cells are composed of it. Nothing is run."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["run.py", *arguments])
        patch.setenv("HYDRA_FULL_ERROR", "1")
        try:
            assert Request.joined(program.composed().requests).cells
        except BadRequest as error:
            return str(error)
    return None


def test_a_value_is_of_its_options_type_and_a_path_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that runner.energy_s=1 and =1.0 are one cell, and a sweep of another directory finds the same records."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def requested(*arguments: str) -> Request:
        monkeypatch.setattr(sys, "argv", ["run.py", "runner=energy", "device=cpu", *arguments])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        return Request.joined(program.composed().requests)

    whole, broken = requested("runner.energy_s=1", "results=r"), requested("runner.energy_s=1.0", "results='~/r'")
    assert whole.cells == broken.cells and type(whole.cells[0].runner.options["energy_s"]) is float
    assert whole.options.results == tmp_path / "r" and broken.options.results == tmp_path / "home" / "r"


def test_a_refusal_is_one_line_whatever_it_quotes() -> None:
    refusal = str(BadRequest("no such\nthing\x1b[31m" + "x" * 2 * MOST_LETTERS))
    assert refusal.startswith("no such") and refusal.isprintable() and len(refusal) <= MOST_LETTERS


SEEDS = [range(10), *(pytest.param(range(i, i + 75), marks=pytest.mark.slow) for i in range(0, 300, 75))]


@pytest.mark.parametrize("seeds", SEEDS)  # Hydra takes a third of a second for each
def test_a_request_is_composed_or_refused_in_a_line(seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    refused = 0
    for seed in seeds:
        request = request_of(seed)
        line = answer(request.arguments, monkeypatch)
        assert request.is_right is None or request.is_right == (line is None), (seed, request.arguments, line)
        if line is not None:
            refused += 1
            assert line.isprintable() and 10 < len(line) <= MOST_LETTERS + 1, (seed, request.arguments, line)
    assert refused > len(seeds) / 2 and os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_refused_request_ends_its_process_with_status_2(run: Run, folder: Path) -> None:
    done = run("model=custom", "model.factory=tiny:make", "system=eager", "runner=latency", "runner.samples=3", "results=r")
    assert done.returncode == 0, done.stderr
    (record,) = (folder / "r").iterdir()
    whole, before = record.read_bytes(), sorted(os.listdir(folder))
    for seed in [seed for seed in range(1000) if request_of(seed).is_right is False][:PROCESSES]:
        done = run(*request_of(seed).arguments, *([] if "results" in str(request_of(seed)) else ["results=r"]))
        assert done.returncode == 2 and "Traceback" not in done.stderr, (request_of(seed), done.stderr)
        assert done.stdout == "" and len(done.stderr.splitlines()) == 1 and done.stderr.startswith("opweave: ")
        assert sorted(os.listdir(folder)) == before and record.read_bytes() == whole and read_record(record).is_ok
