"""scripts/plot.py: the files that it writes, and what it refuses."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from drawn_charts import REFERENCE, measured

from scripts import plot
from scripts.charts import speedup, style

pytestmark = pytest.mark.usefixtures("closed_figures")


def test_a_figure_is_the_same_file_again(tmp_path: Path) -> None:
    for number in (1, 2):
        figure = speedup.draw(measured().only(models=["nasnet", "bert"])).figure
        style.save(figure, tmp_path / f"{number}.svg")
        style.save(figure, tmp_path / f"{number}.png")
    for suffix in ("svg", "png"):
        assert (tmp_path / f"1.{suffix}").read_bytes() == (tmp_path / f"2.{suffix}").read_bytes()


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "scripts/plot.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_command_draws_png_and_svg(tmp_path: Path) -> None:
    arguments = (
        "speedup",
        "sm_efficiency",
        "--results",
        str(REFERENCE / "overview.jsonl.gz"),
        "--models",
        "nasnet,randwire",
        "--output",
        str(tmp_path),
    )
    done = run(*arguments, "-p", "nimble/figure7")
    assert done.returncode == 0, done.stderr
    names = {f"speedup-b{batch}" for batch in (1, 8, 32)} | {f"sm_efficiency-estimated-b{b}" for b in (1, 8, 32)}
    names |= {"sm_efficiency-counters-b1"}
    assert {file.name for file in tmp_path.iterdir()} == {f"{name}.{suffix}" for name in names for suffix in ("png", "svg")}
    assert sorted(done.stdout.split()) == sorted(str(file) for file in tmp_path.iterdir())
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speedupp"], "no chart is named speedupp: there is speedup"),
        (["--results", "nowhere"], "nowhere is not there"),
        (["--results", "README.md"], "README.md is a file"),
        (["--results", str(REFERENCE), "latency"], "latency is a chart, and charts go before --results"),
        (
            ["speedup", "--results", str(REFERENCE / "overview.jsonl.gz"), "--baseline", "nimbel"],
            "no system is named 'nimbel': did you mean nimble?",
        ),
        (["--results", "scripts"], "no record in scripts"),
        (["--results", str(REFERENCE / "overview.jsonl.gz"), "--models", "nasnot"], "no record of the model nasnot"),
        (["--results", str(REFERENCE / "overview.jsonl.gz"), "-p", "nimble/figure70"], "did you mean figure7?"),
        (["--results", str(REFERENCE / "overview.jsonl.gz"), "--formats", "gif"], "--formats gif is none of"),
        (
            ["memory", "--results", str(REFERENCE / "overview.jsonl.gz"), "--output", "README.md"],
            "README.md is not a folder",
        ),
    ],
)
def test_a_bad_request_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["plot.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        plot.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and len(error.splitlines()) == 1, error


def test_a_chart_that_was_asked_for_and_cannot_be_drawn_is_told() -> None:
    done = run("speedup", "--results", str(REFERENCE / "overview.jsonl.gz"), "--baseline", "opara")
    assert done.returncode == 1 and "nothing was measured in turn with opara" in done.stderr
