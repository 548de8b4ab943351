"""Concatenations, copies and lookups fused with what is elementwise: each pattern, what must not match, any graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import COUNTING, DEVICES, Function, agrees, measuring, names, tokens
from torch import Tensor, nn

from systems.scheduling.decision import Decision
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.fused_kernel import MAX_INPUTS, FusedKernel
from systems.scheduling.graph.program import Program
from systems.scheduling.passes.fuse_elementwise import fuse_elementwise
from systems.scheduling.passes.fuse_moves import MAX_LOOKUP_INPUTS, fuse_moves

PLACES = torch.tensor([3, 0, 5, 1])


@pytest.fixture(autouse=True)
def runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchInductor compiles for a CPU as well; the pass leaves it out, since there it takes seconds and gains nothing."""
    monkeypatch.setattr("systems.scheduling.passes.fuse_moves.has_kernels", lambda device: True)


def fused(module: nn.Module, *inputs: Tensor) -> tuple[Program, list[Decision]]:
    return fuse_moves(capture(module, inputs), COUNTING)


def parts(forward: Callable[..., object]) -> Function:
    torch.manual_seed(0)
    places = nn.Module()
    places.register_buffer("rows", PLACES)
    return Function(forward, a=nn.Linear(8, 8), words=nn.Embedding(7, 8), conv=nn.Conv1d(6, 6, 1), places=places).eval()


def halves_turned(x: Tensor) -> Tensor:
    """As Llama and Qwen place what they rotate."""
    return torch.cat((-x[..., 4:], x[..., :4]), -1)


def pairs_turned(x: Tensor) -> Tensor:
    """As GPT-J does."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


FUSED: dict[str, tuple[Callable[..., object], list[str]]] = {
    "halves that are rotated": (
        lambda p, x: (y := p["a"](x)) * 0.5 + halves_turned(y) * 2,
        ["linear", "slice", "slice", "mul_neg_cat_mul_add"],
    ),
    "pairs that are rotated beside what passes": (
        lambda p, x: torch.cat(((y := p["a"](x)[..., :4]) * 0.5 + pairs_turned(y) * 2, p["a"](x)[..., 4:]), -1),
        ["linear", "slice", "slice", "slice", "linear", "slice", "mul_neg_stack_mul_add_cat"],
    ),
    "a sum of embeddings": (
        lambda p, x: p["a"](p["words"](p["places"].rows) + p["words"].weight[p["places"].rows]) + x[:, :4],
        ["embedding_index_add", "linear", "slice", "add"],
    ),
    "a copy into another layout": (
        lambda p, x: (p["a"](x) + 1).transpose(1, 2).contiguous(),
        ["linear", "add_transpose_clone"],
    ),
    "windows that are rolled": (lambda p, x: p["a"](x).roll(2, 1).transpose(0, 1) * 2, ["linear", "roll_transpose_mul"]),
    "rows that are sent to experts": (
        lambda p, x: p["a"](x)[:, p["places"].rows // 2] * x[:, p["places"].rows],
        ["linear", "floor_divide_index_index_mul"],
    ),
    "rows that come back from experts": (
        lambda p, x: p["a"](x * 2)[:, p["places"].rows].view(2, 2, 2, 8).sum(1) + x[:, :2],
        ["mul", "linear", "slice", "index_sum_add"],
    ),
    "a frame": (lambda p, x: nn.functional.pad(p["a"](x).relu(), (1, 1)), ["linear", "relu_pad"]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pattern", FUSED)
def test_what_moves_is_fused_with_what_is_elementwise(pattern: str, device: str) -> None:
    forward, expected = FUSED[pattern]
    module = parts(forward).to(device)
    program, decisions = fused(module, tokens(device))
    assert names(program) == expected
    assert decisions and all(d.chosen == "fused" and d.kind == "fuse_moves" for d in decisions)
    agrees(module, program, tokens(device))


def many(p: nn.ModuleDict, x: Tensor) -> Tensor:
    return torch.cat([p["a"](x * i) for i in range(MAX_INPUTS + 1)]) * 2


NOT_FUSED: dict[str, Callable[..., object]] = {
    "nothing is elementwise": lambda p, x: p["a"](torch.cat((p["a"](x), x), 1)),
    "nothing moves": lambda p, x: p["a"](x).relu() + 1,
    "rows themselves are summed": lambda p, x: p["a"](x)[:, p["places"].rows].sum(-1, keepdim=True).expand(2, 4, 8) @ x.mT,
    "many rows are summed": lambda p, x: p["a"](x).repeat(1, 2, 1).sum(1),
    "others read what is moved": lambda p, x: (y := torch.cat((p["a"](x), x), 1), p["a"](y), y * 2),
    "a kernel would read too much": many,
    "a convolution's bias is taken over": lambda p, x: torch.cat((p["conv"](x).relu(), x), 1),
}


@pytest.mark.parametrize("why", NOT_FUSED)
def test_nothing_is_fused_where(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedKernel, "_compile", lambda self, inputs: self.module)
    module = parts(NOT_FUSED[why])
    program, decisions = fused(module, tokens())
    assert decisions == [] and not any(isinstance(call.function, FusedKernel) for call in program.calls)


def test_what_is_slower_stays_apart_as_a_later_pass_fuses_it() -> None:
    measured: list[list[str]] = []

    def cost(program: Program) -> float:
        measured.append(names(program))
        return -float(len(program.graph))

    module = parts(lambda p, x: p["a"](halves_turned(p["a"](x)) * 2 + 1) + halves_turned(p["a"](x)) * 2 + 1)
    captured = capture(module, (tokens(),))
    program, decisions = fuse_moves(captured, measuring(cost, later=lambda part: fuse_elementwise(part, COUNTING)[0]))
    assert names(program) == names(captured) and [d.chosen for d in decisions] == ["separate"] * 2
    assert measured[0] == ["neg", "cat", "mul_add"]
    assert len(measured) == 4, "each distinct group is measured once, both ways"


STEPS: list[Callable[[list[Tensor], int, int], Tensor]] = [
    lambda seen, i, j: seen[i] + seen[j],
    lambda seen, i, j: seen[i].tanh(),
    lambda seen, i, j: torch.cat((seen[i][..., 2:], -seen[j][..., :2]), -1),
    lambda seen, i, j: torch.stack((seen[i][..., ::2], seen[j][..., 1::2]), -1).flatten(-2),
    lambda seen, i, j: seen[i] @ torch.full((4, 4), 0.25),
    lambda seen, i, j: seen[i].transpose(1, 2).contiguous().reshape(2, 3, 4),
    lambda seen, i, j: seen[i][:, torch.tensor([2, 0, 1])],
    lambda seen, i, j: seen[i].roll(1, 1).flip(2),
    lambda seen, i, j: seen[i].view(2, 3, 2, 2).sum((0, 2)).expand(4, 3, 2).reshape(2, 3, 4),
    lambda seen, i, j: seen[i].mean(1, keepdim=True) + seen[j],
]


class Made(nn.Module):
    def __init__(self, steps: list[tuple[int, int, int]]):
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        seen = [x]
        for step, i, j in self.steps:
            seen.append(STEPS[step](seen, i % len(seen), j % len(seen)))
        return tuple(seen[-2:])


@examples(50)
@given(st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 50), st.integers(0, 50)), min_size=2, max_size=14))
@pytest.mark.slow
def test_any_graph_computes_what_it_did(steps: list[tuple[int, int, int]]) -> None:
    """Kernels are run as the graphs that they are compiled from: what is grouped is in question here, not TorchInductor."""
    x = torch.randn(2, 3, 4)
    captured = capture(Made(steps), (x,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedKernel, "_compile", lambda self, inputs: self.module)
        program, decisions = fuse_moves(captured, COUNTING)
        got, expected = program.run((x,)), captured.run((x,))
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(got, expected, strict=True))
    taken: list[Any] = [v for d in decisions if d.chosen == "fused" for v in d.operators]
    assert len(taken) == len(set(taken))
    assert len(program.graph) == len(captured.graph) - len(taken) + sum(d.chosen == "fused" for d in decisions)


@pytest.mark.parametrize("changes", [lambda y: y * 1.0, lambda y: y + 0, lambda y: y * 1])
def test_an_output_lies_as_planned_where_the_last_operator_changes_nothing(changes: Callable[[Tensor], Tensor]) -> None:
    """TorchInductor returns a view of the concatenation then, which another view cannot flatten."""
    head = nn.Linear(144, 3)
    module = Function(lambda p, x: p["head"](changes(torch.cat((x * 2, x), 1)[:, 1::2]).view(2, -1)), head=head).eval()
    x = torch.randn(2, 4, 6, 6)
    program, decisions = fused(module, x)
    assert [decision.chosen for decision in decisions] == ["fused"]
    agrees(module, program, x)


class Features(nn.Module):
    """As a recommender has them: a lookup a feature, beside numbers that are computed."""

    def __init__(self, num_tables: int, num_others: int):
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(5 + i, 4) for i in range(num_tables))
        self.linear, self.num_others = nn.Linear(num_tables, 4), num_others

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.float())
        parts = [table(column) for table, column in zip(self.tables, x.unbind(1), strict=True)]
        return torch.stack([*parts, *(y[:, i : i + 1].expand(-1, 4) for i in range(self.num_others))], 1) * 2


@pytest.mark.parametrize("device", DEVICES)
def test_dozens_of_lookups_become_one_kernel(device: str) -> None:
    module, x = Features(26, 2).eval().to(device), torch.randint(5, (3, 26), device=device)
    captured = capture(module, (x,))
    program, (decision,) = fuse_moves(captured, COUNTING)
    assert decision.chosen == "fused" and len(decision.operators) >= 28 and not {"embedding", "stack"} & set(names(program))
    (kernel,) = [call.function for call in program.calls if isinstance(call.function, FusedKernel)]
    assert kernel.options == {"force_pointwise_cat": True}
    with torch.no_grad():
        torch.testing.assert_close(program.run((x,))[0], module(x))


def test_a_kernel_takes_so_many_lookups_and_other_tensors() -> None:
    """Of others MAX_INPUTS; of lookups those whose arguments a launch can hold."""
    x = torch.randint(5, (3, 120))
    program, (decision,) = fuse_moves(capture(Features(120, 1).eval(), (x,)), COUNTING)
    (kernel,) = [call for call in program.calls if isinstance(call.function, FusedKernel)]
    assert decision.chosen == "fused" and MAX_INPUTS < len(kernel.args) <= MAX_LOOKUP_INPUTS
    assert 0 < names(program).count("embedding") < 120

    def many(p: nn.ModuleDict, x: Tensor) -> Tensor:
        y = [p["a"](x) for _ in range(MAX_INPUTS + 1)]
        return torch.cat(y, -1) * 2

    module = parts(many)
    program, decisions = fuse_moves(capture(module, (tokens(),)), COUNTING)
    assert decisions == [] and "cat" in names(program)


def test_a_group_that_does_not_compile_stays_separate() -> None:
    def cost(program: Program) -> float:
        if any(isinstance(call.function, FusedKernel) for call in program.calls):
            raise RuntimeError("out of resource")
        return 1.0

    captured = capture(Features(26, 2).eval(), (torch.randint(5, (3, 26)),))
    program, (decision,) = fuse_moves(captured, measuring(cost))
    assert decision.chosen == "separate" and decision.reasons == {"fused": "out of resource"}
    assert program.graph == captured.graph
