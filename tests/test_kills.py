"""Whatever ends a sweep or a cell's process, at whatever moment: no record is lost, nothing goes on running, and the same
command goes on where that one stopped."""

import errno
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from conftest import command, environment, heed_interrupts, living, soon
from made_records import cell, record

from results.files import PARTIAL
from results.store import Store

MODEL = '''
import os, time
import torch
from torch import nn


def make(batch):
    """A model, and a daemon that no session, no parent and no environment ties to its cell.

    While there is a file `hold` it makes none.
    """
    while os.path.exists("hold"):
        time.sleep(0.01)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/bin/sleep", ["sleep", "600"], {})
        os._exit(0)
    os.wait()
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.randn(batch, 8),)
'''
ASKED = [
    *("-m", "model=custom", "model.factory=zoo:make", "device=cpu", "runner=latency"),
    *("runner.samples=5", "max_load=1"),
]
# Starts the program, and prints a line once it has said what a signal shall do: before that Python itself is starting.
HERALD = """
import os, runpy, signal, sys

def told(*arguments, own=signal.signal):
    before, signal.signal = own(*arguments), own
    os.write(1, b"begun\\n")
    return before

signal.signal, sys.argv = told, sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ENDS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: -signal.SIGTERM, signal.SIGINT: 130}
INTERRUPTED = "opweave: interrupted; the same command goes on where this one stopped\n"
MOMENTS = 20  # of each signal
LONGEST_S = 7.0  # from the beginning of a sweep to its end by a signal
LIFE_S = 2.0  # of a worker, until its end by a signal
CLEARED_S = 10.0  # for whatever is left running to end
OF_ROUNDS = {"comparison": None, "warnings": None}  # what a record has of the sweep that finishes its group

Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with MODEL in zoo.py, whose sweeps wait for no other's turn on the CPU."""
    (tmp_path / "zoo.py").write_text(MODEL)
    (tmp_path / "tmp").mkdir()
    return tmp_path


@pytest.fixture
def begin(folder: Path) -> Begin:
    """Starts a sweep over ASKED, and returns once it can be told what to do by a signal."""

    def begin(*arguments: str, results: str = "r") -> "subprocess.Popen[str]":
        python, *program = command(*ASKED, f"results={results}", *arguments)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        shell = environment(TMPDIR=str(folder / "tmp"))
        process = subprocess.Popen(
            [python, "-c", HERALD, *program], cwd=folder, env=shell, preexec_fn=heed_interrupts, **pipes
        )
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        return process

    return begin


def ended(process: "subprocess.Popen[str]", folder: Path) -> str:
    """What a sweep has told until its end; nothing is left running of it."""
    messages: str = process.communicate(timeout=120)[1]
    assert "Traceback" not in messages
    assert soon(lambda: not living(folder), within=CLEARED_S), living(folder)
    return messages


def finished(results: Path) -> dict[str, dict[str, Any]]:
    """The records of cells that ran, by file name. Every file is a whole record, or has the name of one being written."""
    contents = Store(results).read()
    assert not contents.reasons_by_file
    assert all(file.suffix == ".json" or file.name.endswith(PARTIAL) for file in results.glob("*"))
    documents = {file.name: json.loads(file.read_text()) for file in results.glob("*.json")}
    return {name: document for name, document in documents.items() if document["status"] == "ok"}


def without_rounds(documents: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: document | OF_ROUNDS for name, document in documents.items()}


def measured_alone(begin: Begin, folder: Path) -> dict[str, dict[str, Any]]:
    """The record of one system, of which a sweep may add the rounds, and lose nothing."""
    process = begin("system=eager")
    messages = ended(process, folder)
    assert process.returncode == 0, messages
    alone = without_rounds(finished(folder / "r"))
    assert len(alone) == 1
    return alone


@pytest.mark.parametrize(
    ("number", "moments"),
    [
        (signal.SIGINT, 3),
        (signal.SIGTERM, 3),
        *(pytest.param(number, MOMENTS, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGTERM)),
    ],
)
def test_a_signal_in_the_first_two_seconds_is_one_line_at_most(
    begin: Begin, folder: Path, number: signal.Signals, moments: int
) -> None:
    """While the program imports its libraries, while Hydra composes, and while the first process starts."""
    random = Random(number)
    for part in range(moments):
        process = begin("system=eager")
        time.sleep(2.0 * (part + random.random()) / moments)
        process.send_signal(number)
        messages = ended(process, folder)
        assert process.returncode == ENDS[number] and messages in ("", INTERRUPTED), messages
    assert finished(folder / "r") == {}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
@pytest.mark.parametrize("number", ENDS)
def test_a_sweep_that_is_ended_at_any_moment_goes_on_where_it_stopped(
    begin: Begin, folder: Path, number: signal.Signals
) -> None:
    random, arguments = Random(number), ["system=eager,torchscript", "rounds=2"]
    before = measured_alone(begin, folder)
    for _ in range(MOMENTS):
        process = begin(*arguments)
        with suppress(subprocess.TimeoutExpired):
            process.wait(random.uniform(0, LONGEST_S))
        (folder / "hold").touch()  # one that went on in spite of the signal would not end by itself
        process.send_signal(number)
        messages = ended(process, folder)
        (folder / "hold").unlink()
        assert process.returncode in (ENDS[number], 0), messages
        now = finished(folder / "r")
        assert {name: document for name, document in without_rounds(now).items() if name in before} == before
        if process.returncode == 0:
            assert len({document["id"] for document in now.values()}) == 2  # in more files: rounds of other sweeps are kept
            (name,) = (name for name in now if "torchscript" in name)
            (folder / "r" / name).unlink()
            del now[name]
        before = without_rounds(now)
    process = begin(*arguments)
    messages = ended(process, folder)
    now = finished(folder / "r")
    assert process.returncode == 0 and all(document["comparison"] for document in now.values()), messages
    assert len({document["id"] for document in now.values()}) == 2
    assert {name: document for name, document in without_rounds(now).items() if name in before} == before


def workers(sweep: "subprocess.Popen[str]") -> list[psutil.Process]:
    """The processes of the sweep's cells, without the forks of one that try a factory."""
    processes: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(sweep.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                is_worker = "runners.cell.worker" in process.cmdline()[:4]  # python -P -m MODULE
                processes += [process] if is_worker and process.parent() not in processes else []
    return processes


@pytest.mark.slow
@pytest.mark.parametrize("number", ENDS)
def test_a_worker_that_is_ended_at_any_moment_costs_its_cell_alone(
    begin: Begin, folder: Path, number: signal.Signals
) -> None:
    random, arguments, before = Random(number), ["system=eager", f"batch={','.join(map(str, range(1, 7)))}"], {}
    sent = 0
    while sent < MOMENTS:
        process, known = begin(*arguments), set()
        while process.poll() is None:
            new = [worker for worker in workers(process) if worker not in known]
            known.update(new)
            if new and len(known) > 1:  # the first one tries the factory
                with suppress(psutil.TimeoutExpired):
                    new[0].wait(random.uniform(0, LIFE_S))
                if new[0].is_running():
                    new[0].send_signal(number)
                    sent += 1
            time.sleep(0.005)
        assert known
        messages = ended(process, folder)
        records = Store(folder / "r").read().records.values()
        assert len(records) == 6 and process.returncode == int(any(not r.is_ok for r in records)), messages
        for failed in (r for r in records if not r.is_ok):
            assert failed.status == "failed" and failed.reason is not None
            assert number.name in failed.reason or "KeyboardInterrupt" in failed.reason, failed.reason
        now = finished(folder / "r")
        assert {name: now[name] for name in before} == before
        before = now
        if process.returncode == 0:
            shutil.rmtree(folder / "r")
            before = {}
    process = begin(*arguments)
    messages = ended(process, folder)
    now = finished(folder / "r")
    assert process.returncode == 0 and len(now) == 6 and {name: now[name] for name in before} == before, messages


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_of_two_sweeps_at_once_one_is_killed_and_the_other_completes(begin: Begin, folder: Path, seed: int) -> None:
    random, arguments = Random(seed), ["system=eager,torchscript", "rounds=2"]
    alone = measured_alone(begin, folder)
    first = begin(*arguments)
    time.sleep(random.uniform(0, 2))
    second = begin(*arguments)
    time.sleep(random.uniform(0, LONGEST_S))
    killed, other = (first, second) if seed else (second, first)
    killed.kill()
    killed.communicate()
    before = without_rounds(finished(folder / "r"))
    assert {name: before[name] for name in alone} == alone
    messages = ended(other, folder)
    now = finished(folder / "r")
    assert other.returncode == 0 and len(now) == 2 and all(document["comparison"] for document in now.values()), messages
    assert {name: document for name, document in without_rounds(now).items() if name in before} == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "opweave-test", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("this system has no mount")
    if done.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> Path:
    """A new file that takes all that the disk has left."""
    file = disk / "filler"
    with file.open("wb", buffering=0) as filler, pytest.raises(OSError) as caught:
        while True:
            filler.write(bytes(4096))
    assert caught.value.errno == errno.ENOSPC
    return file


def test_a_record_that_finds_no_room_leaves_the_old_one(small_disk: Path) -> None:
    store = Store(small_disk / "r")
    store.make()
    file = store.write(record(of=cell("eager")))
    before = file.read_bytes()
    fill(small_disk)
    for system in ("eager", "nimble"):
        with pytest.raises(OSError) as caught:
            store.write(record(of=cell(system)))
        assert caught.value.errno == errno.ENOSPC
    assert list(store.folder.iterdir()) == [file] and file.read_bytes() == before


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_the_sweep_in_one_line(begin: Begin, folder: Path, small_disk: Path) -> None:
    results, arguments = small_disk / "r", ["system=eager", "batch=1,2,3"]
    process = begin(*arguments, results=str(results))
    assert soon(lambda: list(results.glob("*.json")) or process.poll() is not None)
    filler = fill(small_disk)
    (file,) = results.glob("*.json")
    before = file.read_bytes()
    line = f"opweave: results={results} cannot be written: No space left on device"
    for sweep in (process, None):
        sweep = sweep or begin(*arguments, results=str(results))
        messages = ended(sweep, folder)
        assert sweep.returncode == 2 and messages.splitlines()[-1] == line, messages
        assert list(results.iterdir()) == [file] and file.read_bytes() == before
    filler.unlink()
    process = begin(*arguments, results=str(results))
    messages = ended(process, folder)
    assert process.returncode == 0 and len(finished(results)) == 3 and file.read_bytes() == before, messages
