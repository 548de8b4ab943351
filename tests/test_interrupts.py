"""An interrupt of a script, while it imports its libraries: one line, and the status that a shell gives.

A program that prints for nobody, as in `| head`, ends without a word.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from run import UNREAD
from scripts.interrupts import INTERRUPTED


def interrupted(folder: Path, script: str, error: str) -> "subprocess.CompletedProcess[str]":
    """A script that meets an error where it imports matplotlib."""
    (folder / "matplotlib.py").write_text(f"raise {error}\n")  # it is found before the installed one
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, f"scripts/{script}.py"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("script", ["plot", "report", "reproduce", "timeline", "today"])
def test_an_interrupt_is_one_line(tmp_path: Path, script: str) -> None:
    done = interrupted(tmp_path, script, "KeyboardInterrupt")
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", f"{script}.py: interrupted\n")


def test_another_error_has_its_traceback(tmp_path: Path) -> None:
    done = interrupted(tmp_path, "plot", "RuntimeError('no such thing')")
    assert done.returncode == 1 and "Traceback" in done.stderr and "RuntimeError: no such thing" in done.stderr


@pytest.mark.parametrize(
    ("program", "unbuffered", "status"),
    [
        ("run.py system=ios --help", "1", UNREAD),
        ("run.py --version", "", 0),  # which is written at the end
        ("run.py --version", "1", UNREAD),
        pytest.param("run.py runner=placement model=gpt system=orca", "", UNREAD, marks=pytest.mark.slow),  # a table
        ("scripts/reproduce.py --list", "1", UNREAD),
        pytest.param(
            *("scripts/reproduce.py nimble/figure7 --recorded --output {folder}", "", UNREAD), marks=pytest.mark.slow
        ),
        ("scripts/plot.py --help", "", 0),
    ],
)
def test_what_nobody_reads_is_not_told(tmp_path: Path, program: str, unbuffered: str, status: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command, environment = (
        [sys.executable, *program.format(folder=tmp_path).split()],
        os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writer)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("[1/1]")]  # how far it is
    assert (done.returncode, lines) == (status, [])
