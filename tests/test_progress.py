"""How far a sweep is, where there is no terminal."""

import time

import pytest
from made_records import cell, record

from runners.sweep import progress
from runners.sweep.progress import Progress


def test_a_long_cell_is_heard_of_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SILENCE", 0.2)
    with Progress(2) as shown:
        shown.start(cell(), "0")
        shown.phase("0", cell(), "warming up")
        time.sleep(0.5)
        shown.done(cell(), record())
    *lines, last = (line.rpartition(",")[0] for line in capsys.readouterr().err.splitlines())
    assert lines and set(lines) == {"[0/2] nasnet nimble b1: warming up"}
    assert last == "[1/2] nasnet nimble b1: ok"
    assert not shown.teller.is_alive()


def test_why_a_cell_gave_no_result_stands_beside_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2) as shown:
        shown.start(cell(), "0")
        shown.done(cell(), record(status="failed", reason="no such thing"))
        shown.skip(cell("eager"))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["[1/2] nasnet nimble b1: failed (no such thing), 0 s", "[2/2] nasnet eager b1: measured before"]
