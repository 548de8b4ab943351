"""Weave's plan files: what they hold, where they fit, and what they bring along."""

import json
from collections.abc import Mapping
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run
from torch import Tensor, nn
from weave_space import Branches

import systems
from results.cell import Cell, Conditions, choose
from results.schedule_file import ScheduleFile
from runners.showings.registry import showings
from systems.base import BadOption
from systems.scheduling import scheduler
from systems.scheduling.passes import fuse_in_triton
from systems.scheduling.passes.layouts import Unsolvable
from systems.scheduling.passes.rewriting import Rewriting
from systems.scheduling.plans.schedule import Schedule
from systems.weave.system import Weave

ASKED = (
    "model=custom",
    "model.factory=tiny:make",
    "device=cpu",
    "runner=latency",
    "runner.samples=3",
    "rounds=0",
    "results=r",
)


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
    for content in (b"", b"\xff"):
        (folder / "empty.json").write_bytes(content)
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
    return systems.load("weave", plan=file).prepare(*_tiny(folder))
