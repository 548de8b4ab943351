"""scripts/report.py: the pages that it writes, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Run
from dags import from_edges
from reports import OVERVIEW, REFERENCE, document

from systems.scheduling.plans.stream_assignment import assign_streams


def test_verdicts_of_an_older_form_are_left_out(script: Run, folder: Path) -> None:
    """Where the file was asked for, it is an error."""
    file = folder / "results" / "exhibits" / "verdicts.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps([{"exhibit": "nimble/figure7"}]))
    places = "--results", str(REFERENCE / "best.jsonl.gz"), "--models", "nasnet", "--output", str(folder / "r.html")
    done = script("report", *places, cwd=folder)
    assert done.returncode == 0 and done.stderr.startswith(
        "warning: results/exhibits/verdicts.json is left out: a verdict has"
    )
    assert len(done.stderr.splitlines()) == 1 and (folder / "r.html").exists()
    assert script("report", *places, "--verdicts", str(file), cwd=folder).returncode == 2


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "scripts/report.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--results", "nowhere"], "nowhere is not there"),
        (["--results", OVERVIEW, "README.md"], "README.md is a file: results are in a folder"),
        (["--results", "README.md", OVERVIEW], "README.md is a file: results are in a folder"),
        (["--results", "README.md/deeper"], "README.md/deeper is not there: results are in a folder"),
        (["--results", OVERVIEW, "--schedules", "nowhere.json"], "nowhere.json"),
        (["--results", OVERVIEW, "--verdicts", "nowhere.json"], "nowhere.json"),
        (["--results", OVERVIEW, "--timelines", "nowhere.json"], "nowhere.json: No such file"),
        (["--results", OVERVIEW, "--timelines", OVERVIEW], "no JSON"),
        (
            ["--results", OVERVIEW, "--models", "vgg16", "--output", "/dev/null/x/r.html"],
            "cannot be written",
        ),
        (["--results", OVERVIEW, "--output", "tests"], "it is a folder"),
        (["--results", OVERVIEW, "--output", "r.x", "--markdown", "./r.x"], "are both r.x"),
    ],
)
def test_a_bad_request_is_a_line(script: Run, arguments: list[str], message: str) -> None:
    done = script("report", *arguments)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_what_cannot_be_written_is_told_before_anything_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(
        "--results",
        OVERVIEW,
        "--output",
        f"{tmp_path}/r.html",
        "--markdown",
        f"{tmp_path}/file/r.md",
    )
    assert done.returncode == 2 and "is not a folder" in done.stderr and done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_command_writes_both_pages(tmp_path: Path) -> None:
    schedule = tmp_path / "s.json"
    graph = from_edges(3, [(0, 1), (0, 2)])
    schedule.write_text(json.dumps(document(graph, assign_streams(graph))))
    page, text = tmp_path / "deep" / "r.html", tmp_path / "r.md"
    done = run(
        *(
            "--results",
            OVERVIEW,
            "--models",
            "nasnet,bert",
            "--batches",
            "1",
            "--schedules",
            str(schedule),
        ),
        *("--output", str(page), "--markdown", str(text)),
    )
    assert done.returncode == 0 and done.stdout.split() == [str(page), str(text)], done.stderr
    assert "<!DOCTYPE html>" in page.read_text()[:20] and (tmp_path / "r_files" / "speedup.svg").exists()
    assert "![a model, nimble" in text.read_text()


def test_a_terminal_is_told_how_far_the_charts_are(script: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = REFERENCE / "level.jsonl.gz"
    arguments = "report", "--results", str(pack), "--models", "bert", "--output", str(folder / "r.html")
    assert not script(*arguments).stderr
    monkeypatch.setenv("FORCE_COLOR", "1")  # stands for a terminal, as rich has it
    assert "drawing" in script(*arguments).stderr
