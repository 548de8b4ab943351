"""Weave as a system: what it prepares, its plan files, what a killed search leaves, and wrong options."""

import json
import logging
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run, command, environment
from torch import Tensor, nn
from weave_space import Branches, Space

import models
import systems
from results.cell import Cell, Conditions, choose
from results.schedule_file import ScheduleFile
from runners.showings.registry import showings
from systems.base import BadOption
from systems.profiling.measurements import Measurements
from systems.profiling.timing import Timer
from systems.scheduling import scheduler
from systems.scheduling.execution.arena import Arena
from systems.scheduling.execution.execute import execute
from systems.scheduling.execution.scheduled import Scheduled
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.passes import fuse_in_triton
from systems.scheduling.passes.layouts import Unsolvable
from systems.scheduling.passes.rewriting import Rewriting
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.scheduler import Scheduler
from systems.weave import search
from systems.weave.candidate import Candidate
from systems.weave.search import Search
from systems.weave.stream_plans import SEARCHED, STREAM_PLANS
from systems.weave.system import Weave


@pytest.mark.usefixtures("cache_folder")
def test_it_prepares_a_module_and_searches_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    module, x = Branches().eval(), torch.randn(2, 4, 8, 8)
    system = systems.load("weave", budget_s=120.0)
    with caplog.at_level(logging.INFO, "opweave"):
        system.learn(module, (x,))
    assert any("of 120 s, 0 gains" in message for message in caplog.messages)
    assert system.state.is_complete and set(system.state.ratios) >= {
        Candidate(name).key for name in STREAM_PLANS if name != "nimble" and name not in SEARCHED
    }
    last = (replace(system.state.best, stream_plan=name).key for name in SEARCHED)
    assert not system.state.ratios.keys() & set(last)  # nothing is simulated for a CPU
    again = systems.load("weave", budget_s=120.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "_try", lambda *_: pytest.fail("it was measured before"))
        prepared = again.prepare(module, (x,))
    with torch.no_grad():
        torch.testing.assert_close(prepared(x), module(x), rtol=1e-4, atol=1e-5)
    assert prepared.schedule.system == "weave" and prepared.schedule.search.measured == len(system.state.ratios)
    prepared.close()


@pytest.mark.slow
@pytest.mark.usefixtures("cache_folder")
def test_it_begins_with_nimbles_plan_and_leaves_it_for_a_faster_one_alone() -> None:
    """Of a real network; faster by the search's own measurements."""
    model = models.load("squeezenet", 1)
    weave, nimble = systems.load("weave", budget_s=8.0), systems.load("nimble_fused")
    assert isinstance(weave, Weave) and isinstance(nimble, Scheduler)
    nimble.learn(model.module, model.inputs)  # measures what both know then, outside of the budget
    weave.learn(model.module, model.inputs)
    state, program = weave.state, capture(model.module, model.inputs)
    assert state.first is not None and state.ratios
    rewritten, _ = weave.rewriting.apply(program, Timer(program.device), dict(state.first.choices))
    first, others = state.first.schedule(rewritten), nimble.schedule(model.module, model.inputs)
    assert (first.graph, first.order, first.streams, first.waits) == (
        others.graph,
        others.order,
        others.streams,
        others.waits,
    )
    if state.chosen != state.first:
        assert state.total is not None and state.total.after_ms < state.total.before_ms
        assert all(gain.after_ms < search.MARGIN * gain.before_ms for gain in state.gains)


def test_what_another_process_found_meanwhile_is_not_searched_again(
    monkeypatch: pytest.MonkeyPatch, cache_folder: Path, tmp_path: Path
) -> None:
    """The other one's file comes when this one has read none, and holds the search alone."""
    module, x = Branches().eval(), torch.randn(2, 4, 8, 8)
    first = systems.load("weave", budget_s=20.0)
    first.learn(module, (x,))
    (found,) = cache_folder.glob("weave-cpu-*.json")
    monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path))
    alone = Measurements.alone

    @contextmanager
    def after_the_other(cache: Measurements, name: str, report: Callable[[str], None]) -> Iterator[None]:
        assert not cache.measured
        shutil.copy(found, tmp_path / found.name)
        with alone(cache, name, report):
            yield

    monkeypatch.setattr(Measurements, "alone", after_the_other)
    monkeypatch.setattr(Search, "_try", lambda *_: pytest.fail("it was measured before"))
    second = systems.load("weave", budget_s=20.0)
    second.learn(module, (x,))
    assert second.state == first.state


@pytest.fixture
def plan_file(folder: Path, run: Run) -> Path:
    """A plan for a model of TINY, by the command line."""
    done = run(
        "runner=schedule",
        "model=custom",
        "model.factory=tiny:make",
        "system=weave",
        "system.budget_s=0",
        "device=cpu",
        "output=plan.json",
    )
    assert done.returncode == 0, done.stderr
    return folder / "plan.json"


@pytest.mark.slow
def test_a_plan_says_what_bounds_it(plan_file: Path) -> None:
    limits = ScheduleFile.read(plan_file).limits
    assert limits is not None and limits.critical_path_ms and limits.busy_ms and limits.source == "host"
    assert limits.operators == len(ScheduleFile.read(plan_file).operators)
    assert limits.critical_path_ms <= limits.busy_ms


def test_a_plan_that_is_only_written_may_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process does nothing else: so local search and IOS's stages are tried there too."""
    seen: list[bool] = []

    def scheduled(system: Weave, module: nn.Module, inputs: tuple[Tensor, ...]) -> Schedule:
        seen.append(system.is_learning)
        return systems.load("nimble").schedule(module, inputs)

    monkeypatch.setattr(Weave, "schedule", scheduled)
    runner = choose("runner", "schedule")
    cell = Cell(choose("model", "squeezenet"), choose("system", "weave", budget_s=0.0), runner, Conditions(1, "cpu"))
    showings()["schedule"](runner).show(cell, "cpu", lambda words: None)
    assert seen == [True]


ASKED = (
    "model=custom",
    "model.factory=tiny:make",
    "device=cpu",
    "runner=latency",
    "runner.samples=3",
    "rounds=0",
    "results=r",
)


@pytest.mark.slow
def test_a_plan_is_executed_without_a_search_and_refused_where_it_does_not_fit(
    plan_file: Path, folder: Path, run: Run, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # as the command line has it here
    planned = json.loads(plan_file.read_text())
    assert planned["system"] == "weave" and planned["recipe"]["times"] and "structure" in planned["recipe"]["fingerprint"]
    prepared = _prepared_tiny(folder, plan_file)  # in a cache that knows nothing
    assert prepared.schedule.streams == Schedule.from_json(planned).streams
    assert not list(cache_folder.glob("times-*.json"))
    wrong = {
        "times": (lambda d: d["recipe"].update(times={}), "times lacks"),
        "torch": (lambda d: d["recipe"]["fingerprint"].update(torch="0.1"), "torch is '0.1' in the plan"),
        "structure": (lambda d: d["recipe"]["fingerprint"].update(structure="x"), "structure is 'x'"),
        "edges": (lambda d: d["edges"].pop(), "other operators here"),
        "recipe": (lambda d: d.pop("recipe"), "is no plan of weave"),
        "other": (lambda d: d.update(system="nimble", recipe=None), "is no plan of weave: it is a schedule of nimble"),
        "choices": (lambda d: d["recipe"].update(choices=[]), "is no plan of weave: choices is no mapping"),
        "choice": (lambda d: d["recipe"].update(choices={"guess 0": "x"}), "is no plan of weave: choices has 'guess 0'"),
        "switches": (lambda d: d["recipe"].update(switches=["guess"]), "is no plan of weave: switches has 'guess'"),
        "binaries": (lambda d: d["recipe"].update(binaries=[["x"]]), "is no plan of weave: binaries"),
        **{
            f"time_{t}": (lambda d, t=t: d["recipe"]["times"].update(x=t), f"is no plan of weave: times has {t}")
            for t in (nan, inf, -1.0, True)
        },
        "early_text": (lambda d: d.update(early=["x"]), "is no plan of weave: early is"),
        "early_outside": (lambda d: d.update(early=[99]), "is no plan of weave: an early launch of 99"),
        "early": (lambda d: d.update(early=[0]), "does not fit: cpu launches no kernel early"),
        "merges_number": (lambda d: d.update(merges=3), "is no plan of weave: merges is"),
        "merges_outside": (lambda d: d.update(merges=[[0, 99]]), "is no plan of weave: a merge of 99"),
        "merges": (lambda d: d.update(merges=[[0]]), "does not fit: operators? .* merged"),
        "stream_text": (lambda d: d["operators"][0].update(stream="x"), "is no plan of weave: operators is"),
        "stream": (lambda d: d["operators"][0].update(stream=9), "is no plan of weave: the streams are not numbered"),
        "position": (
            lambda d: d["operators"][1].update(position=0),
            "is no plan of weave: operators is .*two operators have one position",
        ),
        "wait_text": (lambda d: d["waits"].append(["x", 1]), "is no plan of weave: waits is"),
        "wait": (lambda d: d["waits"].append([1, 0]), "is no plan of weave: operator .* waits for"),
    }
    for name, (change, message) in wrong.items():
        document = json.loads(json.dumps(planned))
        change(document)
        (folder / f"{name}.json").write_text(json.dumps(document))
        with pytest.raises(BadOption, match=f"system.plan=.*{name}.json .*{message}"):
            _prepared_tiny(folder, folder / f"{name}.json")
    (folder / "empty.json").touch()
    with pytest.raises(BadOption, match=r"system.plan=.*empty.json is no plan of weave: no JSON: "):
        _prepared_tiny(folder, folder / "empty.json")
    done = run(*ASKED, "batch=3", "system=weave", "system.plan=plan.json")
    assert done.returncode == 2 and "system.plan=plan.json does not fit: inputs is" in done.stderr
    assert len([line for line in done.stderr.splitlines() if not line.startswith("[")]) == 1  # the rest is progress
    done = run(*ASKED, "system=weave", "system.plan=merges.json")
    assert done.returncode == 2 and "system.plan=merges.json does not fit: operator" in done.stderr


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (Unsolvable("too long"), BadOption, "plan.json does not fit: too long$"),
        (ValueError("a fault"), ValueError, "^a fault$"),
    ],
)
def test_a_fault_of_a_pass_is_no_misfit_of_a_plan(
    error: ValueError, kind: type[Exception], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = systems.load("weave", budget_s=0.0).schedule(*_tiny(folder))
    (folder / "plan.json").write_text(json.dumps(schedule.to_json(model="custom", batch=1, device="cpu")))
    _prepared_tiny(folder, folder / "plan.json").close()

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(Rewriting, "apply", fails)
    with pytest.raises(kind, match=message):
        _prepared_tiny(folder, folder / "plan.json")


def test_a_plan_holds_the_captured_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_folder: Path) -> None:
    """Nothing is traced where the module is the plan's, and everything where it may not be."""
    module, x = Factor().eval(), torch.randn(2, 3)
    file = tmp_path / "plan.json"
    schedule = systems.load("weave", budget_s=0.0).schedule(module, (x,))
    file.write_text(json.dumps(schedule.to_json(model="factor", batch=2, device="cpu")))
    traced: list[nn.Module] = []
    capture_anew = scheduler.capture
    monkeypatch.setattr(scheduler, "capture", lambda module, inputs: traced.append(module) or capture_anew(module, inputs))

    def prepared(module: nn.Module) -> Tensor:
        made = systems.load("weave", plan=str(file)).prepare(module, (x,))
        out = made(x).clone()
        made.close()
        return out

    other = Factor().eval()
    with torch.no_grad():
        torch.testing.assert_close(prepared(other), other(x))  # other weights
        assert traced == []
        # Nobody who reads the module knows this variable.
        monkeypatch.setattr(Factor, "factor", 1.001)
        with pytest.raises(BadOption, match="structure is"):
            prepared(other)
        assert traced == [other]
        monkeypatch.undo()
    traced.clear()
    text = file.read_text()
    for place, damage in (1, "aten.nothing.default"), (2, {"tuple": [1]}), (2, {"tuple": [{"input": 0}] * 3}):
        document = json.loads(text)
        document["recipe"]["captured"]["calls"][0][place] = damage
        file.write_text(json.dumps(document))
        with pytest.raises(BadOption, match="does not fit: captured is no program"):
            prepared(other)
    document = json.loads(text)
    code = f"[open({str(tmp_path / 'run')!r}, 'w'), 0][1]"  # what stands in a file never runs as Python
    for place, damage in (2, {"tuple": [{"input": code}]}), (3, {"dict": {f"weight={code}, bias": None}}):
        document["recipe"]["captured"]["calls"] = json.loads(text)["recipe"]["captured"]["calls"]
        document["recipe"]["captured"]["calls"][0][place] = damage
        file.write_text(json.dumps(document))
        with pytest.raises(BadOption, match=r"captured is no program: .* is no n"):
            prepared(other)
    assert not (tmp_path / "run").exists()
    document = json.loads(text)
    document["recipe"]["captured"]["outputs"] = [3]
    file.write_text(json.dumps(document))
    torch.testing.assert_close(prepared(other), other(x).detach())


@pytest.mark.parametrize("learns", [True, False])
def test_a_search_profiles_in_no_process_but_one_that_learns(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler slows each later launch of a graph: whoever prepares in his own process pays for none."""
    system = systems.load("weave", budget_s=0.0)
    may_profile: list[bool] = []

    def rewritten(program: Program) -> None:
        may_profile.extend(system.may_profile(torch.device(device)) for device in ("cuda", "cpu"))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU that conf/gpu lacks")
        may_profile.append(system.may_profile(torch.device("cuda")))
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")

    monkeypatch.setattr(system, "_rewritten", rewritten)
    with pytest.raises(KeyboardInterrupt):
        (system.learn if learns else system.prepare)(Branches().eval(), (torch.randn(1, 4, 6, 6),))
    assert may_profile == [learns, False, False] and not system.may_profile(torch.device("cuda"))
    space = Space(1)
    for last_plans in (SEARCHED, {}):
        searching, _ = space.searching(monkeypatch)
        searching.last_plans = last_plans
        space.prepared.clear()
        assert searching.run().is_complete
        assert any(each.candidate.stream_plan in SEARCHED for each in space.prepared) == bool(last_plans)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
        ),
    ],
)
@pytest.mark.usefixtures("cache_folder")
@pytest.mark.slow
def test_candidates_of_a_search_lie_in_the_same_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is made with the same arena; on a GPU it has one range, whose address all have."""
    made: list[Scheduled] = []
    arenas: set[Arena] = set()

    def noting(program: Program, schedule: Schedule, arena: Arena) -> Scheduled:
        arenas.add(arena)
        made.append(execute(program, schedule, arena))
        return made[-1]

    monkeypatch.setattr(search, "execute", noting)
    module, x = Branches().eval().to(device), torch.randn(1, 4, 8, 8, device=device)
    systems.load("weave", budget_s=25.0).prepare(module, (x,)).close()
    (arena,) = arenas
    assert len(made) > 3 and len(arena.ranges) == (1 if device == "cuda" else 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("cache_folder")
def test_a_plan_brings_its_kernels_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton's cache is another one where the plan is executed: no kernel of ours was compiled, and none lies there."""

    def one_of_ours(times: Mapping[str, float | None], is_kernel_saved: bool) -> str:
        return next(name for name, t in times.items() if t is not None and name != "separate")

    monkeypatch.setattr(fuse_in_triton, "_own_choice", one_of_ours)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    module, x = Branches().eval().cuda(), torch.randn(1, 4, 8, 8, device="cuda")
    schedule = systems.load("weave", budget_s=0.0).schedule(module, (x,))
    binaries = schedule.recipe["binaries"] if schedule.recipe else None
    assert isinstance(binaries, list) and binaries
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(schedule.to_json(model="branches", batch=1, device="cuda")))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "second"))
    prepared = systems.load("weave", plan=str(file)).prepare(module, (x,))
    assert not list((tmp_path / "second").rglob("_[a-z]*"))
    with torch.no_grad():
        torch.testing.assert_close(prepared(x), module(x), rtol=1e-2, atol=1e-2)
    prepared.close()


class Factor(nn.Module):
    """A layer and a number that is no part of it."""

    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * self.factor  # type: ignore[no-any-return]


def _tiny(folder: Path) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model of TINY."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("tiny_of_weave", folder / "tiny.py")
    assert spec and spec.loader
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    torch.manual_seed(0)
    module, inputs = tiny.make(1)[:2]
    return module.eval(), inputs


def _prepared_tiny(folder: Path, file: Path) -> Any:
    return systems.load("weave", plan=str(file)).prepare(*_tiny(folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_s": -1.0}, "budget_s is -1"),
        ({"plan": "nowhere.json"}, "cannot be read"),
        ({"fuse_in_triton": 2}, "fuse_in_triton"),
    ],
)
def test_wrong_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(BadOption, match=message):
        systems.load("weave", **options)


@pytest.mark.slow
def test_a_search_that_is_killed_loses_nothing_that_was_measured(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    command_line = command(
        "runner=schedule", "model=squeezenet", "system=weave", "system.budget_s=300", "device=cpu", "output=plan.json"
    )
    with subprocess.Popen(
        command_line,
        cwd=folder,
        env=environment(OPWEAVE_CACHE=str(cache)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            state = _await_state(cache, 3)
        finally:
            process.send_signal(signal.SIGKILL)
    assert state is not None and not (folder / "plan.json").exists()
    done = subprocess.run(
        [*command_line[:-2], "device=cpu", "output=plan.json", "system.budget_s=0"],
        cwd=folder,
        env=environment(OPWEAVE_CACHE=str(cache)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    planned = json.loads((folder / "plan.json").read_text())
    assert planned["search"]["measured"] >= len(state["ratios"]) >= 3


def _await_state(cache: Path, least: int) -> dict | None:
    end = time.monotonic() + 200
    while time.monotonic() < end:
        for file in cache.glob("weave-*.json"):
            for entry in json.loads(file.read_text())["measured"].values():
                if len(entry["ratios"]) >= least:
                    return entry  # type: ignore[no-any-return]
        time.sleep(0.1)
    return None
