"""TVM's tuning: what a log is worth, what is measured, which candidate is used, and that a kill loses one batch at most."""

import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from test_tvm import agree
from torch import nn

from systems.base import Compilation
from systems.cache import Cache
from systems.compilers.exported import Exported
from systems.notice import Notice
from systems.tvm import build as tvm_build
from systems.tvm import measuring as tvm_measuring
from systems.tvm import tuning as tvm_tuning
from systems.tvm.system import Tvm
from systems.tvm.tuning import EMPTY, RECORDS, SPENT, Function, TuningLog

pytestmark = pytest.mark.usefixtures("cache_folder")


class TestLog:
    """A log as TVM writes it, of lines that only TVM reads."""

    @staticmethod
    def log(folder: Path, batches: list[tuple[int, float]]) -> TuningLog:
        log = TuningLog(folder)
        for trials, seconds in batches:
            with (folder / RECORDS).open("ab") as file:
                file.writelines(b'["trial %d"]\n' % (log.trials + i) for i in range(trials))
            log.spend(seconds)
        return log

    def test_trials_and_seconds_add_up(self, tmp_path: Path) -> None:
        log = self.log(tmp_path, [(4, 10.0), (4, 20.0)])
        assert (log.trials, log.seconds) == (8, 30.0)
        assert (TuningLog(tmp_path).trials, TuningLog(tmp_path).seconds) == (8, 30.0)

    @pytest.mark.parametrize(
        ("trials", "budget", "usable", "seconds"),
        [
            (8, 100, 8, 30.0),
            (99, 100, 8, 30.0),
            (4, 100, 4, 10.0),
            (8, 10, 4, 10.0),
            (8, 11, 8, 30.0),
            (8, 0, 0, 0.0),
            (0, 100, 0, 0.0),
        ],
    )
    def test_a_smaller_budget_sees_what_it_would_have_measured(
        self, trials: int, budget: float, usable: int, seconds: float, tmp_path: Path
    ) -> None:
        log_part = self.log(tmp_path, [(4, 10.0), (4, 20.0)]).within(trials, budget)
        assert (len(log_part.records), log_part.seconds) == (usable, seconds)

    def test_a_torn_line_is_cut_off(self, tmp_path: Path) -> None:
        self.log(tmp_path, [(2, 1.0)])
        with (tmp_path / RECORDS).open("ab") as file:
            file.write(b'["half a')
        assert TuningLog(tmp_path).trials == 2
        assert (tmp_path / RECORDS).read_bytes().endswith(b'["trial 1"]\n')


@pytest.mark.slow
def test_a_candidate_is_timed_once_all_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On cores that are not busy compiling the next."""
    import tvm

    exported = Exported(nn.Linear(4, 4).eval(), (torch.ones(2, 4),))
    target = tvm_build.target_for(exported.device)
    tvm_build.register_intrinsics()
    functions = tvm_build.lowered(exported, target).functions.values()
    function = next(f for f in functions if isinstance(f, tvm.tirx.PrimFunc))
    alone = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    module = tvm_build.default_schedule(alone, target)
    measuring = tvm_measuring.Measuring(target, tmp_path, 1)
    pool, runner, done = measuring.pool, measuring.runner, []

    def building(build: Any, modules: list[Any]) -> Any:
        for result in pool.map_with_error_catching(build, modules):
            done.append("built")
            yield result

    def timing(inputs: list[Any]) -> Any:
        done.append("timed")
        return runner.run(inputs)

    monkeypatch.setattr(measuring, "pool", SimpleNamespace(map_with_error_catching=building, shutdown=pool.shutdown))
    monkeypatch.setattr(measuring, "runner", SimpleNamespace(run=timing, pool=runner.pool))
    results = measuring([module] * 3)
    measuring.close()
    assert done == ["built"] * 3 + ["timed"] * 3 and all(0 < r.run_secs[0] < 1 for r in results)


PROCESS = """
import sys
from test_tvm_tuning import tuned
tuned(int(sys.argv[1]), lambda phase: print(phase, flush=True))
"""


def tuned(trials: int, report: Any = lambda phase: None) -> Compilation:
    """What tuning a small model says of itself, once it agrees with eager."""
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).eval(), torch.ones(2, 16)
    system = Tvm(trials, budget_s=300.0)
    system.report = report
    prepared = system.prepare(module, (x,))
    agree(prepared, module, [(x,), (x * 2,)])
    assert prepared.compilation is not None
    return prepared.compilation


@pytest.mark.slow
def test_tuning_goes_on_after_a_kill() -> None:
    """SIGKILL in the midst; then what is missing is measured and nothing twice, and after that nothing."""
    killed = subprocess.Popen(
        [sys.executable, "-c", PROCESS, "8"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    records = wait_for(killed)
    os.killpg(killed.pid, signal.SIGKILL)
    assert killed.wait(timeout=60) == -signal.SIGKILL
    before = records.read_bytes()[: records.read_bytes().rfind(b"\n") + 1]
    done = before.count(b"\n")
    assert 0 < done < 8
    said: list[str] = []
    compilation = tuned(done + 2, said.append)
    assert said[0].startswith(f"tuning: {done} of {done + 2} trials") and compilation.trials == done + 2
    assert compilation.tuning_s and compilation.is_compiled_now and compilation.functions == 2
    after = records.read_bytes()
    assert after.startswith(before) and after.count(b"\n") == len(candidates(records)) == done + 2
    assert all(max(seconds) < 1 for seconds in candidates(records).values())  # they run, and so do the defaults
    assert all(seconds < 1 for seconds in TuningLog(records.parent).defaults.values())
    assert json.loads((records.parent / SPENT).read_text())[-1][0] == done + 2
    assert not list(records.parent.glob("built-*"))
    said.clear()
    assert tuned(done + 2, said.append).is_compiled_now is False and not said
    assert records.read_bytes() == after


def candidates(records: Path) -> dict[str, list[float]]:
    """Seconds of what was measured, by function and schedule."""
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    return {json.dumps([workload, trace]): seconds for workload, (trace, seconds, *_) in lines}


class Timed:
    """In the place of compiling and timing: default schedules take `default` seconds each, candidates `candidate`."""

    default, candidate = 1.0, 0.5
    measured: list[int]  # how many at once

    def __init__(self, target: Any, built: Path, num_modules: int):
        self.num_calls = 0

    def __call__(self, modules: list[Any]) -> list[Any]:
        from tvm.s_tir.meta_schedule.runner import RunnerResult

        self.measured.append(len(modules))
        seconds = self.candidate if self.num_calls else self.default
        self.num_calls += 1
        return [RunnerResult([seconds], None) for _ in modules]

    def close(self) -> None:
        pass


def tuned_as_timed(
    trials: int, budget_s: float, default: float, candidate: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[Compilation, list[int], list[str]]:
    """compilation, how many were measured at once, what was said; of a model with a large and a small product."""
    timed = type("Timed", (Timed,), {"default": default, "candidate": candidate, "measured": []})
    monkeypatch.setattr(tvm_tuning, "Measuring", timed)
    said: list[str] = []
    system = Tvm(trials, budget_s)
    system.report = said.append
    module, x = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4)).eval(), torch.ones(1, 8)
    prepared = system.prepare(module, (x,))
    agree(prepared, module, [(x,)])
    assert prepared.compilation is not None
    return prepared.compilation, timed.measured, said


@pytest.mark.slow
def test_a_candidate_is_used_where_it_beats_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    compilation, measured, said = tuned_as_timed(4, 300.0, 1.0, 0.5, monkeypatch)
    assert measured == [2, 2, 2] and (compilation.functions, compilation.tuned, compilation.trials) == (2, 2, 4)
    assert [line.split(",")[0] for line in said] == [f"tuning: {n} of 4 trials" for n in (0, 0, 2, 4)] + ["building"]


@pytest.mark.slow
def test_what_it_has_learned_is_read_and_what_it_lacks_is_learned_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = type("Timed", (Timed,), {"measured": []})
    monkeypatch.setattr(tvm_tuning, "Measuring", timed)
    module, x = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4)).eval(), torch.ones(1, 8)
    system = Tvm(4, 300.0)
    assert system.learns
    system.learn(module, (x,))
    measured = list(timed.measured)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        prepared = system.prepare(module, (x,))
    assert prepared.compilation is not None and prepared.compilation.is_compiled_now is False
    assert measured and timed.measured == measured
    with pytest.warns(Notice, match="learned in place"):
        Tvm(6, 300.0).prepare(module, (x,))
    assert timed.measured != measured


def test_a_search_without_further_candidates_is_finished(tmp_path: Path) -> None:
    log = TestLog.log(tmp_path, [(4, 10.0)])
    assert log.is_finished(4, 100.0) and log.is_finished(8, 10.0) and not log.is_finished(8, 100.0)
    log.note_exhausted(8)
    again = TuningLog(tmp_path)
    assert again.is_finished(8, 100.0) and again.is_finished(6, 100.0) and not again.is_finished(9, 100.0)
    assert not TestLog.log(tmp_path, [(1, 10.0)]).is_finished(8, 100.0)  # another search has found one


@pytest.mark.slow
def test_a_gpus_candidates_are_of_its_own_schedule_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not of functions that measuring the defaults has scheduled. The GPU need not be here, nor times be real."""
    monkeypatch.setattr(tvm_tuning, "Measuring", type("Timed", (Timed,), {"measured": []}))
    target, log = tvm_build.cuda_target("sm_90"), TuningLog(tmp_path / "log")
    exported = Exported(nn.Conv2d(16, 64, 1).eval(), (torch.randn(1, 16, 16, 16),))
    log.folder.mkdir()
    tvm_tuning.tune(lambda: tvm_build.lowered(exported, target), target, log, 4, 300.0)
    assert b"SamplePerfectTile" in (log.folder / RECORDS).read_bytes()
    with tvm_build.cuda_headers():
        counts = tvm_build.build(tvm_build.lowered(exported, target), target, tmp_path, log.best(log.within(4, 300.0)))
    assert counts == {"functions": 1, "tuned": 1}


@pytest.mark.slow
def test_a_function_keeps_a_default_that_no_candidate_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    compilation, _, _ = tuned_as_timed(2, 300.0, 0.5, 0.5, monkeypatch)
    assert (compilation.functions, compilation.tuned, compilation.trials) == (2, 0, 2)


def test_a_spent_budget_ends_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the defaults, which take of it too."""
    compilation, measured, said = tuned_as_timed(4, 1e-9, 1.0, 0.5, monkeypatch)
    assert (
        measured == [2]
        and (compilation.tuned, compilation.trials) == (0, 0)
        and compilation.tuning_s
        and compilation.tuning_s > 1e-9
    )
    assert said[-1] == "building"


def test_nothing_that_can_be_measured_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    error = "Traceback: ...\nRuntimeError: no compiler\n"
    monkeypatch.setattr(Timed, "__call__", lambda self, modules: [RunnerResult(None, error) for _ in modules])
    with pytest.raises(RuntimeError, match=r"cannot measure anything here: RuntimeError: no compiler$"):
        tuned_as_timed(4, 300.0, 1.0, 0.5, monkeypatch)


def function(weight: int, *best: float, num_empty: int = 0) -> Function:
    return Function(None, weight, None, list(best), set(), num_empty=num_empty)


def test_trials_go_where_they_pay() -> None:
    """Ordered by what a batch of trials promises of the whole model's time."""
    order = [
        function(1, math.inf),  # whose default does not run
        function(3, 4.0),
        function(1, 8.0),
        function(1, 8.0, 8.0),
        function(1, 8.0, 4.0, 4.0, 4.0, 3.0),  # it still gets better, which another no longer does
        function(1, 3.0, 3.0, 3.0, 3.0, 3.0),
        function(1, 0.4),
    ]
    promises = [f.promise() for f in order]
    assert promises == sorted(promises, reverse=True) and len(set(promises)) == len(order)
    assert not function(1, *[math.inf] * 4).promise() and not function(1, 8.0, num_empty=EMPTY).promise()


def wait_for(process: "subprocess.Popen[bytes]") -> Path:
    """The log, once trials are in it."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        for file in Cache().root.glob(f"entries/tvm-log-*/{RECORDS}"):
            if b"\n" in file.read_bytes():
                return file
        time.sleep(0.05)
    raise AssertionError("no trial was measured")
