"""Sweeps with real processes: resumed, forced, killed, two at once, and with cells that go wrong."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Run, command, environment, gone

from results.comparison import speedup
from runners.cell.pending import AGAIN, NOT_YET, PROFILED
from runners.sweep.cell_process import CellProcess
from runners.sweep.sweep import GroupRun, Sweep

MODEL = '''
import os, signal, subprocess, sys, time
import torch
from torch import nn


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x).relu() + self.b(x).tanh()


class Killed(Branches):
    """Ends its process as the kernel does for want of memory, after some calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


class Exits(Branches):
    def forward(self, x):
        print("the model's last words", flush=True)
        os._exit(7)


class Hangs(Branches):
    """Never returns, and neither does what it starts."""

    def forward(self, x):
        child = subprocess.Popen(["sleep", "600"])
        with open("hanging", "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        time.sleep(600)


class Random(Branches):
    def forward(self, x):
        return super().forward(x) + torch.rand_like(x)


class Takes(Branches):
    """Takes 1.25 GiB when TorchScript traces it, unless a file says that it was given enough, and then waits for its end."""

    def forward(self, x):
        if torch.jit.is_tracing() and not os.path.exists("enough"):
            self.take()
            time.sleep(600)
        return super().forward(x)

    def take(self):
        self.taken = b"x" * (5 << 28)


class HasTaken(Takes):
    """Half of it by each of two processes, the second of which leads a session of its own."""

    def take(self):
        program = [sys.executable, "-c", "import time; x = b'x' * (5 << 27); time.sleep(600)"]
        children = [subprocess.Popen(program, start_new_session=own) for own in (False, True)]
        with open("taking", "w") as file:
            file.write(" ".join(str(child.pid) for child in children))


MODELS = {1: Branches, 2: Killed, 3: Exits, 4: Hangs, 5: Random, 6: Takes, 7: HasTaken}


def make(batch):
    with open("made", "a") as file:
        file.write(f"{os.getpid()}\\n")
    return MODELS[batch](), (torch.randn(batch, 8),)
'''
ASKED = ["model=custom", "model.factory=zoo:make", "device=cpu", "results=r", "runner=latency", "runner.samples=5"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with MODEL in zoo.py, whose sweeps wait for no other's turn on the CPU."""
    (tmp_path / "zoo.py").write_text(MODEL)
    (tmp_path / "tmp").mkdir()
    return tmp_path


@pytest.fixture
def sweep(run: Run, folder: Path) -> Run:
    """Runs a sweep over ASKED to its end."""
    return lambda *arguments: run("-m", *ASKED, *arguments, TMPDIR=str(folder / "tmp"))


def heed_interrupts() -> None:
    """Tests may have been started in the background, where a shell has its processes ignore an interrupt."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def begin(folder: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Starts a sweep over ASKED and goes on."""

    def begin(*arguments: str) -> "subprocess.Popen[str]":
        shell = environment(TMPDIR=str(folder / "tmp"))
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = command("-m", *ASKED, *arguments)
        return subprocess.Popen(started, cwd=folder, env=shell, preexec_fn=heed_interrupts, **pipes)

    return begin


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    """Every record by file name; each file must be whole."""
    return {file.name: json.loads(file.read_text()) for file in sorted((folder / "r").glob("*.json"))}


def by(key: str, folder: Path) -> dict[Any, dict[str, Any]]:
    """Every record by its batch or its system; there must be one of each."""
    found = [
        (r["config"][key]["name"] if isinstance(r["config"][key], dict) else r["config"][key], r)
        for r in kept(folder).values()
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (folder / "r").iterdir()}


def made(folder: Path) -> int:
    """How many times the model was made since the log of it was last removed."""
    log = folder / "made"
    return len(log.read_text().splitlines()) if log.exists() else 0


def living(folder: Path) -> list[str]:
    """The processes that work in `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def soon(condition: Callable[[], Any], within: float = 120.0) -> bool:
    """Does `condition` come true `within` so many seconds?"""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def test_a_sweep_is_compared_resumed_and_forced(sweep: Run, folder: Path) -> None:
    asked = ["system=eager,cuda_graph,nimble", "rounds=3"]
    done = sweep(*asked)
    assert done.returncode == 0, done.stderr
    first = by("system", folder)
    assert [first[s]["status"] for s in ("eager", "cuda_graph", "nimble")] == ["ok", "unsupported", "ok"]
    assert "CUDA" in first["cuda_graph"]["reason"] and first["cuda_graph"]["reason"] in done.stdout
    assert not {"latency", "correctness"} & set(first["cuda_graph"]) and first["cuda_graph"]["comparison"] is None
    eager, nimble = first["eager"]["comparison"], first["nimble"]["comparison"]
    assert eager["group"] == nimble["group"] and eager["cells"] == [first["eager"]["id"], first["nimble"]["id"]]
    assert [len(c["rounds"]) for c in (eager, nimble)] == [3, 3] and all(eager["rounds"]) and all(nimble["rounds"])
    assert len(first["eager"]["latency"]["host_ms"]) >= 5 and first["nimble"]["schedule"]["operators"] > 0
    ratio = speedup(first["nimble"], first["eager"])
    assert ratio is not None and f"{ratio.ratio:.2f}x" in done.stdout
    assert made(folder) == 3  # once to check the factory, once a cell that runs here

    before = contents(folder)
    again = sweep(*asked)
    assert again.returncode == 0 and again.stderr.count("measured before") == 3
    assert contents(folder) == before and made(folder) == 4 and f"{ratio.ratio:.2f}x" in again.stdout

    forced = sweep("system=eager", "force=true")
    assert forced.returncode == 0, forced.stderr
    new = by("system", folder)
    assert list(kept(folder)) == sorted(before) and new["eager"]["id"] == first["eager"]["id"]
    assert new["eager"]["when"] > first["eager"]["when"]
    assert new["eager"]["latency"]["host_ms"] != first["eager"]["latency"]["host_ms"]
    assert new["nimble"] == first["nimble"] and speedup(new["nimble"], new["eager"]) is None  # not measured in turn any more


def test_cells_that_go_wrong_are_recorded_and_the_sweep_goes_on(sweep: Run, folder: Path) -> None:
    done = sweep("system=torchscript", "batch=2,3,4,5,1", "timeout=12")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    found = by("batch", folder)
    assert {b: r["status"] for b, r in found.items()} == {2: "failed", 3: "failed", 4: "timeout", 5: "incorrect", 1: "ok"}
    assert "SIGKILL" in found[2]["reason"]
    assert "status 7" in found[3]["reason"] and "the model's last words" in found[3]["reason"]
    assert "12 s" in found[4]["reason"] and "relative error" in found[5]["reason"]
    assert found[1]["reason"] is None and found[1]["latency"]["host_ms"]
    for batch in (2, 3, 4, 5):
        assert found[batch]["reason"] in done.stdout and "\n" not in found[batch]["reason"]
        assert "latency" not in found[batch] and "throughput" not in found[batch] and found[batch]["comparison"] is None
    assert not found[5]["correctness"]["correct"] and found[5]["correctness"]["relative_error"] > 0.01
    hanging = [int(process) for process in (folder / "hanging").read_text().split()]
    assert len(hanging) == 2 and soon(lambda: not any(psutil.pid_exists(p) for p in hanging), within=5)
    assert living(folder) == []


def test_a_cell_that_takes_too_much_host_memory_is_ended_with_all_that_it_started(sweep: Run, folder: Path) -> None:
    asked = ["system=eager,torchscript", "batch=6,7", "rounds=1", "timeout=60"]
    done = sweep(*asked, "memory_gib=1.2")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    found = {(r["config"]["batch"], r["config"]["system"]["name"]): r for r in kept(folder).values()}
    assert len(found) == 4 and all(found[batch, "eager"]["status"] == "ok" for batch in (6, 7))
    for batch in (6, 7):
        record = found[batch, "torchscript"]
        assert (record["status"], record["memory_gib"]) == ("out_of_memory", 1.2) and record["reason"] in done.stdout
        told = re.fullmatch(r"took more than memory_gib=1.2: (.*) GiB of host memory, .*, at: preparing", record["reason"])
        assert told and 1.2 <= float(told[1]) < 4  # told to 0.01 GiB
    assert made(folder) == 5  # once to check, and once a cell: what is parked has no share in it, and there is no second try
    assert gone([int(p) for p in (folder / "taking").read_text().split()], within=5) and living(folder) == []

    (folder / "enough").touch()
    done = sweep("system=torchscript", "batch=6")
    assert done.returncode == 0 and len(kept(folder)) == 4, done.stderr
    assert sum(r["status"] == "ok" and "memory_gib" not in r for r in kept(folder).values()) == 3

    before = contents(folder)
    refused = sweep("system=eager", "batch=1", "memory_gib=0.001")  # too little to try the model's factory in
    assert refused.returncode == 2 and contents(folder) == before
    assert "out_of_memory: took more than memory_gib=0.001" in refused.stderr.splitlines()[-1]


def test_a_sweep_killed_at_any_moment_goes_on_where_it_stopped(sweep: Run, begin: Callable[..., Any], folder: Path) -> None:
    asked = ["system=eager,torchscript", "rounds=10"]  # some 3 s of rounds

    def killed_when(moment: Callable[[], Any], wait: float = 0.0) -> dict[str, dict[str, Any]]:
        """Kill the same sweep once more, at `moment` and so many seconds; what it has left of records."""
        (folder / "made").unlink(missing_ok=True)
        process = begin(*asked)
        reached = soon(lambda: moment() or process.poll() is not None)
        time.sleep(wait)
        assert reached and process.poll() is None, process.communicate()[1]
        process.kill()
        process.communicate()
        assert soon(lambda: not living(folder), within=5), living(folder)
        return kept(folder)

    assert killed_when(lambda: len(living(folder)) > 1) == {}  # its first worker begins to live
    assert killed_when(lambda: made(folder) == 1) == {}  # the factory is checked
    assert killed_when(lambda: made(folder) == 2) == {}  # the first cell has its model
    one = killed_when(lambda: kept(folder))
    assert [r["config"]["system"]["name"] for r in one.values()] == ["eager"]
    two = killed_when(lambda: len(kept(folder)) == 2, wait=0.5)
    assert len(two) == 2 and [r["comparison"] for r in two.values()] == [None, None]  # amid the rounds
    assert {name: two[name] for name in one} == one

    (folder / "made").unlink()
    done = sweep(*asked)
    assert done.returncode == 0 and done.stderr.count("measured before") == 2, done.stderr
    finished = kept(folder)
    own = {"comparison": None, "warnings": None}
    assert {name: r | own for name, r in finished.items()} == {name: r | own for name, r in two.items()}  # are kept
    assert len({r["comparison"]["group"] for r in finished.values()}) == 1
    assert all(len(r["comparison"]["rounds"]) == 10 for r in finished.values())
    assert made(folder) == 3  # to check, and once a cell for the rounds
    assert set(contents(folder)) == set(finished) and living(folder) == []


@pytest.mark.slow
def test_what_takes_a_profiler_comes_last_and_is_made_up_for(run: Run, folder: Path) -> None:
    asked = ["-m", *ASKED[:4], "runner.samples=5", "system=eager,nimble", "rounds=2"]
    assert run(*asked, TMPDIR=str(folder / "tmp")).returncode == 0
    whole = kept(folder)
    for record in whole.values():
        assert record["limits"]["critical_path_ms"] > 0
        assert record["sm_efficiency"]["when"] > record["comparison"]["when"]
    waiting = {name: PROFILED[name] for name in ("sm_efficiency", "kernels", "limits")}
    for name, record in whole.items():  # what a sweep leaves that is killed between the rounds and the profiler
        (folder / "r" / name).write_text(json.dumps(record | waiting))
    done = run(*asked, TMPDIR=str(folder / "tmp"))
    assert done.returncode == 0 and done.stderr.count("measured before") == 2, done.stderr
    again = kept(folder)
    profiled = dict.fromkeys(waiting)
    assert {name: r | profiled for name, r in again.items()} == {name: r | profiled for name, r in whole.items()}
    assert all(r["limits"]["critical_path_ms"] > 0 and r["sm_efficiency"]["reason"] != NOT_YET for r in again.values())


@pytest.fixture
def overheard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, str, int]]:
    """What processes are told, where cores enough are idle, as beside a GPU: process, command, system, batch."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))
    monkeypatch.setattr(GroupRun, "_cores_are_idle", lambda _: True)
    told: list[tuple[int, str, str, int]] = []
    tell = CellProcess.tell

    def listen(self: CellProcess, command: dict[str, Any]) -> bool:
        if "system" in command.get("cell", ()):
            told.append((self.process.pid, command["do"], command["cell"]["system"]["name"], command["cell"]["batch"]))
        return tell(self, command)

    monkeypatch.setattr(CellProcess, "tell", listen)
    return told


def cells(batches: Sequence[int], systems: Sequence[str]) -> list[dict[str, Any]]:
    cell = {"model": {"name": "custom", "factory": "zoo:make"}, "runner": {"name": "latency", "samples": 5}, "seed": 0}
    cell |= {"device": "cpu", "precision": "fp32", "layout": "contiguous"}
    return [cell | {"system": {"name": system}, "batch": batch} for batch in batches for system in systems]


@pytest.mark.slow
def test_what_the_next_cell_needs_is_made_ahead_of_it(overheard: list[tuple[int, str, str, int]]) -> None:
    """Also from one group to the next, and nothing is left running."""
    asked = cells((1, 5), ("eager", "torchscript"))
    assert (
        Sweep(asked, results="r", force=False, timeout=60, memory_gib=None, rounds=1, gpus=[0]).run() == 1
    )  # the second model is random
    order = [("eager", 1), ("torchscript", 1), ("eager", 5), ("torchscript", 5)]
    told = {do: [(system, batch) for _, what, system, batch in overheard if what == do] for do in ("ahead", "measure")}
    assert told == {"ahead": order[1:], "measure": order}
    of = {(do, system, batch): pid for pid, do, system, batch in overheard}
    assert all(of["ahead", *c] == of["measure", *c] for c in order[1:])
    assert soon(lambda: not any(psutil.pid_exists(pid) for pid in of.values()))


@pytest.mark.slow
def test_a_cell_that_is_measured_in_a_second_process_takes_the_one_that_has_imported(
    overheard: list[tuple[int, str, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = CellProcess.ask

    def profiled_once(self: CellProcess, command: dict[str, Any], *rest: Any) -> dict[str, Any]:
        """Stands for a system whose preparation takes a profiler on a GPU."""
        answer = ask(self, command, *rest)
        if command["do"] == "measure" and command["cell"]["system"]["name"] == "eager" and not command["again"]:
            return {"record": {"status": AGAIN, "preparation_s": 1000.0}}
        return answer

    monkeypatch.setattr(CellProcess, "ask", profiled_once)
    sweep = Sweep(
        cells((1,), ("eager", "torchscript")), results="r", force=False, timeout=60, memory_gib=None, rounds=1, gpus=[0]
    )
    assert sweep.run() == 0
    (first, second), imported = (
        [pid for pid, do, system, _ in overheard if (do, system) == asked]
        for asked in (("measure", "eager"), ("ahead", "torchscript"))
    )
    assert first != second == imported[0] and len(imported) == 2
    assert [pid for pid, do, system, _ in overheard if (do, system) == ("measure", "torchscript")] == imported[1:]
    prepared = {r["config"]["system"]["name"]: r["preparation_s"] for r in sweep.store.read().records.values()}
    assert prepared["eager"] > 1000 > prepared["torchscript"]


def test_an_interrupted_sweep_ends_at_once_and_leaves_nothing_running(begin: Callable[..., Any], folder: Path) -> None:
    process = begin("system=eager", "batch=4")
    assert soon(lambda: (folder / "hanging").exists())
    process.send_signal(2)
    _, told = process.communicate(timeout=15)
    assert process.returncode == 130 and "Traceback" not in told and "goes on where" in told.splitlines()[-1]
    assert soon(lambda: not living(folder), within=5), living(folder)
    assert kept(folder) == {}


def test_two_sweeps_at_once_lose_nothing_and_measure_nothing_twice(begin: Callable[..., Any], folder: Path) -> None:
    both = [begin("system=eager,torchscript", "rounds=2"), begin("system=torchscript,eager", "rounds=2")]
    told = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    found = by("system", folder)
    assert {s: r["status"] for s, r in found.items()} == {"eager": "ok", "torchscript": "ok"}
    assert sorted(err.count("measured before") for _, err in told) == [0, 2]
    assert made(folder) == 4  # a check of each sweep, and once a cell
    assert speedup(found["torchscript"], found["eager"]) is not None and len(contents(folder)) == 2
    assert all("over eager" in out for out, _ in told)


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
