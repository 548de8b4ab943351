"""Sweeps with real processes: resumed, forced, killed, two at once, and with cells that go wrong."""

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Run, command, environment, gone, heed_interrupts, living, soon
from faulty_models import MODEL, working_directory

from results.comparison import speedup
from results.document import from_json, to_json
from results.record import Record
from runners.measurements.base import NOT_YET
from runners.measurements.parts import owing

ASKED = [
    "model=custom",
    "model.factory=zoo:make",
    "device=cpu",
    "results=r",
    "runner=latency",
    "runner.samples=5",
    "max_load=1",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return working_directory(tmp_path)


@pytest.fixture
def sweep(run: Run, folder: Path) -> Run:
    """Runs a sweep over ASKED to its end."""
    return lambda *arguments: run("-m", *ASKED, *arguments, TMPDIR=str(folder / "tmp"))


@pytest.fixture
def begin(folder: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Starts a sweep over ASKED and goes on."""

    def begin(*arguments: str) -> "subprocess.Popen[str]":
        shell = environment(TMPDIR=str(folder / "tmp"))
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = command("-m", *ASKED, *arguments)
        return subprocess.Popen(started, cwd=folder, env=shell, preexec_fn=heed_interrupts, **pipes)

    return begin


def records_by_file(folder: Path) -> dict[str, dict[str, Any]]:
    """Every record by file name; each file must be whole."""
    return {file.name: json.loads(file.read_text()) for file in sorted((folder / "r").glob("*.json"))}


def by(key: str, folder: Path) -> dict[Any, dict[str, Any]]:
    """Every record by its batch or its system; there must be one of each."""
    cells = [(r["cell"]["conditions"] if key == "batch" else r["cell"], r) for r in records_by_file(folder).values()]
    named = [(c[key]["choice"] if key == "system" else c[key], r) for c, r in cells]
    assert len(dict(named)) == len(named)
    return dict(named)


def record_of(document: dict[str, Any]) -> Record:
    return from_json(document)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (folder / "r").iterdir()}


def made(folder: Path) -> int:
    """How many times the model was made since the log of it was last removed."""
    log = folder / "made"
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.slow
def test_a_sweep_is_compared_resumed_and_forced(sweep: Run, folder: Path) -> None:
    arguments = ["system=eager,cuda_graph,nimble", "rounds=3", "margin=true"]
    done = sweep(*arguments)
    assert done.returncode == 0, done.stderr
    first = by("system", folder)
    assert len(first["nimble"]["comparison"]["again"]) == 3 and "again" not in first["eager"]["comparison"]
    assert done.stdout.count("two processes of one system differ by") == 1
    assert [first[s]["status"] for s in ("eager", "cuda_graph", "nimble")] == ["ok", "unsupported", "ok"]
    assert "CUDA" in first["cuda_graph"]["reason"] and first["cuda_graph"]["reason"] in done.stdout
    assert not {"latency", "correctness", "comparison"} & set(first["cuda_graph"])
    eager, nimble = first["eager"]["comparison"], first["nimble"]["comparison"]
    assert eager["group"] == nimble["group"] and eager["cells"] == [first["eager"]["id"], first["nimble"]["id"]]
    assert [len(c["rounds"]) for c in (eager, nimble)] == [3, 3] and all(eager["rounds"]) and all(nimble["rounds"])
    assert len(first["eager"]["latency"]["host_ms"]) >= 5 and first["nimble"]["schedule"]["operators"] > 0
    ratio = speedup(record_of(first["nimble"]), record_of(first["eager"]))
    assert ratio is not None and f"{ratio.ratio:.2f}x" in done.stdout
    assert made(folder) == 4  # to check the factory, for each cell that runs here, and for the second process of one

    before = contents(folder)
    assert sweep("system=eager,sequential", "rounds=3").returncode == 0
    beside, times_made = contents(folder), made(folder)
    again = sweep(*arguments)  # whose ratio stands, though the other sweep had rounds of its own
    assert again.returncode == 0 and again.stderr.count("measured before") == 3
    assert contents(folder) == beside and made(folder) == times_made + 1 and f"{ratio.ratio:.2f}x" in again.stdout
    for name in set(beside) - set(before):
        (folder / "r" / name).unlink()

    forced = sweep("system=eager", "force=true")
    assert forced.returncode == 0, forced.stderr
    new = by("system", folder)
    assert list(records_by_file(folder)) == sorted(before) and new["eager"]["id"] == first["eager"]["id"]
    assert new["eager"]["when"] > first["eager"]["when"]
    assert new["eager"]["latency"]["host_ms"] != first["eager"]["latency"]["host_ms"]
    assert new["nimble"] == first["nimble"]
    assert speedup(record_of(new["nimble"]), record_of(new["eager"])) is None  # not measured in turn any more


@pytest.mark.slow
def test_cells_that_go_wrong_are_recorded_and_the_sweep_goes_on(sweep: Run, folder: Path) -> None:
    done = sweep("system=torchscript", "batch=2,3,4,5,1", "timeout=12")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    records_by_batch = by("batch", folder)
    assert {b: r["status"] for b, r in records_by_batch.items()} == {
        2: "failed",
        3: "failed",
        4: "timeout",
        5: "incorrect",
        1: "ok",
    }
    assert "SIGKILL" in records_by_batch[2]["reason"]
    assert "status 7" in records_by_batch[3]["reason"] and "the model's last words" in records_by_batch[3]["reason"]
    assert "12 s" in records_by_batch[4]["reason"] and "relative error" in records_by_batch[5]["reason"]
    assert records_by_batch[1]["reason"] is None and records_by_batch[1]["latency"]["host_ms"]
    for batch in (2, 3, 4, 5):
        assert records_by_batch[batch]["reason"] in done.stdout and "\n" not in records_by_batch[batch]["reason"]
        assert not {"latency", "throughput", "comparison"} & set(records_by_batch[batch])
    assert (
        not records_by_batch[5]["correctness"]["is_correct"] and records_by_batch[5]["correctness"]["relative_error"] > 0.01
    )
    hanging = [int(process) for process in (folder / "hanging").read_text().split()]
    assert len(hanging) == 2 and soon(lambda: not any(psutil.pid_exists(p) for p in hanging), within=5)
    assert living(folder) == []


@pytest.mark.slow
def test_a_cell_that_takes_too_much_host_memory_is_ended_with_all_that_it_started(sweep: Run, folder: Path) -> None:
    arguments = ["system=eager,torchscript", "batch=6,7", "rounds=1", "timeout=60"]
    done = sweep(*arguments, "memory_gib=1.2")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    records_by_cell = {
        (r["cell"]["conditions"]["batch"], r["cell"]["system"]["name"]): r for r in records_by_file(folder).values()
    }
    assert len(records_by_cell) == 4 and all(records_by_cell[batch, "eager"]["status"] == "ok" for batch in (6, 7))
    for batch in (6, 7):
        record = records_by_cell[batch, "torchscript"]
        assert (record["status"], record["memory_limit_gib"]) == ("out_of_memory", 1.2) and record["reason"] in done.stdout
        match = re.fullmatch(r"took more than memory_gib=1.2: (.*) GiB of host memory, .*, at: preparing", record["reason"])
        assert match and 1.2 <= float(match[1]) < 4  # told to 0.01 GiB
    assert made(folder) == 5  # once to check, and once a cell: what is parked has no share in it, and there is no second try
    assert gone([int(p) for p in (folder / "taking").read_text().split()], within=5) and living(folder) == []

    (folder / "enough").touch()
    done = sweep("system=torchscript", "batch=6")
    assert done.returncode == 0 and len(records_by_file(folder)) == 4, done.stderr
    assert sum(r["status"] == "ok" and "memory_limit_gib" not in r for r in records_by_file(folder).values()) == 3

    before = contents(folder)
    refused = sweep("system=eager", "batch=1", "memory_gib=0.001")  # too little to try the model's factory in
    assert refused.returncode == 2 and contents(folder) == before
    assert "out_of_memory: took more than memory_gib=0.001" in refused.stderr.splitlines()[-1]


def test_a_cell_whose_options_prove_wrong_costs_no_other_its_measurement(sweep: Run, folder: Path) -> None:
    done = sweep("system=eager,torchscript", "batch=8,1", "rounds=1")  # what is tried before is the last batch alone
    assert done.returncode == 2 and "Traceback" not in done.stderr
    reason = "factory zoo:make raised KeyError: 8"
    assert len(re.findall(rf"\w+ b8: refused \({reason}", done.stderr)) == 2
    *_, line = done.stderr.splitlines()
    assert line.startswith(f"opweave: 2 of 4 cells were refused, the first, custom (factory=zoo:make) eager b8: {reason}")
    records = records_by_file(folder).values()
    assert [r["cell"]["conditions"]["batch"] for r in records] == [1, 1] and all(r["comparison"] for r in records)
    assert done.stdout.count("ms") and "b8" not in done.stdout

    done = sweep("system=eager", "batch=8")
    *_, line = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith(f"opweave: {reason}") and not done.stdout


@pytest.mark.slow
def test_a_sweep_killed_at_any_moment_goes_on_where_it_stopped(sweep: Run, begin: Callable[..., Any], folder: Path) -> None:
    arguments = ["system=eager,torchscript", "rounds=10"]  # some 3 s of rounds

    def killed_when(moment: Callable[[], Any], wait: float = 0.0) -> dict[str, dict[str, Any]]:
        """Kill the same sweep once more, at `moment` and so many seconds; what it has left of records."""
        (folder / "made").unlink(missing_ok=True)
        process = begin(*arguments)
        reached = soon(lambda: moment() or process.poll() is not None)
        time.sleep(wait)
        assert reached and process.poll() is None, process.communicate()[1]
        process.kill()
        process.communicate()
        assert soon(lambda: not living(folder), within=5), living(folder)
        return records_by_file(folder)

    assert killed_when(lambda: len(living(folder)) > 1) == {}  # its first worker begins to live
    assert killed_when(lambda: made(folder) == 1) == {}  # the factory is checked
    assert killed_when(lambda: made(folder) == 2) == {}  # the first cell has its model
    one = killed_when(lambda: records_by_file(folder))
    assert [r["cell"]["system"]["name"] for r in one.values()] == ["eager"]
    two = killed_when(lambda: len(records_by_file(folder)) == 2, wait=0.5)
    assert len(two) == 2 and not any("comparison" in r for r in two.values())  # amid the rounds
    assert {name: two[name] for name in one} == one

    (folder / "made").unlink()
    done = sweep(*arguments)
    assert done.returncode == 0 and done.stderr.count("measured before") == 2, done.stderr
    finished = records_by_file(folder)
    own = {"comparison": None, "warnings": None}
    assert {n: r | own for n, r in finished.items()} == {n: r | own for n, r in two.items()}  # are kept
    assert len({r["comparison"]["group"] for r in finished.values()}) == 1
    assert all(len(r["comparison"]["rounds"]) == 10 for r in finished.values())
    assert made(folder) == 3  # to check, and once a cell for the rounds
    assert set(contents(folder)) == set(finished) and living(folder) == []


@pytest.mark.slow
def test_what_takes_a_profiler_comes_last_and_is_made_up_for(run: Run, folder: Path) -> None:
    arguments = ["-m", *ASKED[:4], "runner.samples=5", "max_load=1", "system=eager,nimble", "rounds=2"]
    assert run(*arguments, TMPDIR=str(folder / "tmp")).returncode == 0
    whole = records_by_file(folder)
    names = ("sm_efficiency", "kernels", "limits")
    for name, document in whole.items():  # what a sweep leaves that is killed between the rounds and the profiler
        assert document["limits"]["critical_path_ms"] > 0 and "pending" not in document
        assert document["sm_efficiency"]["when"] > document["comparison"]["when"]
        left = to_json(owing(record_of(document), names, NOT_YET))
        (folder / "r" / name).write_text(json.dumps(left))
    done = run(*arguments, TMPDIR=str(folder / "tmp"))
    assert done.returncode == 0 and done.stderr.count("measured before") == 2, done.stderr
    again = records_by_file(folder)
    measured = dict.fromkeys(names)
    assert {name: r | measured for name, r in again.items()} == {name: r | measured for name, r in whole.items()}
    assert all(r["limits"]["critical_path_ms"] > 0 and r["sm_efficiency"]["reason"] != NOT_YET for r in again.values())


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice at once"])
def test_an_interrupted_sweep_ends_at_once_and_leaves_nothing_running(
    begin: Callable[..., Any], folder: Path, times: int
) -> None:
    process = begin("system=eager", "batch=4")
    assert soon(lambda: (folder / "hanging").exists())
    for _ in range(times):
        process.send_signal(2)
        time.sleep(0.02)
    _, messages = process.communicate(timeout=15)
    assert process.returncode == 130 and "Traceback" not in messages and "goes on where" in messages.splitlines()[-1]
    assert soon(lambda: not living(folder), within=5), living(folder)
    assert records_by_file(folder) == {}


@pytest.mark.slow
def test_two_sweeps_at_once_lose_nothing_and_measure_nothing_twice(begin: Callable[..., Any], folder: Path) -> None:
    both = [begin("system=eager,torchscript", "rounds=2"), begin("system=torchscript,eager", "rounds=2")]
    outputs = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    records_by_system = by("system", folder)
    assert {s: r["status"] for s, r in records_by_system.items()} == {"eager": "ok", "torchscript": "ok"}
    assert sorted(err.count("measured before") for _, err in outputs) == [0, 2]
    assert made(folder) == 4  # a check of each sweep, and once a cell
    assert (
        speedup(record_of(records_by_system["torchscript"]), record_of(records_by_system["eager"])) is not None
        and len(contents(folder)) == 2
    )
    assert all("over eager" in out for out, _ in outputs)


@pytest.mark.slow
def test_what_is_no_record_is_named_and_an_edited_model_is_another_cell(sweep: Run, folder: Path) -> None:
    (folder / "r").mkdir()
    strange = {"truncated.json": '{"schema": 1, "id": "012', "foreign.json": '{"name": "package"}', "notes.txt": "mine"}
    for name, text in strange.items():
        (folder / "r" / name).write_text(text)

    def names() -> set[str]:
        return set(contents(folder)) - set(strange)

    def measured() -> None:
        done = sweep("system=eager")
        assert done.returncode == 0, done.stderr
        assert all(f"skipped {folder / 'r' / name}: " in done.stderr for name in ("truncated.json", "foreign.json"))
        assert {name: (folder / "r" / name).read_text() for name in strange} == strange

    measured()
    (first,) = names()
    (folder / "r" / first).write_text((folder / "r" / first).read_text()[:-100])  # as a full disk might have left it
    (folder / "zoo.py").write_text(MODEL.replace("tanh", "sigmoid"))
    measured()
    (second,) = names() - {first}
    with pytest.raises(ValueError):
        json.loads((folder / "r" / first).read_text())  # another cell's, and left as it was
    assert json.loads((folder / "r" / second).read_text())["status"] == "ok"
    (folder / "zoo.py").write_text(MODEL)
    os.utime(folder / "zoo.py", (0, 0))  # a digest, not a time, says which model it is
    measured()
    assert names() == {first, second} and json.loads((folder / "r" / first).read_text())["status"] == "ok"
