"""What a user's own model does to the process that it runs in ends that cell alone, and in one line."""

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from made_records import cell, record

from results.cell import choose
from results.words import MOST_LETTERS, one_line, printable
from runners.cell.messages import Answer, Check, Failed, Prepare, Refused
from runners.checks import BadRequest, check_cache, check_writable
from runners.showings.asking import check_output
from runners.sweep.cell_process import CellProcess
from runners.sweep.lane import lock_folder

STRANGE = '''
import ctypes, os, signal, sys, time

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

def sleeps(batch):
    os.closerange(3, 64)
    time.sleep(30)

def daemon(batch):
    """A process that has forgotten where it comes from: its session, its parents, its environment."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open("daemon", "w") as file:
                file.write(str(os.getpid()))
            os.execve("/bin/sleep", ["sleep", "600"], {})
        os._exit(0)
    os.wait()
    while not os.path.exists("daemon") or not os.path.getsize("daemon"):
        time.sleep(0.01)

def daemon_of_one_that_exits(batch):
    daemon(batch)
    os._exit(1)

def daemon_of_one_that_is_killed(batch):
    daemon(batch)
    os.kill(os.getpid(), signal.SIGKILL)

def daemon_of_one_that_is_terminated(batch):
    daemon(batch)
    os.kill(os.getpid(), signal.SIGTERM)

def daemon_of_one_that_crashes(batch):
    daemon(batch)
    ctypes.string_at(0)

def daemon_of_one_that_kills_its_group(batch):
    daemon(batch)
    os.killpg(0, signal.SIGKILL)
'''

PR_GET_CHILD_SUBREAPER = 37


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
    "sleeps": "last words: OSError: [Errno 9] Bad file descriptor",  # a fork has tried it
}
SHORT = ("junk",)


@pytest.mark.parametrize("function", [f if f in SHORT else pytest.param(f, marks=pytest.mark.slow) for f in SAYS])
def test_whatever_a_factory_does_is_one_short_line(ask: Callable[[str], Answer], function: str) -> None:
    answer = ask(function)
    assert isinstance(answer, Failed | Refused), answer
    assert SAYS[function] in answer.reason and answer.reason.isprintable(), answer.reason
    assert len(answer.reason) < 2 * MOST_LETTERS


@pytest.mark.slow
def test_a_worker_that_closes_its_answers_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "strange.py").write_text(STRANGE)
    monkeypatch.chdir(tmp_path)
    process = CellProcess("cpu", "0")
    try:
        answer = process.ask(Prepare(replace(cell(), model=choose("model", "custom", factory="strange:sleeps"))), 120)
    finally:
        process.close()
    assert answer == Failed("failed", "its process closed the descriptor of its answers")


ENDS = {
    "daemon": "returned None",
    "daemon_of_one_that_is_killed": "its process was killed by SIGKILL",
    "daemon_of_one_that_exits": "its process ended with status 1",
    "daemon_of_one_that_is_terminated": "its process was killed by SIGTERM",
    "daemon_of_one_that_crashes": "its process was killed by SIGSEGV",
    "daemon_of_one_that_kills_its_group": "its process was killed by SIGKILL",
}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
@pytest.mark.parametrize("function", [f if n < 1 else pytest.param(f, marks=pytest.mark.slow) for n, f in enumerate(ENDS)])
def test_a_daemon_ends_with_its_cell(ask: Callable[[str], Answer], tmp_path: Path, function: str) -> None:
    """One whose starter lives, and one whose starter has ended before it. The process that asks stays what it is."""
    answer = ask(function)
    assert isinstance(answer, Failed | Refused) and ENDS[function] in answer.reason, answer
    assert not psutil.pid_exists(int((tmp_path / "daemon").read_text()))
    is_subreaper = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(is_subreaper)) == 0 and is_subreaper.value == 0


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
