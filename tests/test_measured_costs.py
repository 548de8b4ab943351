"""What is measured is kept: by several processes at once, and by one that is killed."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from systems.profiling.measurements import Measurements
from systems.profiling.timing import Timer

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
WRITER = """
import sys
import torch
from systems.profiling.measurements import Measurements

name, count = sys.argv[1], int(sys.argv[2])
cache = Measurements("stages", torch.device("cpu"))
print("ready", flush=True)
for i in range(count):
    cache.add({f"{name} {i}": i * 0.5})
    print(i, flush=True)
"""


HOLDER = """
import sys
import torch
from systems.profiling.measurements import Measurements

cache = Measurements("weave", torch.device("cpu"))
with cache.alone("model", lambda words: print(words, flush=True)):
    print(cache.measured.get("model"), flush=True)
    sys.stdin.readline()
    cache.add({"model": sys.argv[1]})
"""


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path))
    return tmp_path


def writer(name: str, count: int) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", WRITER, name, str(count)], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_that_write_at_once_lose_nothing() -> None:
    processes = [writer(name, 40) for name in ("a", "b")]
    assert [process.communicate()[0].split()[-1] for process in processes] == ["39", "39"]
    expected = {f"{name} {i}": i * 0.5 for name in ("a", "b") for i in range(40)}
    assert Measurements("stages", CPU).measured == expected


def test_a_process_that_is_killed_leaves_what_it_had_written(cache_folder: Path) -> None:
    process = writer("a", 100_000)
    assert process.stdout is not None
    written = [process.stdout.readline() for _ in range(30)]
    time.sleep(0.0137)  # somewhere in a writing
    process.kill()
    process.wait()
    process.stdout.close()
    last = int(written[-1])
    measured = Measurements("stages", CPU).measured
    assert len(measured) > last and all(measured[f"a {i}"] == i * 0.5 for i in range(last + 1))
    Measurements("stages", CPU).add({"b": 1.0})  # its lock went with it
    (file,) = cache_folder.glob("*.json")
    assert json.loads(file.read_text())["measured"]["b"] == 1.0


def test_a_timer_measures_once_and_writes_when_it_is_closed() -> None:
    reports: list[str] = []
    timer = Timer(CPU, reports.append)
    assert [timer.known("x", lambda: 2.5), timer.known("x", lambda: pytest.fail("measured again"))] == [2.5, 2.5]
    timer.close()
    again = Timer(CPU, reports.append)
    assert again.known("x", lambda: pytest.fail("measured again")) == 2.5
    assert (timer.taken, again.taken) == (1, 0) and reports == ["measuring kernels: 1 measured"]


def holder(value: str) -> "subprocess.Popen[str]":
    arguments = [sys.executable, "-c", HOLDER, value]
    return subprocess.Popen(arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.slow
def test_of_two_that_want_a_cost_one_waits_and_knows_it_then(is_killed: bool) -> None:
    """Also where the first one dies: then nothing is known, and nobody waits any longer."""
    first = holder("first")
    assert first.stdin is not None and first.stdout is not None
    assert first.stdout.readline() == "None\n"
    second = holder("second")
    assert second.stdin is not None and second.stdout is not None
    assert "waiting for another process" in second.stdout.readline()
    if is_killed:
        first.kill()
    first.communicate(None if is_killed else "\n")
    assert second.stdout.readline() == ("None\n" if is_killed else "first\n")
    second.communicate("\n")
    assert second.returncode == 0 and Measurements("weave", CPU).measured == {"model": "second"}


def test_nobody_waits_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    file = cache_folder / "file"
    file.write_text("")
    monkeypatch.setenv("OPWEAVE_CACHE", str(file / "within"))
    cache = Measurements("weave", CPU)
    with cache.alone("model", pytest.fail), cache.alone("model", pytest.fail):
        assert cache.measured == {}
    with pytest.raises(ZeroDivisionError), cache.alone("model", pytest.fail):
        raise ZeroDivisionError
