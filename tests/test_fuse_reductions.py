"""Reductions fused with what is elementwise around them: each pattern, what must not match, any graph; whole models."""

from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
from dags import as_networkx
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import COUNTING, DEVICES, Function, agrees, measuring, names, takes_new_weights, tokens
from torch import Tensor, nn

import models
import systems
from runners.measurements.correctness import relative_error
from systems.scheduling.decision import Decision
from systems.scheduling.graph import patterns
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.fused_kernel import MAX_INPUTS, FusedKernel
from systems.scheduling.graph.part import alone
from systems.scheduling.graph.program import Call, Input, Program
from systems.scheduling.passes.fuse_elementwise import fuse_elementwise
from systems.scheduling.passes.fuse_reductions import fuse_reductions

functional = nn.functional


def fused(module: nn.Module, x: Tensor) -> tuple[Program, list[Decision]]:
    return fuse_reductions(capture(module, (x,)), COUNTING)


def root_mean_square(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def joined(*outputs: Tensor) -> tuple[Tensor, ...]:
    return outputs


FUSED: dict[str, tuple[Callable[..., object], list[str]]] = {
    "a residual before a norm": (lambda p, x: p["norm"](p["a"](x) + x), ["linear", "add_layer_norm"]),
    "a residual that is passed on": (
        lambda p, x: p["a"](p["norm"](y := p["a"](x) + x)) + y,
        ["linear", "add_layer_norm", "linear", "add"],
    ),
    "a residual that is an output": (lambda p, x: joined(y := p["a"](x) + x, p["norm"](y)), ["linear", "add_layer_norm"]),
    "a norm before its activation": (lambda p, x: p["norm"](p["a"](x)).relu(), ["linear", "layer_norm_relu"]),
    "a root mean square": (lambda p, x: root_mean_square(p["a"](x) + x), ["linear", "add_pow_mean_add_rsqrt_mul"]),
    "a root mean square of more precise numbers": (
        lambda p, x: p["a"](root_mean_square(p["a"](x).double()).float() * 2),
        ["linear", "_to_copy_pow_mean_add_rsqrt_mul__to_copy_mul", "linear"],
    ),
    "PyTorch's root mean square": (lambda p, x: p["rms"](p["a"](x) + x), ["linear", "add_rms_norm"]),
    "a softmax of scaled scores": (
        lambda p, x: (p["a"](x) * 0.5 + 1).softmax(-1),
        ["linear", "mul_add_softmax"],
    ),
    "two norms, one after the other": (
        lambda p, x: p["norm"](p["norm"](p["a"](x)) * 2),
        ["linear", "layer_norm_mul_layer_norm"],
    ),
    "rows in another shape": (
        lambda p, x: p["norm"]((p["a"](x).view(12, 8) + 1).view(2, 6, 8) + x),
        ["linear", "view", "add_add_layer_norm"],
    ),
    "masked scores": (
        lambda p, x: (p["a"](x) + x[:, :1].expand(2, 6, 8)).softmax(-1),
        ["linear", "slice", "expand", "add_softmax"],
    ),
    "a sum": (lambda p, x: (e := p["a"](x).exp()) / e.sum(-1, keepdim=True), ["linear", "exp_sum_div"]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pattern", FUSED)
def test_a_reduction_is_fused_with_what_is_around_it(pattern: str, device: str) -> None:
    forward, expected = FUSED[pattern]
    module = parts(forward).to(device)
    program, fusions = fused(module, tokens(device))
    assert [name for name in names(program) if name not in ("alias", "detach")] == expected
    assert all(f.chosen == "fused" for f in fusions) and len(fusions) >= 1
    agrees(module, program, tokens(device), tolerance=1e-5)


def parts(forward: Callable[..., object]) -> Function:
    torch.manual_seed(0)
    norm, rms = nn.LayerNorm(8), nn.RMSNorm(8)
    nn.init.uniform_(norm.weight, 0.5, 2)
    nn.init.uniform_(norm.bias, -1, 1)
    nn.init.uniform_(rms.weight, 0.5, 2)
    return Function(forward, a=nn.Linear(8, 8), norm=norm, rms=rms, plane=nn.LayerNorm((6, 8))).eval()


NOT_FUSED: dict[str, Callable[..., object]] = {
    "rows are planes": lambda p, x: p["plane"](p["a"](x) + x),
    "another dimension is reduced": lambda p, x: (p["a"](x) + x).softmax(1),
    "several dimensions are reduced": lambda p, x: (p["a"](x) + x).mean((1, 2), keepdim=True),
    "the reduced dimension goes": lambda p, x: (p["a"](x) + x).mean(-1),
    "rows are not contiguous": lambda p, x: (p["a"](x) + x).transpose(1, 2).softmax(-1),
    "only a product is around it": lambda p, x: p["a"](p["norm"](p["a"](x))),
    "a number is read": lambda p, x: (p["a"](x) * x.max().item()).softmax(-1),
    "rows of another length": lambda p, x: (p["a"](x) + 1).view(2, 12, 4).softmax(-1),
}


@pytest.mark.parametrize("why", NOT_FUSED)
def test_nothing_is_fused_where(why: str) -> None:
    module = parts(NOT_FUSED[why])
    program, _ = fused(module, tokens())
    assert not any(isinstance(call.function, FusedKernel) for call in program.calls)
    agrees(module, program, tokens())


@pytest.mark.parametrize(
    ("options", "is_elementwise"),
    [({}, True), ({"memory_format": torch.channels_last}, False), ({"layout": torch.sparse_coo}, False)],
)
def test_a_cast_is_elementwise_that_changes_the_type_alone(options: dict[str, object], is_elementwise: bool) -> None:
    x = torch.randn(2, 3, 4, 5)
    program = alone("to", "", Call(patterns.CAST, (Input(0),), {"dtype": torch.float64, **options}, x.double()), [x])
    assert patterns.is_elementwise(program, 0) is is_elementwise


def test_a_way_around_through_others_is_no_part_of_the_group() -> None:
    """The sum cannot join the norm: the product between them would have to come both after it and before it."""
    module = parts(lambda p, x: p["norm"]((y := x + 1) + p["a"](y)))
    program, _ = fused(module, tokens())
    assert names(program) == ["add", "linear", "add_layer_norm"]
    agrees(module, program, tokens())


def test_groups_that_would_wait_for_each_other_are_not_both_made() -> None:
    """Each alone has no way around, but one reads the other and is read by it."""

    def forward(p: nn.ModuleDict, x: Tensor) -> Any:
        a, b = x + 1, x + 2
        first = p["norm"](a + p["a"](b))  # what the first passes on, a, is read by the second, whose b it reads
        return first, p["norm"](b + p["a"](a))

    module = parts(forward)
    program, fusions = fused(module, tokens())
    assert nx.is_directed_acyclic_graph(as_networkx(program.graph)) and len(fusions) == 2
    agrees(module, program, tokens())


def test_a_kernel_reads_no_more_tensors_than_it_may() -> None:
    def forward(p: nn.ModuleDict, x: Tensor) -> Tensor:
        total = x
        for i in range(2 * MAX_INPUTS):
            total = total + p["a"](x * i)
        return p["norm"](total)

    module = parts(forward)
    program, _ = fused(module, tokens())
    reading = [len(c.args) for c in program.calls if isinstance(c.function, FusedKernel)]
    assert reading and max(reading) <= MAX_INPUTS
    agrees(module, program, tokens(), tolerance=1e-4)


@pytest.mark.parametrize("which", ["norm.weight", "norm.bias"])
def test_weights_loaded_in_place_are_what_the_next_call_computes_with(which: str) -> None:
    module, x = parts(lambda p, x: p["norm"](p["a"](x) + x)), tokens()
    takes_new_weights(fused(module, x)[0], module, x, which)


def test_what_is_slower_stays_apart_and_each_distinct_group_is_measured_once() -> None:
    programs: list[Program] = []

    def cost(program: Program) -> float:
        programs.append(program)
        return -float(len(program.graph))

    module = parts(lambda p, x: p["norm"](p["a"](p["norm"](p["a"](x) + x)) + x))
    captured = capture(module, (tokens(),))
    program, fusions = fuse_reductions(captured, measuring(cost))
    assert names(program) == names(captured) and len(programs) == 2
    assert [f.chosen for f in fusions] == ["separate", "separate"] and "rows of 8" in fusions[0].pattern


def test_what_a_later_pass_makes_of_the_operators_is_what_they_are_measured_as() -> None:
    operator_names: list[list[str]] = []

    def cost(program: Program) -> float:
        operator_names.append(names(program))
        return 0.0

    captured = capture(parts(lambda p, x: (p["a"](x) * 2 + 1).softmax(-1)), (tokens(),))
    fuse_reductions(captured, measuring(cost))
    fuse_reductions(captured, measuring(cost, later=lambda part: fuse_elementwise(part, COUNTING)[0]))
    assert operator_names[::2] == [["mul", "add", "softmax"], ["mul_add", "softmax"]] and operator_names[
        1
    ] == operator_names[3] == ["mul_add_softmax"]


def test_groups_whose_outputs_differ_are_measured_apart_and_one_around_two_reductions_once() -> None:
    programs: list[Program] = []

    def cost(program: Program) -> float:
        programs.append(program)
        return -float(len(program.graph))

    def forward(p: nn.ModuleDict, x: Tensor) -> tuple[Tensor, Tensor]:
        passed_on = p["a"](x) + x
        return p["a"](p["norm"](passed_on)) + passed_on, p["norm"](p["a"](x) + x)

    _, fusions = fuse_reductions(capture(parts(forward), (tokens(),)), measuring(cost))
    assert len(fusions) == 2 and len(programs) == 4 and [f.pattern.endswith("2 outputs") for f in fusions] == [True, False]
    _, fusions = fuse_reductions(
        capture(parts(lambda p, x: p["norm"](p["norm"](p["a"](x)) * 2)), (tokens(),)), measuring(cost)
    )
    assert len(fusions) == 1


def test_no_output_lies_in_the_memory_of_an_input_or_a_parameter() -> None:
    def forward(p: nn.ModuleDict, x: Tensor) -> tuple[Tensor, ...]:
        y, w = x * 1, p["norm"].weight + 0
        return y, w, p["norm"](y) + w.softmax(-1)

    module, x = parts(forward), tokens()
    program, fusions = fused(module, x)
    outputs = program.run((x,))
    assert any(f.chosen == "fused" for f in fusions)
    addresses = {t.untyped_storage().data_ptr() for t in (x, *module.parameters())}
    assert not addresses & {t.untyped_storage().data_ptr() for t in outputs}
    agrees(module, program, x)


def test_inputs_with_other_strides_are_taken() -> None:
    module, x = parts(lambda p, x: p["norm"](p["a"](x).relu() + x)), torch.randn(8, 8)
    prepared = systems.load("nimble", fuse_reductions=True, fuse_elementwise=True).prepare(module, (x,))
    with torch.no_grad():
        assert relative_error(prepared(x.t()), module(x.t())) < 1e-5
    prepared.close()


MOVES: list[Callable[[list[Tensor], int, int], Tensor]] = [
    lambda seen, i, j: seen[i] + seen[j],
    lambda seen, i, j: seen[i].tanh(),
    lambda seen, i, j: functional.layer_norm(seen[i], (4,)),
    lambda seen, i, j: seen[i].softmax(-1) * seen[j],
    lambda seen, i, j: root_mean_square(seen[i]),
    lambda seen, i, j: seen[i] @ torch.full((4, 4), 0.25),
    lambda seen, i, j: seen[i].reshape(3, 2, 4).sigmoid().reshape(2, 3, 4),
    lambda seen, i, j: seen[i] - seen[j].mean(-1, keepdim=True),
]


class Made(nn.Module):
    def __init__(self, moves: list[tuple[int, int, int]]):
        super().__init__()
        self.moves = moves

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        seen = [x]
        for move, i, j in self.moves:
            seen.append(MOVES[move](seen, i % len(seen), j % len(seen)))
        return tuple(seen[-2:])


@examples(25)
@given(st.lists(st.tuples(st.integers(0, len(MOVES) - 1), st.integers(0, 50), st.integers(0, 50)), min_size=2, max_size=14))
def test_any_graph_computes_what_it_did(moves: list[tuple[int, int, int]]) -> None:
    """Kernels are run as the graphs that they are compiled from: what is grouped is in question here, not TorchInductor."""
    x = torch.randn(2, 3, 4)
    captured = capture(Made(moves), (x,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedKernel, "_compile", lambda self, inputs: self.module)
        program, fusions = fuse_reductions(captured, COUNTING)
        got, expected = program.run((x,)), captured.run((x,))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True))
    taken = [v for f in fusions if f.chosen == "fused" for v in f.operators]
    assert len(taken) == len(set(taken)) and len(program.graph) == len(captured.graph) - len(taken) + sum(
        f.chosen == "fused" for f in fusions
    )


@pytest.mark.slow
def test_the_transformers_of_the_zoo_are_fused_at_each_norm() -> None:
    """GPT-2's layer norms come after sums that are passed on, T5's root mean squares are five operators each."""
    for name, norms in (("gpt2", 25), ("t5", 32)):
        loaded = models.load(name, 1, device="meta")
        program = capture(loaded.module, loaded.inputs)
        _, fusions = fuse_reductions(program, COUNTING)
        assert sum(f.chosen == "fused" for f in fusions) == norms
        outputs = [len([v for v in f.operators if set(program.graph.successors[v]) - {*f.operators}]) for f in fusions]
        assert outputs.count(2) > norms / 2  # the sum, and what the norm makes of it


def test_a_transformer_under_all_passes_says_what_was_fused() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    module = nn.Sequential(layer, nn.LayerNorm(16)).eval()
    x = torch.randn(1, 8, 16)
    system = systems.load("nimble", fuse_reductions=True, fuse_elementwise=True)
    prepared = system.prepare(module, (x,))
    with torch.no_grad():
        assert relative_error(prepared(x), module(x)) < 1e-5
    patterns = [d.pattern for d in prepared.schedule.decisions if d.kind == "fuse_reductions"]
    assert patterns and all("layer_norm" in pattern or "softmax" in pattern for pattern in patterns)
    assert {d.chosen for d in prepared.schedule.decisions} <= {"fused", "separate"}
    prepared.close()
