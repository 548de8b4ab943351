"""What interrupts do while a request runs."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import command as command_line
from conftest import environment, heed_interrupts, living, soon
from faulty_models import working_directory

from runners import command
from runners.command import Interrupts


class Exited(Exception):
    pass


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ending the process at once raises Exited."""

    def end(status: int) -> None:
        raise Exited(status)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(command.os, "_exit", end)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ended")
def test_the_first_ends_in_order_one_that_comes_with_it_changes_nothing_and_a_later_one_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Interrupts.heeded():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        now[0] += 0.9
        os.kill(os.getpid(), signal.SIGINT)
        now[0] += 0.2
        with pytest.raises(Exited, match="130"):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ended")
def test_interrupts_that_are_ignored_stay_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts.heeded():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_interrupt_before_anything_runs_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "composed", interrupted)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    with pytest.raises(KeyboardInterrupt):
        command.main()


def test_what_keeps_no_record_does_not_say_that_it_goes_on(tmp_path: Path) -> None:
    folder = working_directory(tmp_path)
    hanging = command_line(
        "runner=schedule", "model=custom", "model.factory=zoo:make", "device=cpu", "system=nimble", "batch=4"
    )
    process = subprocess.Popen(
        hanging, cwd=folder, env=environment(), preexec_fn=heed_interrupts, stderr=subprocess.PIPE, text=True
    )
    assert soon(lambda: (folder / "hanging").exists())
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=15)
    assert process.returncode == 130 and messages.splitlines()[-1] == "opweave: interrupted"
    assert soon(lambda: not living(folder), within=5), living(folder)
