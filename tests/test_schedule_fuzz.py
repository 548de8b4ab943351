"""Schedule files that were changed by hand: each is executed rightly, or refused in one line."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ios import Branches, _merge_costs_little
from torch import nn

import systems
from runners.measurements.correctness import relative_error
from systems.base import BadOption
from systems.scheduling.graph.capture import capture

pytestmark = pytest.mark.usefixtures("cache_folder")
EXECUTED = ("system", "operators", "edges", "waits", "stages", "merges", "search")  # the other keys are labels
STRANGE = (None, True, -1, 0, 3, 99, 2**70, 1.5, float("nan"), "", "x", [], [[]], [0], [[0, 0]], {}, {"id": 0})


@pytest.fixture(scope="module")
def branches() -> nn.Module:
    torch.manual_seed(0)
    return Branches().eval()


@pytest.fixture(scope="module")
def documents(branches: nn.Module) -> list[dict[str, Any]]:
    """Files of IOS: greedy stages, streams that another scheduler has assigned, and a merge."""
    x = torch.randn(2, 8, 12, 12)
    schedules = [systems.load(choice).schedule(branches, (x,)) for choice in ("greedy", "nimble")]
    with pytest.MonkeyPatch.context() as patch:
        timer = "systems.ios.stage_timer.StageTimer"
        patch.setattr(f"{timer}.concurrent", lambda self, groups, numbers: 10.0 * sum(map(len, groups)))
        patch.setattr(f"{timer}.merged", _merge_costs_little)
        schedules.append(systems.load("ios").schedule(branches, (x,)))
    assert schedules[-1].merges
    return [schedule.to_json(model="m", batch=2, device="cpu") | {"system": "ios"} for schedule in schedules]


def places(document: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to every value within, those of inner lists and dicts among them."""
    items: Any = document.items() if isinstance(document, dict) else ()
    items = enumerate(document) if isinstance(document, list) else items
    return [path, *(place for key, value in items for place in places(value, (*path, key)))]


def mutated(document: dict[str, Any], chance: random.Random) -> Any:
    """The document with one value left out, repeated, replaced, or exchanged with another of its kind.

    A key is drawn first, so that a short list is changed as often as that of the operators.
    """
    changed = copy.deepcopy(document)
    key = chance.choice([key for key in EXECUTED if key in changed])
    path = chance.choice(places(changed[key], (key,)))
    *above, last = path
    holder: Any = changed
    for step in above:
        holder = holder[step]
    kind = chance.choice(("drop", "repeat", "replace", "replace", "exchange"))
    if kind == "drop":
        del holder[last]
    elif kind == "repeat" and isinstance(holder, list):
        holder.insert(last, copy.deepcopy(holder[last]))
    elif kind == "exchange" and isinstance(holder, list):
        other = chance.randrange(len(holder))
        holder[last], holder[other] = holder[other], holder[last]
    else:
        holder[last] = copy.deepcopy(chance.choice(STRANGE))
    return changed


def execute(text: str, file: Path, module: nn.Module) -> str | None:
    """The line of refusal of a file; None where it is executed, and then the answer is right."""
    file.write_text(text)
    x = torch.randn(2, 8, 12, 12)
    try:
        prepared = systems.load("ios", schedule=str(file)).prepare(module, (x,))
    except BadOption as error:
        return str(error)
    with torch.no_grad():
        assert relative_error(prepared(x), module(x)) < 1e-5
    prepared.schedule.summary()
    prepared.close()
    return None


@pytest.mark.parametrize("number", [60, pytest.param(400, marks=pytest.mark.slow)])
def test_a_changed_schedule_file_is_right_or_refused_in_one_line(
    number: int, documents: list[dict[str, Any]], branches: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = capture(branches, (torch.randn(2, 8, 12, 12),))
    monkeypatch.setattr("systems.scheduling.scheduler.capture", lambda module, inputs: program)  # once for all files
    chance, lines = random.Random(0), []
    for document in documents:
        assert execute(json.dumps(document), tmp_path / "s.json", branches) is None
    for _ in range(number):
        text = json.dumps(mutated(chance.choice(documents), chance))
        lines.append(execute(text, tmp_path / "s.json", branches))
    refused = [line for line in lines if line is not None]
    assert all(line.startswith(f"system.schedule={tmp_path / 's.json'}") and "\n" not in line for line in refused)
    assert number / 2 < len(refused) < number  # an exchange of two waits, say, changes nothing


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "the stages do not hold every operator once": lambda d: d["stages"].pop(),
    "the stages do not hold every operator once, in the launch order": lambda d: d["stages"].reverse(),
    "is merged twice": lambda d: d["merges"].append(d["merges"][0]),
    "a merge of 99, of operators": lambda d: d["merges"].append([99, 100]),
    "an early launch of 99, of operators": lambda d: d.update(early=[99]),
    "an operator is launched early twice": lambda d: d.update(early=[0, 0]),
    "a priority of 9, and the highest is 5": lambda d: d.update(priorities=[9] * len(d["operators"])),
    "but priorities for 1": lambda d: d.update(priorities=[1]),
    "cpu launches no kernel early": lambda d: d.update(early=[0]),
    "cannot be merged": lambda d: d.update(merges=[[v for merge in d["merges"] for v in merge][:1]]),
    "-1 is no number of an operator": lambda d: d["edges"].append([-1, 3]),
    "True is no number of an operator": lambda d: d["operators"][1].update(id=True),
    "0.0 is no number of an operator": lambda d: d["operators"][0].update(stream=0.0),
    "two operators have one position": lambda d: d["operators"][1].update(position=d["operators"][0]["position"]),
    "a wait between 0 and 99": lambda d: d["waits"].append([0, 99]),
    "seconds is 'x', not a number": lambda d: d["search"].update(seconds="x"),
}


@pytest.mark.parametrize("says", WRONG)
def test_what_is_wrong_in_a_schedule_file_is_named(
    says: str, documents: list[dict[str, Any]], branches: nn.Module, tmp_path: Path
) -> None:
    changed = copy.deepcopy(documents[-1])
    WRONG[says](changed)
    line = execute(json.dumps(changed), tmp_path / "s.json", branches)
    assert line is not None and says in line and "\n" not in line


@pytest.mark.parametrize("text", ["", "3", "[]", "null", '"x"', "[" * 100_000, '{"operators": 3}', "{}", "\x00"])
def test_a_file_that_is_no_schedule_is_told_in_one_line(text: str, branches: nn.Module, tmp_path: Path) -> None:
    line = execute(text, tmp_path / "s.json", branches)
    assert line is not None and line.startswith(f"system.schedule={tmp_path / 's.json'}: ") and "\n" not in line
