"""Chains of elementwise operators that lie in another order than that of their dimensions: found, measured, mended."""

from collections.abc import Callable

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import DEVICES, Function, agrees, measuring, names, tokens
from torch import Tensor, nn

from systems.scheduling.decision import Decision
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.passes.make_contiguous import make_contiguous


def parts(forward: Callable[..., object]) -> Function:
    torch.manual_seed(0)
    return Function(forward, a=nn.Linear(8, 8), norm=nn.LayerNorm(8), conv=nn.Conv1d(8, 8, 3, padding=1)).eval()


def strided_reads(program: Program) -> float:
    """A cost by which a copy takes as long as reading two tensors that are not contiguous."""
    values = [[program.value(a) for a in call.leaves()] for call in program.calls]
    strided = [sum(isinstance(t, Tensor) and not t.is_contiguous() for t in tensors) for tensors in values]
    return sum(2.0 if name == "clone" else float(count) for name, count in zip(names(program), strided, strict=True))


def mended(module: nn.Module, *inputs: Tensor) -> tuple[Program, list[Decision]]:
    return make_contiguous(capture(module, inputs), measuring(strided_reads))


def whisper(p: nn.ModuleDict, x: Tensor) -> Tensor:
    """A residual stream that begins with a convolution over time."""
    x = p["conv"](x.transpose(1, 2)).transpose(1, 2) + p["a"].bias
    for _ in range(3):
        x = x + p["a"](p["norm"](x))
    return p["norm"](x)


@pytest.mark.parametrize("device", DEVICES)
def test_a_residual_stream_is_made_contiguous_once(device: str) -> None:
    module = parts(whisper).to(device)
    program, (decision,) = mended(module, tokens(device))
    assert decision.chosen == "contiguous" and decision.pattern == "add of 2x6x8, read by 7"
    assert names(program).count("clone") == 1
    residual = [program.calls[v].produces for v, name in enumerate(names(program)) if name in ("add", "layer_norm")]
    assert len(residual) == 8 and all(t.is_contiguous() for t in residual)
    agrees(module, program, tokens(device))


STAYS: dict[str, Callable[..., object]] = {
    "few read it": lambda p, x: p["a"](p["conv"](x.transpose(1, 2)).transpose(1, 2) + 1),
    "a caller would see it": lambda p, x: (
        y := p["conv"](x.transpose(1, 2)).transpose(1, 2) + 1,
        p["a"](y),
        p["norm"](y),
        y * 2,
    ),
    "it is contiguous": lambda p, x: p["norm"](p["a"](x) + 1) + p["norm"](p["a"](x) + 2),
}


@pytest.mark.parametrize("why", STAYS)
def test_a_tensor_stays_as_it_lies_where(why: str) -> None:
    module = parts(STAYS[why])
    program, decisions = mended(module, tokens())
    assert names(program) == names(capture(module, (tokens(),))) and {d.chosen for d in decisions} <= {"as captured"}


def test_an_image_in_channels_last_stays() -> None:
    module = Function(lambda p, x: p["a"](p["a"]((p["a"](x) + 1) * 2) * 2), a=nn.Conv2d(4, 4, 1)).eval()
    module.to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    assert mended(module, x)[1] == []


STEPS: list[Callable[[list[Tensor], int, int], Tensor]] = [
    lambda seen, i, j: seen[i] + seen[j],
    lambda seen, i, j: seen[i].tanh(),
    lambda seen, i, j: seen[i].transpose(0, 1),
    lambda seen, i, j: torch.nn.functional.layer_norm(seen[i], (4,)),
    lambda seen, i, j: seen[i] @ torch.full((4, 4), 0.25),
    lambda seen, i, j: seen[i].contiguous(),
]


class Made(nn.Module):
    def __init__(self, steps: list[tuple[int, int, int]]):
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        seen = [x, x * 2]
        for step, i, j in self.steps:
            seen.append(STEPS[step](seen, i % len(seen), j % len(seen)))
        return seen[-1] + 1, seen[-2] * 3


MADE = st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=12)


@examples(25)
@given(steps=MADE, is_always=st.booleans())
def test_any_program_computes_the_same_and_returns_the_same_strides(
    steps: list[tuple[int, int, int]], is_always: bool
) -> None:
    module, x = Made(steps).eval(), torch.randn(4, 4, 4)
    captured = capture(module, (x,))
    cost = (lambda program: -float(len(program.graph))) if is_always else strided_reads
    program, _ = make_contiguous(captured, measuring(cost))
    values: list[Tensor] = []
    for v, call in enumerate(program.calls):
        values.append(program.execute(v, values, [x]))
        assert values[v].stride() == call.produces.stride(), "the program knows how its tensors lie"
    agrees(module, program, x)
