"""The order of elements through views and copies, against PyTorch's own on numbered elements."""

from math import prod
from typing import Any

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from systems.scheduling.graph.program import Call
from systems.scheduling.passes.rearrangement import MOVES, Rearrangement

aten = torch.ops.aten


def made(source: Tensor, steps: list[tuple[Any, tuple[Any, ...]]]) -> Tensor:
    for function, arguments in steps:
        source = function(source if function is not aten.view.default else source.contiguous(), *arguments)
    return source


@st.composite
def chains(draw: st.DrawFn) -> tuple[Tensor, list[Call], Tensor]:
    """A tensor of numbered elements, calls one after the other, and what they make of it."""
    shape = draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=4))
    source = torch.arange(prod(shape)).view(shape)
    x, calls = source, []
    for _ in range(draw(st.integers(0, 6))):
        dims = st.integers(-x.dim(), x.dim() - 1) if x.dim() else st.nothing()
        kind = draw(
            st.sampled_from(("view", "clone", "unsqueeze", *(("transpose", "permute", "select") if x.dim() else ())))
        )
        if kind == "view":
            pieces = [p for n in x.shape for p in ((2, n // 2) if n % 2 == 0 and draw(st.booleans()) else (n,))]
            while len(pieces) > 1 and draw(st.booleans()):
                i = draw(st.integers(0, len(pieces) - 2))
                pieces[i : i + 2] = [pieces[i] * pieces[i + 1]]
            x, function, arguments = x.contiguous(), aten.view.default, (pieces,)
        elif kind == "clone":
            function, arguments = aten.clone.default, ()
        elif kind == "unsqueeze":
            function, arguments = aten.unsqueeze.default, (draw(st.integers(0, x.dim())),)
        elif kind == "transpose":
            function, arguments = aten.transpose.int, (draw(dims), draw(dims))
        elif kind == "permute":
            function, arguments = aten.permute.default, (draw(st.permutations(range(x.dim()))),)
        else:
            dim = draw(dims)
            function, arguments = aten.select.int, (dim, draw(st.integers(-x.shape[dim], x.shape[dim] - 1)))
        x = function(x, *arguments)
        calls.append(Call(function, (None, *arguments), {}, x))
    return source, calls, x


@given(chains())
@examples(200)
def test_its_steps_make_what_the_calls_make(chain: tuple[Tensor, list[Call], Tensor]) -> None:
    source, calls, expected = chain
    now: Rearrangement | None = Rearrangement.of(source.shape)
    for call in calls:
        assert now is not None
        now = now.after(call)
        if now is None:  # a dimension of several factors was selected from, or a factor splits unevenly
            assert call.function in (aten.select.int, aten.view.default)
            return
        assert now.shape == list(call.produces.shape)
    assert now is not None
    steps = now.steps(source.shape)
    assert steps is not None and torch.equal(made(source, steps), expected)


def test_what_it_can_follow_is_followed() -> None:
    """As queries leave attention's joint product: two views, a selection and a permutation make them."""
    source = torch.arange(5 * 3 * 24).view(5, 3, 24)
    x, now = source, Rearrangement.of(source.shape)
    for function, *arguments in [
        (aten.transpose.int, 1, 0),
        (aten.view.default, [3, 5, 3, 8]),
        (aten.unsqueeze.default, 0),
        (aten.transpose.int, 0, -2),
        (aten.squeeze.dim, -2),
        (aten.clone.default,),
        (aten.select.int, 0, 1),
        (aten.view.default, [3, 10, 4]),
        (aten.transpose.int, 0, 1),
        (aten.view.default, [5, 2, 3, 4]),
    ]:
        x = function(x, *arguments) if function is not aten.clone.default else x.contiguous()
        after = now.after(Call(function, (None, *arguments), {}, x))
        assert after is not None
        now = after
    steps = now.steps(source.shape)
    assert steps is not None and [str(function).split(".")[1] for function, _ in steps] == ["view", "select", "permute"]
    assert torch.equal(made(source, steps), x)


@pytest.mark.parametrize("function", [aten.relu.default, aten.slice.Tensor, aten.expand.default, aten.flip.default])
def test_what_computes_or_leaves_out_is_not_followed(function: Any) -> None:
    assert function not in MOVES
    x = torch.zeros(2, 3)
    assert Rearrangement.of(x.shape).after(Call(function, (None, [2, 3]), {}, x)) is None
