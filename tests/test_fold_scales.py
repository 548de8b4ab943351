"""Numbers before an attention become a part of its scale: where they do, where they must not, and in any way to it."""

from collections.abc import Callable
from math import prod, sqrt
from typing import Any

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import COUNTING, DEVICES, Function, agrees, names
from torch import Tensor, nn
from torch.nn import functional

import models
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.passes.attention_places import ATTENTION
from systems.scheduling.passes.fold_scales import fold_scales

attention = functional.scaled_dot_product_attention
HEAD = 8


def folded(module: nn.Module, *inputs: Tensor) -> tuple[Program, list[str]]:
    program, decisions = fold_scales(capture(module, inputs), COUNTING)
    return program, [d.pattern for d in decisions]


def scales(program: Program) -> list[Any]:
    return [call.kwargs.get("scale") for call in program.calls if call.function is ATTENTION]


def heads(x: Tensor) -> Tensor:
    return x.view(2, 6, 2, HEAD).transpose(1, 2)


def rows(device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 6, 2 * HEAD, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def parts(forward: Callable[..., object]) -> Function:
    torch.manual_seed(0)
    return Function(forward, a=nn.Linear(2 * HEAD, 2 * HEAD), b=nn.Linear(2 * HEAD, 2 * HEAD)).eval()


FOLDED: dict[str, tuple[Callable[..., object], float]] = {
    "queries, behind views": (lambda p, x: attention(heads(p["a"](x) * 0.5), heads(x), heads(x), scale=1.0), 0.5),
    "queries, before views": (lambda p, x: attention(heads(p["a"](x)) * 0.5, heads(x), heads(x)), 0.5 / sqrt(HEAD)),
    "queries, before a copy": (
        lambda p, x: attention(heads(p["a"](x) * 0.5).contiguous(), heads(x), heads(x), scale=1.0),
        0.5,
    ),
    "keys": (lambda p, x: attention(heads(x), heads(p["a"](x) / 4), heads(x), scale=3.0), 0.75),
    "both": (lambda p, x: attention(heads(p["a"](x) * 2), heads(p["b"](x) * 3), heads(x), scale=1.0), 6.0),
    "one tensor as both": (lambda p, x: attention(y := heads(p["a"](x) * 2), y, heads(x), scale=1.0), 4.0),
    "one after the other": (lambda p, x: attention(heads(p["a"](x) * 2) * 3, heads(x), heads(x), scale=1.0), 6.0),
    "an input of the model": (lambda p, x: attention(heads(x * 2), heads(p["a"](x)), heads(x), scale=1.0), 2.0),
    "beside a mask": (
        lambda p, x: attention(heads(p["a"](x) * 2), heads(x), heads(x), p["a"](x)[:, None, :, :6], scale=1.0),
        2.0,
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", FOLDED)
def test_a_number_becomes_a_part_of_the_scale(where: str, device: str) -> None:
    forward, scale = FOLDED[where]
    module = parts(forward).to(device)
    program, patterns = folded(module, rows(device))
    assert scales(program) == [pytest.approx(scale)] and {"mul", "div"}.isdisjoint(names(program)) and patterns
    agrees(module, program, rows(device))


KEPT: dict[str, Callable[..., object]] = {
    "another reads it": lambda p, x: (y := p["a"](x) * 2, attention(heads(y), heads(x), heads(x))),
    "another reads a view of it": lambda p, x: (y := heads(p["a"](x) * 2), attention(y, heads(x), heads(x)), y + 1),
    "values are multiplied": lambda p, x: attention(heads(x), heads(x), heads(p["a"](x) * 2)),
    "values are it too": lambda p, x: attention(y := heads(p["a"](x) * 2), y, y),
    "the mask is it too": lambda p, x: attention(y := p["a"](x) * 2, x, x, y[0, :, :6]),
    "all are weights": lambda p, x: attention(w := p["a"].weight, w, p["b"].weight, w) + x[0, 0],
    "values are weights, and all else is multiplied and read": lambda p, x: (
        y := p["a"](x) * 2,
        attention(y, y, p["b"].weight[:6].expand(2, 6, 16)) + y,
    ),
    "a tensor multiplies": lambda p, x: attention(heads(p["a"](x) * x[0, 0, 0]), heads(x), heads(x)),
    "scores would change their sign": lambda p, x: attention(heads(p["a"](x) * -2), heads(x), heads(x)),
    "nothing is left": lambda p, x: attention(heads(p["a"](x) * 0), heads(x), heads(x)),
    "it lies otherwise": lambda p, x: attention(x.expand(2, 2, 6, 16) * 2, x[None], x[None]),
    "its memory is read at a place": lambda p, x: attention(
        (heads(p["a"](x))[1:] * 2).as_strided((1, 2, 6, HEAD), (96, 8, 16, 1), 0), heads(x)[:1], heads(x)[:1]
    ),
    "its bits are read": lambda p, x: attention(
        heads(x.double() * 2).view(torch.float32), y := heads(x).repeat(1, 1, 1, 2), y
    ),
    "something comes between": lambda p, x: attention(heads((p["a"](x) * 2).relu()), heads(x), heads(x)),
}


@pytest.mark.parametrize("why", KEPT)
def test_it_stays_where(why: str) -> None:
    module = parts(KEPT[why])
    captured = capture(module, (rows(),))
    program, decisions = fold_scales(captured, COUNTING)
    assert program.calls == captured.calls and not decisions
    agrees(module, program, rows())


class Written(nn.Module):
    """A buffer that is multiplied, and written before attention reads the product."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queries", torch.randn(2, 6, 2 * HEAD, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        doubled = heads(self.queries) * 2
        self.queries.copy_(x)
        return attention(doubled, heads(x), heads(x))


def test_what_is_written_in_between_is_multiplied_before() -> None:
    captured = capture(Written().eval(), (rows(),))
    assert captured.changed
    program, decisions = fold_scales(captured, COUNTING)
    assert program.calls == captured.calls and not decisions


@examples(30)
@given(
    st.lists(st.tuples(st.sampled_from(["mul", "div", "view", "turned"]), st.sampled_from([1, 2, 0.125, 3.0])), max_size=6),
    st.lists(st.tuples(st.sampled_from(["mul", "div", "view", "turned"]), st.sampled_from([1, 2, 0.125, 3.0])), max_size=6),
    st.sampled_from([None, 0.3]),
)
def test_any_way_to_queries_and_keys_computes_the_same(
    to_queries: list[tuple[str, float]], to_keys: list[tuple[str, float]], scale: float | None
) -> None:
    def moved(x: Tensor, steps: list[tuple[str, float]]) -> Tensor:
        for step, number in steps:
            if step == "mul":
                x = x * number
            elif step == "div":
                x = x / number
            elif step == "view":
                x = x.unflatten(1, (2, 1)).flatten(1, 2)
            else:
                x = x.transpose(0, 1).transpose(0, 1)
        return x

    def forward(p: Any, x: Tensor) -> Tensor:
        return attention(moved(heads(p["a"](x)), to_queries), moved(heads(p["b"](x)), to_keys), heads(x), scale=scale)

    module = parts(forward)
    program, _ = folded(module, rows())
    numbers = [n if step == "mul" else 1 / n for step, n in (*to_queries, *to_keys) if step in ("mul", "div")]
    if numbers:
        assert scales(program) == [pytest.approx((scale or 1 / sqrt(HEAD)) * prod(numbers))]
    agrees(module, program, rows())


def test_whispers_queries_are_scaled_by_its_attention() -> None:
    model = models.load("whisper_small", 1, size="small")
    module = model.module.eval()
    captured = capture(module, model.inputs)
    program, decisions = fold_scales(captured, COUNTING)
    assert len(decisions) == len(scales(program)) and "mul" in names(captured) and "mul" not in names(program)
    for got, expected in zip(program.run(model.inputs), captured.run(model.inputs), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
