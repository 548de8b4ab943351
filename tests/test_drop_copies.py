"""Copies that only change how a tensor lies in memory: which can be left out, and what must keep them."""

from collections.abc import Callable

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import DEVICES, Function, agrees, measuring, names, tokens
from test_make_contiguous import MADE, Made
from torch import Tensor, nn
from torch.nn import functional

from systems.scheduling.decision import Decision
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Call, Output, Program
from systems.scheduling.graph.rewrite import Replacement, replace
from systems.scheduling.passes.context import Cost
from systems.scheduling.passes.drop_copies import drop_copies


def copies(program: Program) -> float:
    return float(names(program).count("clone"))


def dropped(module: nn.Module, *inputs: Tensor, cost: Cost = copies) -> tuple[Program, list[Decision]]:
    return drop_copies(capture(module, inputs), measuring(cost))


def parts(forward: Callable[..., object]) -> Function:
    torch.manual_seed(0)
    return Function(forward, a=nn.Linear(8, 8), out=nn.Linear(8, 8)).eval()


def heads(x: Tensor) -> Tensor:
    return x.view(2, 6, 2, 4).transpose(1, 2).contiguous()


def attending(p: nn.ModuleDict, x: Tensor) -> Tensor:
    """As Whisper attends: each of its tensors is copied before, and the output after."""
    for _ in range(2):
        query, key, value = heads(p["a"](x) * 0.5), heads(p["a"](x)), heads(p["out"](x))
        y = functional.scaled_dot_product_attention(query, key, value)
        x = p["out"](y.transpose(1, 2).reshape(2, 6, 8)) + x
    return x


@pytest.mark.parametrize("device", DEVICES)
def test_an_attention_takes_its_tensors_as_they_lie(device: str) -> None:
    module = parts(attending).to(device)
    captured = capture(module, (tokens(device),))
    copied = 4 if device == "cpu" else 3  # a GPU's attention writes its output as it is read
    assert names(captured).count("clone") == 2 * copied
    program, decisions = drop_copies(captured, measuring(copies))
    assert [(len(d.operators), d.chosen, d.kind) for d in decisions] == [(copied, "dropped", "drop_copies")] * 2
    assert decisions[0].pattern == f"{copied} around scaled_dot_product_attention" + " + linear" * (device == "cpu")
    assert names(program).count("clone") == 0
    agrees(module, program, tokens(device))


def test_equal_places_are_measured_once_and_stay_where_that_is_faster() -> None:
    measured: list[float] = []

    def cost(program: Program) -> float:
        measured.append(copies(program))
        return -copies(program)

    module = parts(attending)
    program, decisions = dropped(module, tokens(), cost=cost)
    assert measured == [4.0, 0.0] and {d.chosen for d in decisions} == {"copied"}
    assert names(program) == names(capture(module, (tokens(),)))


STAYS: dict[str, Callable[..., object]] = {
    "a view would span two strides": lambda p, x: p["a"](p["a"](x).transpose(0, 1).contiguous().view(12, 8)),
    "a caller sees it": lambda p, x: p["a"](x).transpose(0, 1).contiguous(),
    "a caller sees a view of it": lambda p, x: p["a"](x).transpose(0, 1).contiguous()[:3],
    "what reads it would return other strides to a caller": lambda p, x: p["a"](x).transpose(0, 1).contiguous() * 2,
    "an input is copied": lambda p, x: p["a"](x.transpose(0, 1).contiguous()),
    "a tensor of the module's is copied": lambda p, x: x @ p["a"].weight.t().contiguous(),
    "it spreads what lies once": lambda p, x: p["a"](x)[:, :1].expand(2, 6, 8).contiguous().view(96),
}


@pytest.mark.parametrize("why", STAYS)
def test_a_copy_stays_where(why: str) -> None:
    module = parts(STAYS[why])
    program, decisions = dropped(module, tokens())
    assert decisions == [] and names(program) == names(capture(module, (tokens(),)))
    assert "clone" in names(program) or why == "it spreads what lies once"


def test_an_image_becomes_tokens_and_one_again_without_a_copy() -> None:
    """As around the attention of a diffusion model, between convolutions in channels_last."""
    module = Function(
        lambda p, x: (
            p["c"]((p["a"](p["c"](x).permute(0, 2, 3, 1).contiguous())).permute(0, 3, 1, 2).contiguous()).relu().sum()
        ),
        a=nn.Linear(8, 8),
        c=nn.Conv2d(8, 8, 1),
    ).eval()
    x = torch.randn(2, 8, 6, 6)
    captured = capture(module, (x,))
    program, decisions = drop_copies(captured, measuring(copies))
    assert names(program).count("clone") == 1, "the convolution reads the layout that it read"
    assert [d.pattern for d in decisions] == ["1 around linear"]
    module.to(memory_format=torch.channels_last)
    captured = capture(module, (x.contiguous(memory_format=torch.channels_last),))
    assert drop_copies(captured, measuring(copies))[1] == []


def test_a_product_with_one_is_a_copy() -> None:
    module = parts(lambda p, x: p["a"](p["a"](x) / 1.0 * 1) + p["a"](x) / 2.0 + p["a"](x).int() / 1 + p["a"](x) * x[0, 0, 0])
    program, decisions = dropped(module, tokens(), cost=lambda p: float(len({"mul", "div"} & {*names(p)})))
    assert [d.chosen for d in decisions] == ["dropped"] and len(decisions[0].operators) == 2
    assert names(program).count("div") == 2 and names(program).count("mul") == 1
    agrees(module, program, tokens())


class Remembering(nn.Module):
    """Copies what a buffer holds, and then writes there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        before = self.seen.transpose(0, 1).contiguous()
        self.seen.copy_(x.transpose(0, 1) * 2)
        return before.relu() + x


def test_a_copy_of_what_a_buffer_holds_stays() -> None:
    program, decisions = dropped(Remembering().eval(), tokens())
    assert "clone" in names(program) and not decisions


def test_a_copy_that_a_caller_sees_stays_also_where_it_lies_as_what_it_copies() -> None:
    captured = capture(parts(lambda p, x: ((y := p["a"](x)), y.relu())), (tokens(),))
    linear, relu = captured.calls
    copied = Call(torch.ops.aten.clone.default, relu.args, {}, linear.produces)
    program = replace(captured, [Replacement((1,), "clone", "aten.clone.default", copied, {1: None})])[0]
    assert program.outputs == (Output(0), Output(1))
    assert drop_copies(program, measuring(copies))[1] == []


@examples(25)
@given(steps=MADE, is_always=st.booleans())
def test_any_program_computes_the_same_in_memory_of_its_own(steps: list[tuple[int, int, int]], is_always: bool) -> None:
    module, x = Made(steps).eval(), torch.randn(4, 4, 4)
    captured = capture(module, (x,))
    program, _ = drop_copies(captured, measuring((lambda p: copies(p)) if is_always else (lambda p: -copies(p))))
    assert not is_always or names(program).count("clone") <= names(captured).count("clone")
    agrees(module, program, x)
    outputs, before = program.run([x]), x.clone()
    for out in outputs:
        out.zero_()
    assert torch.equal(x, before)
