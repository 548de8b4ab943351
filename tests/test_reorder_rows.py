"""Products whose rows come in another order than others read their results in: found, measured, mended."""

from collections.abc import Callable
from itertools import count

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import DEVICES, Function, agrees, measuring, names, tokens
from torch import Tensor, nn
from torch.nn.functional import linear

from systems.scheduling.decision import Decision
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.passes.reorder_rows import reorder_rows


def strided_reads(program: Program) -> float:
    """A cost by which a product copies what is not contiguous, which takes as long as a copy that the model makes."""
    values = [
        program.value(call.args[0]) for call, name in zip(program.calls, names(program), strict=True) if name == "linear"
    ]
    return float(names(program).count("clone") + sum(not x.is_contiguous() for x in values))


def reordered(module: nn.Module, *inputs: Tensor) -> tuple[Program, list[Decision]]:
    return reorder_rows(capture(module, inputs), measuring(strided_reads))


def parts(forward: Callable[..., object]) -> Function:
    torch.manual_seed(0)
    attention = {f"m{i}": nn.MultiheadAttention(8, 1, batch_first=i < 2) for i in range(3)}
    return Function(forward, a=nn.Linear(8, 8), out=nn.Linear(8, 8), norm=nn.LayerNorm(8), **attention).eval()


def attends(p: nn.ModuleDict, x: Tensor, name: str) -> Tensor:
    y = p["norm"](x)
    return x + p[name](y, y, y, need_weights=False)[0]


def stack(p: nn.ModuleDict, x: Tensor) -> Tensor:
    return p["out"](attends(p, attends(p, x, "m0"), "m1"))


@pytest.mark.parametrize("device", DEVICES)
def test_attention_copies_nothing_in_the_order_of_its_callers(device: str) -> None:
    module = parts(stack).to(device)
    program, decisions = reordered(module, tokens(device))
    assert strided_reads(program) == 0 and {d.chosen for d in decisions} == {"reordered"}
    assert sum(len(d.operators) for d in decisions) == 4
    assert "around linear + scaled_dot_product_attention + linear + add" in decisions[0].pattern
    agrees(module, program, tokens(device))


def test_an_attention_with_the_sequence_first_copies_nothing_either() -> None:
    module = parts(lambda p, x: attends(p, x, "m2"))
    captured = capture(module, (tokens(),))
    assert names(captured).count("clone") == 1
    program, (decision,) = reordered(module, tokens())
    assert names(program).count("clone") == 0 and decision.chosen == "reordered"
    agrees(module, program, tokens())


def test_equal_places_are_measured_once_and_stay_where_that_is_faster() -> None:
    measured: list[float] = []

    def cost(program: Program) -> float:
        measured.append(strided_reads(program))
        return -measured[-1]

    module = parts(lambda p, x: (attends(p, x, "m0"), attends(p, x.flip(0), "m0")))
    captured = capture(module, (tokens(),))
    program, decisions = reorder_rows(captured, measuring(cost))
    assert len(measured) == 2 and measured[0] > measured[1] == 0
    assert [d.chosen for d in decisions] == ["as captured"] * 2 and decisions[0].place == decisions[1].place
    assert names(program) == names(captured)


def test_a_choice_reorders_a_part_of_the_places() -> None:
    module = parts(lambda p, x: (attends(p, x, "m0"), attends(p, x.flip(0)[:1].repeat(3, 1, 1), "m2")))
    captured = capture(module, (tokens(),))
    decisions = reorder_rows(captured, measuring(strided_reads))[1]
    assert len(decisions) == 2
    context = measuring(strided_reads)
    context = type(context)(context.cost, context.cost_at_once, choices={decisions[0].place: "as captured"})
    program, chosen = reorder_rows(captured, context)
    assert [d.chosen for d in chosen] == ["as captured", "reordered"]
    agrees(module, program, tokens())


def rows(x: Tensor) -> Tensor:
    """The sequence first, in one dimension with the batch."""
    return x.transpose(0, 1).contiguous().view(12, 8)


def turned(x: Tensor) -> Tensor:
    """The batch first again."""
    return x.view(6, 2, 8).transpose(0, 1)


STAYS: dict[str, Callable[..., object]] = {
    "the rows are in order": lambda p, x: p["out"](p["a"](x).view(12, 8)).relu().view(2, 6, 8) + 1,
    "a caller sees it": lambda p, x: p["a"](rows(x * 2)).view(6, 2, 8).transpose(0, 1),
    "a view would span two strides": lambda p, x: p["a"](rows(x * 2)).relu() + 1,
    "a part alone is read": lambda p, x: p["a"](rows(x * 2)).view(6, 2, 8)[1:].relu() + 1,
    "a bias has rows of its own": lambda p, x: x + turned(linear(rows(x * 2), p["a"].weight, x.view(12, 8))),
    "its memory is read at an offset": lambda p, x: (
        p["a"](x.transpose(0, 1))[:, 1].contiguous().as_strided((6, 8), (8, 1), 0) + 1
    ),
    "a number is read beside it": lambda p, x: 1 + turned(p["a"](rows(x * 2))) * x.sum().item(),
    "it is a product of vectors": lambda p, x: linear(x[0, 0] * 2, p["a"].weight[0]) + x,
    "there are no rows": lambda p, x: attends(p, x[:, :0], "m2"),
    "an operator computes between": lambda p, x: p["out"](p["a"](x).relu()) + 1,
}


@pytest.mark.parametrize("why", STAYS)
def test_rows_stay_where(why: str) -> None:
    module = parts(STAYS[why])
    program, decisions = reordered(module, tokens())
    assert names(program) == names(capture(module, (tokens(),))) and decisions == []


def test_a_product_that_nothing_reads_stays() -> None:
    """Export keeps it for an assertion, which is no operator."""

    def forward(p: nn.ModuleDict, x: Tensor) -> Tensor:
        p["a"](x.transpose(0, 1)).transpose(0, 1).float()
        return x * 2

    program, decisions = reordered(parts(forward), tokens())
    assert "linear" in names(program) and decisions == []


def test_what_is_written_later_is_copied_before() -> None:
    """A product of a cache's copy, whose rows others read the other way round."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.ones(2, 6, 8))
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            before = rows(self.cache)
            self.cache.add_(x)
            return x + self.a(before).view(6, 2, 8).transpose(0, 1)

    program, decisions = reordered(Cached().eval(), tokens())
    assert program.changed and decisions == []


@pytest.mark.parametrize("batch", [1, 2])
def test_a_real_network_agrees(batch: int) -> None:
    """Its decoder attends to what the encoder returns, which PyTorch's fast path does not take."""
    torch.manual_seed(0)
    module = nn.Transformer(32, 4, 1, 2, 64, batch_first=True).eval()
    inputs = torch.randn(batch, 6, 32), torch.randn(batch, 5, 32)
    program, decisions = reordered(module, *inputs)
    assert strided_reads(program) < strided_reads(capture(module, inputs)) and decisions
    agrees(module, program, *inputs, tolerance=1e-4)


MOVES: list[Callable[[Tensor, int, int], Tensor]] = [
    lambda x, i, j: x.transpose(i % x.dim(), j % x.dim()),
    lambda x, i, j: x.contiguous(),
    lambda x, i, j: x.flatten(i % x.dim(), max(i % x.dim(), j % x.dim())),
    lambda x, i, j: x.unflatten(i % x.dim(), (2, -1)) if x.shape[i % x.dim()] % 2 == 0 else x,
    lambda x, i, j: x.unsqueeze(i % x.dim()),
    lambda x, i, j: x.select(i % x.dim(), 0) if x.dim() > 2 else x,
]


class Made(nn.Module):
    """Products with moves around them, as drawn."""

    def __init__(self, steps: list[list[tuple[int, int, int]]]):
        super().__init__()
        self.steps = steps
        torch.manual_seed(0)
        self.linears = nn.ModuleDict({str(n): nn.Linear(n, 4) for n in (1, 2, 3, 4, 6, 8, 12, 24, 48)})

    def forward(self, x: Tensor) -> Tensor:
        for k, moves in enumerate(self.steps):
            for move, i, j in moves:
                x = MOVES[move](x, i, j)
            size = str(x.shape[-1])
            x = self.linears[size](x) if k % 2 == 0 and size in self.linears else x.tanh()
        return (x * torch.linspace(0, 1, x.numel()).view(x.shape)).sum()


DIMENSIONS = st.integers(0, 3)
STEPS = st.lists(st.tuples(st.integers(0, len(MOVES) - 1), DIMENSIONS, DIMENSIONS), max_size=4)


@given(st.lists(STEPS, min_size=2, max_size=5))
@examples(100)
def test_whatever_is_reordered_computes_the_same(steps: list[list[tuple[int, int, int]]]) -> None:
    module, x = Made(steps).eval(), torch.randn(4, 6, 2)
    falling = count(0, -1)  # what is measured later is faster: all that can be reordered is
    program, _ = reorder_rows(capture(module, (x,)), measuring(lambda _: float(next(falling))))
    agrees(module, program, x)
