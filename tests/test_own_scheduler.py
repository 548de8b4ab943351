"""A scheduler of one's own: one function and one config file, in folders of their own."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Run, without_progress
from torch import nn

import conf
import systems
from results.store import Store
from runners.checks import BadRequest
from runners.command import search_path
from systems import backends
from systems.base import BadOption, Unsupported
from systems.custom.system import PlanFailed
from systems.scheduling.graph.capture import capture
from systems.scheduling.plans.verify import InvalidSchedule
from systems.scheduling.scheduler import Scheduler

PAGE = (ROOT / "systems" / "README.md").read_text(encoding="utf-8")
(OF_THE_PAGE,) = re.findall(r"```python\n(# mine/wide\.py.*?)```", PAGE, flags=re.DOTALL)
(CONFIG,) = re.findall(r"```yaml\n# configs/system/wide\.yaml\n(.*?)```", PAGE, flags=re.DOTALL)
FUNCTION = f"""{OF_THE_PAGE}

def nothing(program):
    return None


def hasty(program):
    n = len(program.graph)
    return Schedule(program.graph, "hasty", tuple(range(n)), tuple(range(n)), ())


def wrong(program):
    return len(program.operators)


def beside(program):
    return dict(zip((1, 2), (3,), strict=True))


number = 3
"""
CELL = ["model=custom", "model.factory=tiny:make", "device=cpu", "runner=latency", "runner.samples=5", "results=r"]


@pytest.fixture
def own(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of configs; the function lies in the working directory."""
    (folder / "mine").mkdir()
    (folder / "mine" / "wide.py").write_text(FUNCTION)
    own = tmp_path_factory.mktemp("my configs")
    (own / "system").mkdir()
    (own / "system" / "wide.yaml").write_text(CONFIG)
    return own


@pytest.mark.slow
def test_it_runs_in_a_sweep_and_by_itself(own: Path, folder: Path, run: Run) -> None:
    done = run(*CELL, "-m", "system=nimble,wide", "system.fold_batch_norm=true", OPWEAVE_CONF=str(own))
    assert done.returncode == 0, done.stderr
    measured = {r.cell.system.choice: r for r in Store(folder / "r").read().records.values()}
    assert sorted(measured) == ["nimble", "wide"]
    assert all(r.is_ok and r.is_in_rounds and r.cell.system.get("fold_batch_norm") for r in measured.values())
    assert measured["wide"].cell.system.get("plan") == "mine.wide:plan"
    schedule = measured["wide"].schedule
    assert schedule is not None and schedule.system == "wide" and schedule.streams == schedule.operators

    (folder / "mine" / "wide.py").write_text(FUNCTION.replace('"wide"', '"wider"'))
    done = run(*CELL, "system=wide", "system.fold_batch_norm=true", OPWEAVE_CONF=str(own))
    assert done.returncode == 0, done.stderr
    assert "· wide (fold_batch_norm=true) ·" in done.stdout
    assert len(list((folder / "r").glob("*.json"))) == 3  # a changed function is another cell


@pytest.mark.slow
def test_its_schedule_is_written(own: Path, folder: Path, run_here: Run) -> None:
    file = ["runner=schedule", "model=custom", "model.factory=tiny:make", "device=cpu", "output=s.json"]
    assert run_here(*file, "system=custom", "system.plan=mine.wide:plan").returncode == 0
    assert json.loads((folder / "s.json").read_text())["system"] == "wide"


def test_a_schedule_that_may_give_a_wrong_answer_is_not_written(own: Path, folder: Path, run_here: Run) -> None:
    cell = ["model=custom", "model.factory=tiny:make", "device=cpu", "system=custom", "system.plan=mine.wide:hasty"]
    done = run_here("runner=schedule", *cell, "output=s.json")
    assert done.returncode == 1 and not done.stdout and not (folder / "s.json").exists()
    *_, line = done.stderr.splitlines()
    assert (
        line.startswith("opweave: custom on custom: failed: InvalidSchedule: operator ")
        and "neither a stream nor a wait" in line
    )


def test_wrong_requests_are_told(own: Path, folder: Path, run_here: Run) -> None:
    for arguments, variable, message in (
        (["system=wide"], "", "no system is named 'wide'"),
        (["system=wid"], str(own), "did you mean wide?"),
        (["system=wide", "system.plam=x"], str(own), "did you mean system.plan?"),
        (["system=custom"], str(own), "system=custom needs system.plan=package.module:function"),
        (["system=wide", "system.plan=mine.wide:plam"], str(own), "did you mean plan?"),
        (["system=eager"], str(folder / "none"), "is no folder"),
    ):
        done = run_here(*CELL, *arguments, **({"OPWEAVE_CONF": variable} if variable else {}))
        assert done.returncode == 2 and message in done.stderr and len(without_progress(done.stderr)) == 1, (
            arguments,
            done.stderr,
        )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("plan: [mine", ", line 1 is not YAML: expected ',' or ']'"),
        ("- custom", " holds no keys with values"),
        ("defaults: custom", ": defaults is no list"),
        ("defaults:\n  - costum", ": conf/system has no costum"),
        ("defaults:\n  - wide", ": maximum recursion depth exceeded"),
        ("plan: mine.wide:plan", " has no name: it needs a defaults list"),
    ],
)
def test_a_file_without_a_choice_is_told_whatever_is_asked_for(
    own: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    monkeypatch.setenv("OPWEAVE_CONF", str(own))
    file = own / "system" / "wide.yaml"
    file.write_text(text)
    with pytest.raises(BadRequest, match=re.escape(f"{file}{says}")) as caught:
        search_path(["modell=odd"])
    assert "\n" not in str(caught.value)


@pytest.fixture
def here(own: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWEAVE_CONF", str(own))
    monkeypatch.chdir(folder)


def test_the_page_names_what_a_program_has() -> None:
    program = capture(nn.Sequential(nn.ReLU(), nn.Sigmoid()), (torch.randn(2),))
    (sentences,) = re.findall(r"^A `Program` has .*?\n\n", PAGE, flags=re.DOTALL | re.MULTILINE)
    for thing, names in zip((program, program.graph), sentences.split("Its `graph` has"), strict=True):
        attributes = re.findall(r"`([a-z]\w+)`", re.sub(r"\(.*?\)", "", names))
        assert len(attributes) >= 5 and all(hasattr(thing, name) for name in attributes), attributes
    assert all(hasattr(program.graph.operators[0], name) for name in ("id", "name", "target"))


@pytest.mark.usefixtures("here", "cache_folder")
@torch.no_grad()
def test_it_runs_in_python() -> None:
    assert "wide" in conf.choices("system") and "custom" not in systems.names()
    module, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval(), torch.randn(1, 3, 8, 8)
    for options, num_operators in (({}, 3), ({"fold_batch_norm": True, "fuse_elementwise": True}, 2)):
        system = systems.load("wide", **options)
        assert isinstance(system, Scheduler) and not system.learns
        assert system.schedule(module, (x,)).stream_count == num_operators
        prepared = system.prepare(module, (x,))
        torch.testing.assert_close(prepared(x), module(x), rtol=1e-4, atol=1e-5)
        prepared.close()
    with pytest.raises(Unsupported, match="inference only"):
        systems.load("wide").prepare_training(module, torch.optim.SGD(module.parameters()), nn.MSELoss(), (x,), x)
    torch._dynamo.reset()
    fast = torch.compile(module, backend=backends.backend("wide"), dynamic=False)
    torch.testing.assert_close(fast(x), module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plam": "mine.wide:plan"}, "there is no key 'system.plam': did you mean plan"),
        ({"fold_batch_norm": 1}, "is not true or false"),
        ({"plan": ""}, "needs system.plan="),
        ({"plan": "mine.wide"}, "is not of the form"),
        ({"plan": "mine/wide.py:plan"}, "is a file's path: write mine.wide:plan, from the folder that holds mine"),
        ({"plan": "mine.wide:number"}, "has no function 'number'"),
        ({"plan": "mine.narrow:plan"}, "there is no module mine.narrow"),
        ({"plan": "tiny:raises.x"}, "has no function"),
    ],
)
def test_wrong_options_are_told_in_python(options: dict, message: str) -> None:
    with pytest.raises(BadOption, match=message):
        systems.load("wide", **options)


@pytest.mark.usefixtures("here")
def test_a_function_that_gives_no_schedule_is_told() -> None:
    with pytest.raises(BadOption, match=r"mine.wide:nothing returned a NoneType, not a Schedule"):
        systems.load("wide", plan="mine.wide:nothing").schedule(nn.ReLU(), (torch.randn(2),))


def test_inputs_are_a_tuple() -> None:
    with pytest.raises(TypeError, match=r"has to be a tuple: \(x,\)"):
        systems.load("nimble").prepare(nn.ReLU(), torch.randn(2))  # type: ignore[arg-type]


@pytest.mark.usefixtures("here")
def test_neither_a_schedule_nor_what_it_lowers_to_is_given_unproved() -> None:
    system = systems.load("wide", plan="mine.wide:hasty")
    assert isinstance(system, Scheduler)
    module, inputs = nn.Sequential(nn.ReLU(), nn.Sigmoid()), (torch.randn(2),)
    for ask in (system.schedule, system.lowered):
        with pytest.raises(InvalidSchedule, match=r"operator 1 .* reads the output of 0"):
            ask(module, inputs)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("function", "error", "line"),
    [
        ("wrong", "AttributeError: 'Program' object has no attribute 'operators'", "return len(program.operators)"),
        ("beside", "ValueError: zip() argument 2 is shorter than argument 1", "return dict(zip("),
    ],
)
def test_an_error_in_a_function_is_told_with_its_line(function: str, error: str, line: str) -> None:
    with pytest.raises(PlanFailed) as caught:
        systems.load("wide", plan=f"mine.wide:{function}").schedule(nn.ReLU(), (torch.randn(2),))
    (number,) = (i for i, text in enumerate(FUNCTION.splitlines(), 1) if line in text)
    message = str(caught.value)
    assert message.startswith(f"system.plan=mine.wide:{function} raised {error} (")
    assert message.endswith(f"mine/wide.py:{number})")
