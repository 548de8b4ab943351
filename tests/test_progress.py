"""How far a sweep is, where there is no terminal."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from made_records import cell, record

from runners.cell.messages import Show, Shown
from runners.request.request import SweepOptions
from runners.showings import asking
from runners.sweep import progress
from runners.sweep.progress import Progress

OPTIONS = SweepOptions(Path(), force=False, timeout=1, memory_gib=None, rounds=0, max_load=1, gpus=None, output=None)


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


def test_a_cell_that_comes_again_after_it_is_done_begins_anew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "SILENCE", 0.05)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress(2) as shown:
        shown.start(cell(), "0")
        now[0] = 100
        shown.done(cell(), record())
        now[0] = 500
        shown.phase("0", cell(), "round 1 of 5")
        now[0] = 510
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert "[1/2] nasnet nimble b1: ok, 100 s" in lines and lines[-1] == "[1/2] nasnet nimble b1: round 1 of 5, 10 s"


def test_nothing_is_heard_of_a_gpu_whose_group_has_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SILENCE", 0.05)
    with Progress(2) as shown:
        shown.phase("0", cell(), "limits")
        shown.phase("1", cell("ios"), "learning")
        shown.rest("0")
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("[0/2] nasnet ios b1: learning") for line in lines)


def test_a_long_showing_is_heard_of_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow:
        def __init__(self, *_: object) -> None: ...

        def ask(self, command: Show, timeout: float, memory_gib: float | None, phase: Callable[[str], object]) -> Shown:
            phase("[1 of 2] bert")
            time.sleep(0.5)
            return Shown({})

        def close(self) -> None: ...

    monkeypatch.setattr(asking, "CellProcess", Slow)
    monkeypatch.setattr(asking, "SILENCE", 0.2)
    num_threads = threading.active_count()
    assert asking.ask(cell(runner="list"), OPTIONS) == Shown({})
    lines = capsys.readouterr().err.splitlines()
    assert lines and set(lines) == {"list: [1 of 2] bert, 0 s"}
    assert threading.active_count() == num_threads


def test_why_a_cell_gave_no_result_stands_beside_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2) as shown:
        shown.start(cell(), "0")
        shown.done(cell(), record(status="failed", reason="no such thing"))
        shown.skip(cell("eager"))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["[1/2] nasnet nimble b1: failed (no such thing), 0 s", "[2/2] nasnet eager b1: measured before"]
