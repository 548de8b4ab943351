"""Weave as a system: what it prepares, what a killed search leaves, and wrong options."""

import json
import logging
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import command, environment
from weave_space import Branches, Space

import models
import systems
from systems.base import BadOption
from systems.profiling.measurements import Measurements
from systems.profiling.timing import Timer
from systems.scheduling.execution.arena import Arena
from systems.scheduling.execution.execute import execute
from systems.scheduling.execution.scheduled import Scheduled
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
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
