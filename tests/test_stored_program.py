"""A captured program as data: what comes back computes what the module does, and what cannot be stored is told."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from modules import mixed
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import models
import systems
from systems.base import BadOption
from systems.scheduling.graph import stored_program
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Call, Program
from systems.scheduling.graph.stored_program import NotStorable, description, from_document, to_document
from systems.scheduling.graph.structure import structure


def travelled(program: Program, module: nn.Module, inputs: tuple[Tensor, ...]) -> Program:
    return from_document(json.loads(json.dumps(to_document(program, module))), module, inputs)


def same(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    with torch.no_grad():
        program = capture(module, inputs)
        back = travelled(program, module, inputs)
        assert structure(back) == structure(program) and back.output_spec == program.output_spec
        assert [o.name for o in back.graph.operators] == [o.name for o in program.graph.operators]
        assert back.graph.edges == program.graph.edges
        outputs, expected = tree_leaves(back.unflatten(back.run(inputs))), tree_leaves(module(*inputs))
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(outputs, expected, strict=True))


@pytest.mark.parametrize(
    "name", ["squeezenet", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "t5", "nasnet"))]
)
def test_a_model_comes_back(name: str) -> None:
    loaded = models.load(name, 1)
    same(loaded.module, loaded.inputs)


def test_operators_of_every_kind_come_back() -> None:
    same(*mixed())


class Odd(nn.Module):
    """A constant, a type, infinity, a weight under two names, a buffer, and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.second(self.first(x)).masked_fill(self.mask, float("-inf"))
        return {"y": y, "few": (x.to(torch.float64), torch.arange(3, device=x.device) + torch.tensor([1, 2, 3]))}


def test_what_is_odd_comes_back() -> None:
    same(Odd().eval(), (torch.randn(2, 4),))


def test_weights_are_those_of_the_module_that_it_comes_back_to() -> None:
    one, other, x = Odd().eval(), Odd().eval(), torch.randn(2, 4)
    back = from_document(to_document(capture(one, (x,)), one), other, (x,))
    with torch.no_grad():
        assert torch.equal(back.unflatten(back.run((x,)))["y"], other(x)["y"])
    leaves = [leaf for call in back.calls for leaf in call.leaves() if isinstance(leaf, Tensor)]
    assert any(leaf is other.first.weight for leaf in leaves)


def test_what_cannot_be_stored_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Odd().eval(), torch.randn(2, 4)
    program = capture(module, (x,))

    def changed(call: Callable[[Call], Call]) -> Program:
        calls = [call(program.calls[0]), *program.calls[1:]]
        return Program(program.graph, calls, program.outputs, program.output_spec, program.examples)

    with pytest.raises(NotStorable, match="no operator of PyTorch"):
        to_document(changed(lambda call: replace(call, function=len)), module)
    with pytest.raises(NotStorable, match="a set among the arguments"):
        to_document(changed(lambda call: replace(call, args=(*call.args, {1}))), module)
    monkeypatch.setattr(stored_program, "LARGEST_CONSTANT", 8)
    with pytest.raises(NotStorable, match="a constant of 3 elements"):
        to_document(program, module)


class Cache(nn.Module):
    """Writes one place of a buffer, by an operator that changes it in place."""

    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(2, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.rows.index_copy_(1, torch.tensor([2]), x).softmax(-1)


def test_what_writes_a_buffer_is_captured_again(tmp_path: Path, cache_folder: Path) -> None:
    """Its plan holds no program, and is executed all the same."""
    module, x = Cache().eval(), torch.randn(2, 1, 4)
    with pytest.raises(NotStorable, match="writes an argument"):
        to_document(capture(module, (x,)), module)
    schedule = systems.load("weave", budget_s=0.0).schedule(module, (x,))
    assert schedule.recipe is not None and schedule.recipe["captured"] == {}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(schedule.to_json(model="cache", batch=2, device="cpu")))
    prepared, other = systems.load("weave", plan=str(file)).prepare(module, (x,)), Cache().eval()
    for scale in (1.0, 2.0):
        torch.testing.assert_close(prepared(x * scale), other(x * scale))
        assert torch.equal(module.rows, other.rows)
    prepared.close()


WRONG: dict[str, Callable[[list[Any]], object]] = {
    "another operator": lambda call: call.__setitem__(1, "aten.nothing.default"),
    "one that writes": lambda call: call.__setitem__(1, "aten.relu_.default"),
    "one that reads a file": lambda call: call.__setitem__(1, "aten.from_file.default"),
    "no operator": lambda call: call.__setitem__(1, "aten.relu.overloads.append"),
    "one that follows": lambda call: call.__setitem__(2, {"tuple": [{"output": [3, None]}]}),
    "another weight": lambda call: call.__setitem__(2, {"tuple": [{"state": "third.weight"}]}),
    "another kind": lambda call: call.__setitem__(2, {"tuple": [{"code": "1"}]}),
    "no dtype": lambda call: call.__setitem__(2, {"tuple": [{"dtype": "load"}]}),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_document_is_refused(case: str) -> None:
    module, x = Odd().eval(), torch.randn(2, 4)
    document = to_document(capture(module, (x,)), module)
    WRONG[case](document["calls"][0])
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        from_document(document, module, (x,))


def test_a_description_says_what_a_module_is() -> None:
    base = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    others = [
        nn.Sequential(nn.Conv2d(3, 4, 1, stride=2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU()),
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).half(),
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).to(memory_format=torch.channels_last),
        Odd(),
    ]
    assert description(base) == description(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()))
    assert all(description(base) != description(other) for other in others)


class Clip(nn.Module):
    """Its code depends on attributes of several kinds."""

    def __init__(self, most: float = 6.0, act: Callable[[Tensor], Tensor] = torch.relu, width: int = 1):
        super().__init__()
        self.layer, self.most, self.act = nn.Linear(4, 4), most, act
        self.config = SimpleNamespace(width=width, sizes=[1, {"a": 2}])
        self.scale, self.scales = torch.ones(4), [torch.ones(4)]
        self.number, self.seen = 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        self.seen.append(self.number)
        return self.act(self.layer(x)).clamp(max=self.most) * self.config.width * self.scale * self.scales[0] + x


def test_a_description_knows_what_the_code_may_read() -> None:
    alike = description(Clip())
    assert description(Clip()) == alike
    for other in (Clip(7.0), Clip(act=torch.tanh), Clip(width=2)):
        assert description(other) != alike


def plan_of(module: nn.Module, x: Tensor, folder: Path) -> Path:
    file = folder / "plan.json"
    schedule = systems.load("weave", budget_s=0.0).schedule(module, (x,))
    assert schedule.recipe is not None and schedule.recipe["captured"]
    file.write_text(json.dumps(schedule.to_json(model="clip", batch=2, device="cpu")))
    return file


@pytest.mark.parametrize("other", [{"most": 60.0}, {"act": torch.tanh}, {"width": 2}])
def test_a_plan_is_of_no_module_with_another_attribute(other: dict[str, Any], tmp_path: Path, cache_folder: Path) -> None:
    """Also where both compute the same of the inputs at hand."""
    x = torch.zeros(2, 4)
    file = plan_of(Clip().eval(), x, tmp_path)
    module = Clip(**other).eval()
    try:
        fast = systems.load("weave", plan=str(file)).prepare(module, (x,))
    except ValueError as error:
        assert "does not fit" in str(error)
        return
    with closing(fast), torch.no_grad():
        torch.testing.assert_close(fast(x + 100), module(x + 100))


def test_tensors_among_the_attributes_stay_the_modules(tmp_path: Path, cache_folder: Path) -> None:
    module, x = Clip().eval(), torch.randn(2, 4)
    file = plan_of(module, x, tmp_path)
    with closing(systems.load("weave", plan=str(file)).prepare(module, (x,))) as fast, torch.no_grad():
        module.scale.mul_(3.0)
        module.scales[0].mul_(2.0)
        torch.testing.assert_close(fast(x), module(x))


def test_preparing_from_a_plan_leaves_the_module_as_it_was(tmp_path: Path, cache_folder: Path) -> None:
    module, x = Clip().eval(), torch.randn(2, 4)
    file = plan_of(module, x, tmp_path)
    number, state = module.number, torch.random.get_rng_state()
    seen = list(module.seen)
    systems.load("weave", plan=str(file)).prepare(module, (x,)).close()
    assert (module.number, module.seen) == (number, seen) and torch.equal(torch.random.get_rng_state(), state)


def test_a_plan_of_other_switches_is_refused(tmp_path: Path, cache_folder: Path) -> None:
    """A record would name switches that the plan does not follow."""
    file = plan_of(Clip().eval(), torch.randn(2, 4), tmp_path)
    with pytest.raises(BadOption, match=r"was made with system\.fuse_elementwise=true: ask for the same"):
        systems.load("weave", plan=str(file), fuse_elementwise=False)
