"""Products of one input merged into one: each pattern, what must not match, any graph; whole models."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import COUNTING, DEVICES, Function, agrees, count, measuring, names, takes_new_weights, tokens
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_structure

import models
import systems
from runners.measurements.correctness import relative_error
from systems.profiling.timing import Timer
from systems.scheduling.decision import Decision
from systems.scheduling.graph.capture import capture, on_meta
from systems.scheduling.graph.operator_graph import Operator, OperatorGraph
from systems.scheduling.graph.program import Call, Input, Output, Program
from systems.scheduling.passes import rewriting
from systems.scheduling.passes.context import Context
from systems.scheduling.passes.merge_linears import merge_linears
from systems.scheduling.passes.patterns import PRODUCTS
from systems.scheduling.passes.rewriting import Rewriting
from systems.scheduling.plans.stream_assignment import assign_streams
from systems.scheduling.plans.verify import verify

aten = torch.ops.aten


def merged(program: Program) -> tuple[Program, list[Decision]]:
    return merge_linears(program, COUNTING)


def products(program: Program) -> int:
    return sum(c.function in PRODUCTS for c in program.calls)


class Weight(nn.Module):
    """[features, K], the other way round than a linear's, as GPT-2 has them."""

    def __init__(self, features: int, outputs: int, by_columns: bool = False):
        super().__init__()
        weight = torch.randn(outputs, features).t() if by_columns else torch.randn(features, outputs)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.randn(outputs))


def heads(x: Tensor, size: int = 4) -> Tensor:
    return x.view(*x.shape[:-1], -1, size).transpose(1, 2)


def attention(p: nn.ModuleDict, x: Tensor) -> Tensor:
    out = nn.functional.scaled_dot_product_attention(*(heads(p[name](x)) for name in "qkv"))
    return p["o"](out.transpose(1, 2).reshape(x.shape))


def linears(names: str = "qkvo", bias: bool = True) -> dict[str, nn.Module]:
    return {name: nn.Linear(8, 8, bias=bias) for name in names}


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])  # a view in the graph, and here one that a strided tensor allows


# forward, parts, products before and after
MERGED: dict[str, tuple[Callable[..., object], dict[str, nn.Module], int, int]] = {
    "attention": (attention, linears(), 4, 2),
    "without biases": (attention, linears(bias=False), 4, 2),
    "of several sizes": (
        lambda p, x: p["q"](x).sum(-1) + p["k"](x).relu().sum(-1) * p["v"](x)[..., 0],
        {"q": nn.Linear(8, 3), "k": nn.Linear(8, 5), "v": nn.Linear(8, 1)},
        3,
        1,
    ),
    "two of one input and one of another": (
        lambda p, x: p["q"](x) + p["k"](x) + p["v"](x.relu()),
        linears("qkv"),
        3,
        2,
    ),
    "two inputs": (
        lambda p, x: (p["q"](x) + p["k"](x)) * (p["v"](y := x.relu()) + p["o"](y)),
        linears(),
        4,
        2,
    ),
    "some with a bias": (
        lambda p, x: p["q"](x) + p["k"](x) + p["v"](x) + p["o"](x),
        {**linears("qk"), **linears("vo", bias=False)},
        4,
        1,
    ),
    "the first without a bias": (
        lambda p, x: nn.functional.linear(x, p["q"].weight) + p["k"](x),
        linears("qk"),
        2,
        1,
    ),
    "a weight of two": (lambda p, x: p["q"](x).relu() + p["q"](x) * p["k"](x), linears("qk"), 3, 1),
    "a weight of two inputs": (lambda p, x: p["q"](x) + p["k"](x) + p["q"](-x), linears("qk"), 3, 2),
    "of columns of another": (
        lambda p, x: p["v"](y := p["q"](x)) + p["o"](y) + p["k"](x),
        linears(),
        4,
        2,
    ),
    "of transposed inputs": (lambda p, x: p["q"](y := x.transpose(0, 1)) + p["k"](y), linears("qk"), 2, 1),
    "a copy where memory must be whole": (
        lambda p, x: p["q"](x).transpose(0, 1).contiguous().view(-1) + p["k"](x).transpose(0, 1).contiguous().view(-1),
        linears("qk"),
        2,
        1,
    ),
    "rows by themselves": (lambda p, x: flat(p["q"](x)).relu() + flat(p["k"](x)).sigmoid(), linears("qk"), 2, 1),
    "transposed weights": (
        lambda p, x: (
            torch.addmm(p["q"].bias, y := flat(x), p["q"].weight)
            + torch.addmm(p["k"].bias, y, p["k"].weight) * torch.mm(y, p["v"].weight)
            - torch.mm(y, p["o"].weight)
        ),
        {name: Weight(8, 5) for name in "qkvo"},
        4,
        2,
    ),
    "matmul": (
        lambda p, x: (x @ p["q"].weight).relu().sum(-1) + (x @ p["k"].weight).relu().sum(-1),
        {"q": Weight(8, 5), "k": Weight(8, 3)},
        2,
        1,
    ),
    "weights by columns": (
        lambda p, x: (x @ p["q"].weight).relu() + (x @ p["k"].weight).sigmoid() * (x @ p["v"].weight),
        {"q": Weight(8, 5), "k": Weight(8, 5, by_columns=True), "v": Weight(8, 5, by_columns=True)},
        3,
        1,
    ),
    "what is an output stays": (lambda p, x: (p["q"](x), p["k"](x) + p["v"](x)), linears("qkv"), 3, 2),
    "what is viewed whole stays": (
        lambda p, x: (p["q"](x).view(-1).relu(), p["k"](x) + p["v"](x)),
        linears("qkv"),
        3,
        2,
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pattern", MERGED)
def test_products_of_one_input_become_one(pattern: str, device: str) -> None:
    forward, parts, before, after = MERGED[pattern]
    module = Function(forward, **parts).eval().to(device)
    captured = capture(module, (tokens(device),))
    program, merges = merged(captured)
    assert (products(captured), products(program)) == (before, after)
    assert sum(len(m.operators) - 1 for m in merges) == before - after and all(m.chosen == "merged" for m in merges)
    agrees(module, program, tokens(device))
    produced: dict[int, Any] = {}
    program.run((tokens(device),), lambda v, output: produced.update({v: on_meta(output)}))
    for v, call in enumerate(program.calls):  # what later passes go by
        assert [t.stride() for t in tree_leaves(produced[v])] == [t.stride() for t in tree_leaves(call.produces)]


NOT_MERGED: dict[str, Callable[..., object]] = {
    "of different inputs": lambda p, x: p["q"](x) + p["k"](x.relu()),
    "one after the other": lambda p, x: p["k"](p["q"](x)),
    "outputs": lambda p, x: (p["q"](x), p["k"](x)),
    "a view of one is an output": lambda p, x: (heads(p["q"](x)), p["k"](x).relu()),
    "viewed whole": lambda p, x: (p["q"](x).view(2, -1).relu(), p["k"](x).relu()),
    "viewed whole further on": lambda p, x: (heads(p["q"](x)).transpose(1, 2).view(2, -1).relu(), p["k"](x).relu()),
    "read as it lies": lambda p, x: (torch.as_strided(p["q"](x), (4, 4), (8, 1)).relu(), p["k"](x).relu()),
    "a weight that is computed": lambda p, x: (
        nn.functional.linear(x, p["q"].weight * 2) + nn.functional.linear(x, p["k"].weight * 3)
    ),
    "weights that are transposed first": lambda p, x: x @ p["q"].weight.t() + x @ p["k"].weight.t(),
}


@pytest.mark.parametrize("why", NOT_MERGED)
def test_products_stay_apart_where(why: str) -> None:
    module = Function(NOT_MERGED[why], **linears("qk")).eval()
    captured = capture(module, (tokens(),))
    program, merges = merged(captured)
    assert merges == [] and program.graph == captured.graph
    agrees(module, program, tokens())


@cache
def attention_once_and_twice() -> tuple[Program, Program]:
    once = Function(attention, **linears()).eval()
    twice = Function(lambda p, x: attention(p, attention(p, x)), **linears()).eval()
    return capture(once, (tokens(),)), capture(twice, (tokens(),))


@pytest.mark.parametrize(
    ("in_turn", "at_once", "together", "chosen"),
    [(3.0, 2.0, 1.0, "merged"), (3.0, 1.0, 2.0, "at once"), (1.0, 3.0, 2.0, "in turn"), (2.0, 2.0, 2.0, "in turn")],
)
def test_merged_only_where_that_is_faster_than_either_way(
    in_turn: float, at_once: float, together: float, chosen: str
) -> None:
    operator_counts: list[int] = []

    def cost(program: Program) -> float:
        operator_counts.append(len(program.graph))
        program.run(program.examples)
        return in_turn if len(program.graph) > 1 else together

    once, twice = attention_once_and_twice()
    for captured, places in ((once, 1), (twice, 2)):
        operator_counts.clear()
        program, merges = merge_linears(captured, measuring(cost, lambda program: at_once))
        assert operator_counts == [3, 1]  # equal places once
        times = {"in turn": in_turn, "at once": at_once, "merged": together}
        assert [(m.milliseconds, m.chosen) for m in merges] == [(times, chosen)] * places
        assert all(m.gain == (min(in_turn, at_once) / together if chosen == "merged" else 1.0) for m in merges)
        assert [m.pattern for m in merges] == ["2x6x8, weights 3 of 8x8, with bias"] * places
        assert (chosen == "merged") == (program.graph != captured.graph)


@pytest.mark.parametrize(
    "which",
    ["q.weight", "k.weight", "v.bias"],  # the softmax takes no notice of k's bias
)
def test_weights_loaded_in_place_are_used_by_the_next_call(which: str) -> None:
    module, x = Function(attention, **linears()).eval(), tokens()
    program, _ = merged(capture(module, (x,)))
    takes_new_weights(program, module, x, which)


SIDE = 4
TAKES = {"linear": 1, "add": 2, "turn": 1, "flat": 1}


@st.composite
def recipes(draw: st.DrawFn) -> list[tuple[str, tuple[int, ...]]]:
    """Operators on square matrices, each with the places of what it reads; -1 is the input. A flat one is read by none."""
    recipe: list[tuple[str, tuple[int, ...]]] = []
    for v in range(draw(st.integers(2, 14))):
        kind = draw(st.sampled_from(["linear", "linear", "linear", "add", "turn", "flat"]))
        readable = [-1, *(u for u in range(v) if recipe[u][0] != "flat")]
        if kind == "flat":  # of what is contiguous unless it is merged
            readable = [u for u in range(v) if recipe[u][0] == "linear"] or [-1]
        recipe.append((kind, tuple(draw(st.sampled_from(readable)) for _ in range(TAKES[kind]))))
    return recipe


def built(recipe: list[tuple[str, tuple[int, ...]]], shared: Tensor) -> Program:
    """The recipe as a program; what nobody reads is an output. Every third product has the weight `shared`."""
    calls: list[Call] = []
    x = torch.randn(SIDE, SIDE)
    values: list[Tensor] = []
    for v, (kind, read) in enumerate(recipe):
        sources = tuple(Input(0) if u < 0 else Output(u) for u in read)
        call = {
            "linear": Call(aten.linear.default, (*sources, torch.randn(SIDE, SIDE) if v % 3 else shared), {}),
            "add": Call(aten.add.Tensor, sources, {}),
            "turn": Call(aten.transpose.int, (*sources, 0, 1), {}),
            "flat": Call(aten.view.default, (*sources, [-1]), {}),
        }[kind]
        values.append(
            call.function(
                *(values[a.operator] if isinstance(a, Output) else x if isinstance(a, Input) else a for a in call.args)
            )
        )
        calls.append(Call(call.function, call.args, {}, on_meta(values[-1])))
    operators = [Operator(v, kind, str(calls[v].function)) for v, (kind, _) in enumerate(recipe)]
    graph = OperatorGraph(operators, [[u for u in read if u >= 0] for _, read in recipe])
    ends = [v for v, readers in enumerate(graph.successors) if not readers]
    return Program(graph, calls, [Output(v) for v in ends], tree_structure([0] * len(ends)), (x,))


def left(recipe: list[tuple[str, tuple[int, ...]]], graph: OperatorGraph) -> int:
    """How many products there should be afterwards: of each input one for all that may be merged, and the others."""

    def may_be_strided(v: int) -> bool:
        readers = graph.successors[v]
        return bool(readers) and all(
            recipe[r][0] in ("linear", "add") or (recipe[r][0] == "turn" and may_be_strided(r)) for r in readers
        )

    places = [(read[0], may_be_strided(v)) for v, (kind, read) in enumerate(recipe) if kind == "linear"]
    return len({read for read, may in places if may}) + sum(not may for _, may in places)


@examples(80)
@given(recipes())
def test_any_graph_of_products_computes_the_same(recipe: list[tuple[str, tuple[int, ...]]]) -> None:
    program = built(recipe, torch.randn(SIDE, SIDE))
    rewritten, _ = merged(program)
    assert products(rewritten) == left(recipe, program.graph)
    verify(rewritten.graph, assign_streams(rewritten.graph))
    x = torch.randn(SIDE, SIDE)
    for got, expected in zip(rewritten.run((x,)), program.run((x,)), strict=True):
        assert got.stride() == expected.stride()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "options", "places", "fewer"),
    [
        ("bert", {"hidden": 96, "layers": 4}, {"1x16x96, weights 3 of 96x96, with bias": 4}, 8),
        # Of the decoder's products those that read what the encoder gives, of all layers at once.
        pytest.param(
            *("t5", {"decoder_sequence": 16}),
            *({"1x16x512, weights 3 of 512x512": 12, "1x16x512, weights 12 of 512x512": 1}, 35),
            marks=pytest.mark.slow,
        ),
        # One product already, as the model is written.
        pytest.param("gpt2", {}, {}, 0, marks=pytest.mark.slow),
    ],
)
def test_attention_of_whole_models(model: str, options: dict[str, int], places: dict[str, int], fewer: int) -> None:
    loaded = models.load(model, 1, sequence=16, **options)
    captured = capture(loaded.module, loaded.inputs)
    program, merges = merged(captured)
    assert Counter(m.pattern for m in merges) == places
    assert names(captured).count("linear") - names(program).count("linear") == fewer
    if not fewer:
        assert program.graph == captured.graph
        return
    verify(program.graph, assign_streams(program.graph))
    inputs = loaded.fresh_inputs(3)
    with torch.no_grad():
        expected = tree_leaves(loaded.module(*inputs))
    for got, reference in zip(program.run(inputs), expected, strict=True):
        assert relative_error(got, reference) < 1e-4


def always_merged(program: Program, context: Context) -> tuple[Program, list[Decision]]:
    """Whatever is measured."""
    return merge_linears(program, COUNTING)


@pytest.mark.parametrize("system", ["nimble", "ios", "opara"])
def test_every_scheduler_takes_it(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "PASSES", (rewriting.Pass(always_merged, ("merge_linears",)),))
    module = Function(attention, **linears()).eval()
    prepared = systems.load(system, merge_linears=True).prepare(module, (tokens(),))
    scheduled = [o.name for o in prepared.schedule.graph.operators]
    assert (scheduled.count("linear"), scheduled.count("split_with_sizes")) == (2, 1)
    merged = [d for d in prepared.schedule.decisions if d.kind == "merge_linears"]
    assert [(d.count, d.chosen) for d in merged] == [(1, "merged")]
    x = tokens()
    with torch.no_grad():
        assert relative_error(prepared(x), module(x)) < 1e-5
    prepared.close()


def test_the_switch_measures_and_reports() -> None:
    """Chosen by real measurements, so that what is chosen differs from run to run; the outputs do not."""
    loaded = models.load("bert", 1, sequence=16, layers=2)
    prepared = systems.load("nimble", merge_linears=True).prepare(loaded.module, loaded.inputs)
    (place,) = prepared.schedule.decisions
    times = place.milliseconds
    assert (place.pattern, place.count, place.num_operators) == ("1x16x768, weights 3 of 768x768, with bias", 2, 6)
    assert set(times) == {"in turn", "at once", "merged"} and all(t > 0 for t in times.values())
    assert times[place.chosen] == min(times.values())
    merges = [o.name for o in prepared.schedule.graph.operators].count("split_with_sizes")
    assert merges == (2 if place.chosen == "merged" else 0)
    inputs = loaded.fresh_inputs(7)
    with torch.no_grad():
        for got, expected in zip(prepared(*inputs), tree_leaves(loaded.module(*inputs)), strict=True):
            assert relative_error(got, expected) < 1e-4
    prepared.close()


def test_fused_kernels_read_columns() -> None:
    """The passes one after the other: elementwise operators are compiled for the strides that merging leaves."""

    class Counting(Timer):
        def __call__(self, program: Program) -> float:
            return count(program)

        def at_once(self, program: Program) -> float:
            return count(program)

    def gated(p: nn.ModuleDict, x: Tensor) -> Tensor:
        return p["o"](p["q"](x).sigmoid().mul(p["k"](x)).relu())

    module = Function(gated, **linears("qko")).eval()
    passes = Rewriting(merge_linears=True, fuse_elementwise=True)
    program, decisions = passes.apply(capture(module, (tokens(),)), Counting(torch.device("cpu")))
    assert names(program) == ["linear", "split_with_sizes", "sigmoid_mul_relu", "linear"]
    assert [(d.kind, d.chosen, len(d.operators)) for d in decisions] == [
        ("merge_linears", "merged", 2),
        ("fuse_elementwise", "fused", 3),
    ]
    agrees(module, program, tokens())
