"""What a user's own model does to the process that it runs in ends that cell alone, and in one line."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from made_records import cell, record

from results.cell import choose
from results.words import MOST_LETTERS, one_line, printable
from runners.cell.messages import Answer, Check, Failed, Refused
from runners.checks import BadRequest, check_cache, check_writable
from runners.showings.asking import check_output
from runners.sweep.cell_process import CellProcess
from runners.sweep.lane import lock_folder

STRANGE = """
import os, subprocess, sys, time

def junk(batch):
    for fd in range(3, 64):
        try:
            os.write(fd, b"junk\\n")
        except OSError:
            pass
    time.sleep(60)

def forged(batch):
    for fd in range(3, 64):
        try:
            os.write(fd, b'{"type": "Learned", "message": {"seconds": null}}\\n')
        except OSError:
            pass
    time.sleep(60)

def deep(batch):
    for fd in range(3, 64):
        try:
            os.write(fd, b"[" * 200_000 + b"\\n")
        except OSError:
            pass
    time.sleep(60)

def closes(batch):
    os.closerange(3, 64)

def megabyte(batch):
    raise ValueError("\\x1b[31mred\\x1b[0m\\x07 " + "x" * 2**20)

def last_words(batch):
    sys.stderr.write("\\x1b[31m" + "y" * 2**20)
    sys.stderr.flush()
    os._exit(3)

def daemon(batch):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            subprocess.run(["sleep", "1234.5"])
        os._exit(0)
    os.wait()

def leaves_a_daemon(batch):
    daemon(batch)
    time.sleep(0.5)
    os._exit(1)
"""


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Answer]:
    """The answer of a cell's process whose model a function of STRANGE makes."""
    (tmp_path / "strange.py").write_text(STRANGE)
    monkeypatch.chdir(tmp_path)

    def ask(function: str) -> Answer:
        process = CellProcess("cpu", "0")
        try:
            return process.ask(Check("model", choose("model", "custom", factory=f"strange:{function}"), 1), 120)
        finally:
            process.close()

    return ask


SAYS = {
    "junk": "no answer: junk",
    "megabyte": "ValueError: red\\x07 xxx",
    "forged": "no answer: Learned",
    "deep": "no answer: [[",
    "closes": "ended with",
    "last_words": "last words: yyy",
}
SHORT = ("junk", "megabyte")


@pytest.mark.parametrize("function", [f if f in SHORT else pytest.param(f, marks=pytest.mark.slow) for f in SAYS])
def test_whatever_a_factory_does_is_one_short_line(ask: Callable[[str], Answer], function: str) -> None:
    answer = ask(function)
    assert isinstance(answer, Failed | Refused), answer
    assert SAYS[function] in answer.reason and answer.reason.isprintable(), answer.reason
    assert len(answer.reason) < 2 * MOST_LETTERS


def sleepers() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "1234.5"]]


@pytest.mark.parametrize("function", ["daemon", "leaves_a_daemon"])
def test_a_daemon_ends_with_its_cell(ask: Callable[[str], Answer], function: str) -> None:
    """One whose starter lives, and one whose worker has ended before it."""
    assert isinstance(ask(function), Failed | Refused)
    deadline = time.monotonic() + 10
    while (left := sleepers()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def test_locks_lie_in_a_folder_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = lock_folder()
    assert first == lock_folder() and first.stat().st_mode & 0o777 == 0o700
    takers: list[Callable[[], object]] = [first.touch, lambda: first.symlink_to(tmp_path), lambda: first.mkdir(mode=0o777)]
    for take in takers:
        first.rmdir()
        take()
        first.chmod(0o777, follow_symlinks=False) if not first.is_symlink() else None
        other = lock_folder()
        assert other != first and other == lock_folder()
        first.rmdir() if first.is_dir() and not first.is_symlink() else first.unlink()
        first.mkdir(mode=0o700)
    if os.getuid() == 0:
        os.chown(first, 12345, 12345)
        assert lock_folder() != first
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(BadRequest, match="TMPDIR"):
        lock_folder()


def test_texts_of_strangers_are_printable_and_short() -> None:
    assert printable("\x1b[1;31mred\x1b[0m \x07\ud800 µ–") == "red \\x07\\ud800 µ–"
    assert one_line(" a\n\n b\t") == "a b" and one_line("x" * 2**20).endswith("x…")
    assert len(one_line("x" * 2**20)) == MOST_LETTERS and len(str(BadRequest("x" * 2**20))) < 3000


def test_a_path_that_no_system_takes_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    long = Path("/tmp") / ("x" * 300)
    checks: list[Callable[[], None]] = [lambda: check_writable(long, "results"), lambda: check_output(long), check_cache]
    monkeypatch.setenv("OPWEAVE_CACHE", str(long))
    for check in checks:
        with pytest.raises(BadRequest, match="is no path: File name too long"):
            check()


def test_a_long_name_is_cut_in_that_of_a_file() -> None:
    long = record(of=cell("s" * 300, model="a/" + "m" * 300))
    assert len(long.file_name) < 150 and "/" not in long.file_name and long.file_name.endswith(f"-{long.id}.json")
