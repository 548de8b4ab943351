"""What depends on no input is computed once, and what is computed alike is computed once."""

import random

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import COUNTING, Function, agrees, names
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import models
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.passes.fold_constants import fold_constants
from systems.scheduling.passes.merge_equal import merge_equal


def follows_weights(module: nn.Module, program: Program, x: Tensor) -> None:
    """Weights that are written in place are what the next run computes with."""
    for scale in (1.0, 0.5):
        with torch.no_grad():
            for weight in module.parameters():
                weight.mul_(scale)
        program.derived.refresh()
        outputs, expected = program.run((x,)), tree_leaves(module(x))
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


UNARY = (torch.sin, torch.cos, torch.tanh)
BINARY = (torch.add, torch.mul)


class Random(nn.Module):
    """Operators over earlier values, of which two are weights and one is the input; returns what nothing else reads."""

    def __init__(self, seed: int, num_operators: int):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(3, 4), torch.randn(3, 4)])
        draw = random.Random(seed)
        self.steps: list[tuple[int, tuple[int, ...]]] = []
        for i in range(3, 3 + num_operators):
            if draw.random() < 0.5:
                self.steps.append((draw.randrange(len(UNARY)), (draw.randrange(i),)))
            else:
                self.steps.append((draw.randrange(len(BINARY)), (draw.randrange(i), draw.randrange(i))))
        read = {u for _, sources in self.steps for u in sources}
        self.returned = [i for i in range(3, 3 + num_operators) if i not in read]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values = [*self.weights, x]
        for k, sources in self.steps:
            values.append((UNARY if len(sources) == 1 else BINARY)[k](*(values[u] for u in sources)))
        return tuple(values[i] for i in self.returned)

    def reached(self) -> set[int]:
        """Values that depend on the input: all that are reached from it."""
        reached = {2}
        for i, (_, sources) in enumerate(self.steps, start=3):
            reached |= {i} if reached & {*sources} else set()
        return reached

    def distinct(self) -> int:
        """How many operators are left where equal ones are one, and what is returned stays: by writing them out."""
        text_of = {i: f"v{i}" for i in range(3)}
        texts, num_returned = set(), 0
        for i, (k, sources) in enumerate(self.steps, start=3):
            text_of[i] = f"{len(sources)}.{k}({','.join(text_of[u] for u in sources)})"
            if i in self.returned:
                num_returned += 1
            else:
                texts.add(text_of[i])
        return len(texts) + num_returned


@examples(10)
@given(st.integers(0, 10**6), st.integers(1, 14))
def test_exactly_what_depends_on_no_input_is_folded(seed: int, num_operators: int) -> None:
    module, x = Random(seed, num_operators).eval(), torch.randn(3, 4)
    program, decisions = fold_constants(capture(module, (x,)), COUNTING)
    staying = {i for i in range(3, 3 + num_operators) if i in module.reached() or i in module.returned}
    assert len(program.graph) == len(staying)
    assert len(decisions) == len(program.derived.derived)
    follows_weights(module, program, x)


@examples(10)
@given(st.integers(0, 10**6), st.integers(1, 14))
def test_of_equal_operators_one_stays(seed: int, num_operators: int) -> None:
    module, x = Random(seed, num_operators).eval(), torch.randn(3, 4)
    program, decisions = merge_equal(capture(module, (x,)), COUNTING)
    assert len(program.graph) == module.distinct()
    assert len(decisions) == num_operators - module.distinct()
    agrees(module, program, x)


class Weighted(nn.Module):
    """RandWire's sum: weights that are computed and taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = torch.sigmoid(self.weights).unbind()
        return x * first + x.cos() * second + third


def test_parts_of_a_constant_are_constants_that_follow_their_weights() -> None:
    module, x = Weighted().eval(), torch.randn(5)
    program, decisions = fold_constants(capture(module, (x,)), COUNTING)
    assert {"sigmoid", "unbind"}.isdisjoint(names(program)) and len(decisions) == 3
    follows_weights(module, program, x)


def noise(p: nn.ModuleDict, x: Tensor) -> Tensor:
    return x + torch.rand(3)


def returned(p: nn.ModuleDict, x: Tensor) -> tuple[Tensor, Tensor]:
    return x.cos(), torch.zeros(2, 3).view(6)


def transposed(p: nn.ModuleDict, x: Tensor) -> Tensor:
    return x @ p["linear"].weight.t()  # type: ignore[operator]


@pytest.mark.parametrize("forward", [noise, returned, transposed])
def test_what_is_random_returned_or_a_view_of_a_weight_stays(forward: object) -> None:
    module = Function(forward, linear=nn.Linear(3, 4)).eval()  # type: ignore[arg-type]
    captured = capture(module, (torch.randn(2, 3),))
    program, decisions = fold_constants(captured, COUNTING)
    assert names(program) == names(captured) and not decisions


def test_each_call_returns_memory_of_its_own() -> None:
    def twice(p: nn.ModuleDict, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.cos(), x.cos().view(6), torch.ones(3).cos()

    module, x = Function(twice).eval(), torch.randn(2, 3)
    program = merge_equal(fold_constants(capture(module, (x,)), COUNTING)[0], COUNTING)[0]
    outputs = program.run((x,))
    addresses = {t.data_ptr() for t in (*outputs, *program.run((x,)))}
    assert len(addresses) == 6
    outputs[2].zero_()
    assert program.run((x,))[2].equal(torch.ones(3).cos())


def drawn(p: nn.ModuleDict, x: Tensor) -> Tensor:
    return torch.rand(3) * x - torch.rand(3)


def numbers(p: nn.ModuleDict, x: Tensor) -> Tensor:
    return torch.cat([(x + 1).to(torch.float64), x.double() + 1.0, torch.full((2, 3), 1), torch.full((2, 3), True)])


def scaled(p: nn.ModuleDict, x: Tensor) -> Tensor:
    return torch.add(x, x, alpha=2) * torch.add(x, x, alpha=3)


def zeros(p: nn.ModuleDict, x: Tensor) -> Tensor:
    return torch.cat([x / 0.0, x / -0.0, x / complex(1.0, 0.0), x / complex(1.0, -0.0)])


@pytest.mark.parametrize(("forward", "left"), [(drawn, 4), (numbers, 7), (scaled, 3), (zeros, 5)])
def test_what_differs_is_not_merged(forward: object, left: int) -> None:
    module, x = Function(forward).eval(), torch.randn(2, 3)  # type: ignore[arg-type]
    program, _ = merge_equal(capture(module, (x,)), COUNTING)
    assert len(program.graph) == left
    torch.manual_seed(0)
    expected = module(x)
    torch.manual_seed(0)
    assert torch.equal(program.run((x,))[0], expected)


@pytest.mark.slow
def test_randwire_keeps_no_weights_of_sums_and_nasnet_averages_once() -> None:
    """RandWire weighs the inputs of 78 sums; NASNet averages one tensor twice in each normal cell."""
    randwire, nasnet = models.load("randwire", 1), models.load("nasnet", 1)
    program = fold_constants(capture(randwire.module, randwire.inputs), COUNTING)[0]
    assert {"sigmoid", "unbind"}.isdisjoint(names(program))
    agrees(randwire.module, program, *randwire.inputs)
    captured = capture(nasnet.module, nasnet.inputs)
    program = merge_equal(captured, COUNTING)[0]
    assert names(captured).count("avg_pool2d") - names(program).count("avg_pool2d") == 12
    agrees(nasnet.module, program, *nasnet.inputs)
