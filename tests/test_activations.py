"""Activations that are written in several operators: found by what they compute, and by nothing else."""

from collections.abc import Callable
from math import pi, sqrt

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import Function
from torch import Tensor, nn
from torch.nn.functional import gelu

from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.patterns import users
from systems.scheduling.graph.program import Program
from systems.scheduling.passes.activations import FORMS, Activation, activation_of

C = sqrt(2 / pi)
# By name of what they compute.
WAYS: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "gelu_tanh": [
        lambda x: gelu(x, approximate="tanh"),
        lambda x: 0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0)))),
        lambda x: x * 0.5 * (1.0 + torch.tanh(x * C * (1.0 + 0.044715 * x * x))),
        lambda x: x * torch.sigmoid(2 * C * (x + 0.044715 * x * x * x)),
        lambda x: (torch.tanh(C * x + C * 0.044715 * x**3) + 1) * x / 2,
    ],
    "quick_gelu": [
        lambda x: x * torch.sigmoid(1.702 * x),
        lambda x: torch.sigmoid(x * 1.702) * x,
        lambda x: x * (1 + torch.tanh(0.851 * x)) / 2,
    ],
    "gelu": [gelu],
    "silu": [nn.functional.silu],
}
OTHERS: dict[str, Callable[[nn.ModuleDict, Tensor], object]] = {
    "another number": lambda p, x: x * torch.sigmoid(1.7 * x),
    "another tensor": lambda p, x: x * torch.sigmoid(1.702 * p["b"](x)),
    "a parameter": lambda p, x: x * torch.sigmoid(1.702 * x * p["b"].bias),
    "what it reads is returned": lambda p, x: (x * torch.sigmoid(1.702 * x), x),
    "what it reads is read": lambda p, x: x * torch.sigmoid(1.702 * x) + p["b"](x),
    "a step is returned": lambda p, x: (x * (y := torch.sigmoid(1.702 * x)), y),
    "a step is read": lambda p, x: x * (y := torch.sigmoid(1.702 * x)) + p["b"](y),
    "it ends before": lambda p, x: torch.sigmoid(1.702 * x) * 2,
    "no curve": lambda p, x: x * 0.5 * (1 + x),
    "a view of it is returned": lambda p, x: gelu(x.view(2, 3, 8), approximate="tanh"),
    "a view of it is added to": lambda p, x: gelu(x.view(2, 3, 8), approximate="tanh") + 1,
}


def found(forward: Callable[[nn.ModuleDict, Tensor], object]) -> tuple[Program, Activation | None]:
    """What follows the first product of a module."""
    torch.manual_seed(0)
    module = Function(lambda p, x: forward(p, p["a"](x)), a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval()
    program = capture(module, (torch.randn(6, 8),))
    first = next(v for v, operator in enumerate(program.graph.operators) if operator.name == "linear")
    return program, activation_of(program, users(program), first)


@pytest.mark.parametrize(("name", "way"), [(name, k) for name, ways in WAYS.items() for k in range(len(ways))])
@pytest.mark.parametrize("is_viewed", [False, True])
def test_it_is_what_it_computes_however_it_is_written(name: str, way: int, is_viewed: bool) -> None:
    act = WAYS[name][way]
    program, activation = found(lambda p, x: p["b"](act(x.view(2, 3, 8)).view(6, 8) if is_viewed else act(x)))
    if is_viewed and name not in FORMS:
        assert activation is None
        return
    assert activation is not None and activation.name == name
    last = program.graph.operators[activation.operators[-1] + 1].name
    assert last == ("view" if is_viewed else "linear") and len(activation.operators) == len(program.calls) - 2 - is_viewed


@pytest.mark.parametrize("why", OTHERS)
def test_nothing_is_found_where(why: str) -> None:
    assert found(OTHERS[why])[1] is None


STEPS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x * 0.5,
    lambda x, y: y + 1,
    lambda x, y: x * y,
    lambda x, y: y * 1.702,
    lambda x, y: torch.tanh(y),
    lambda x, y: torch.sigmoid(y),
    lambda x, y: y + 0.044715 * x**3,
]


@given(st.lists(st.integers(0, len(STEPS) - 1), min_size=1, max_size=6))
@examples(60)
def test_what_is_found_computes_its_form(steps: list[int]) -> None:
    def forward(p: nn.ModuleDict, x: Tensor) -> Tensor:
        y = x
        for step in steps:
            y = STEPS[step](x, y)
        return p["b"](y)  # type: ignore[no-any-return]

    program, activation = found(forward)
    if activation is not None and activation.name in FORMS:
        x = torch.randn(6, 8)
        product, result = {}, {}
        program.run((x,), lambda v, value: (product if v == activation.operators[0] - 1 else result).update({v: value}))
        source = product[activation.operators[0] - 1]
        torch.testing.assert_close(result[activation.operators[-1]], FORMS[activation.name](source))
