"""Layouts of products' weights and places of their biases: each is chosen where it is faster, and computes the same."""

from collections.abc import Callable

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import DEVICES, Function, agrees, measuring, names, takes_new_weights
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import models
import systems
from runners.measurements.correctness import relative_error
from systems.nimble import Nimble
from systems.profiling.timing import Timer
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.passes.patterns import PRODUCTS
from systems.scheduling.passes.rewriting import Rewriting
from systems.scheduling.passes.select_products import MIN_GAIN, WAYS, select_products


def weights(program: Program) -> list[Tensor]:
    """Of its products, in order."""
    return [
        next(a for a in c.args if isinstance(a, Tensor) and a.dim() == 2) for c in program.calls if c.function in PRODUCTS
    ]


def way(candidate: Program) -> str:
    """Which candidate it is, for a product whose weight lies by rows in the module."""
    (weight,) = weights(candidate)
    is_like = not weight.is_contiguous(), "add" in names(candidate)
    return next(name for name, like in WAYS.items() if like == is_like)


def prefers(name: str, times: float = 2.0) -> Callable[[Program], float]:
    """A stand-in for the timing, by which one way is so many times as fast as the others."""
    return lambda candidate: 1.0 if way(candidate) == name else times


class Conv1D(nn.Module):
    """GPT-2's: y = x W + b with W [features, outputs]."""

    def __init__(self, features: int, outputs: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, outputs))
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = flat @ self.weight if self.bias is None else torch.addmm(self.bias, flat, self.weight)
        return out.view(*x.shape[:-1], -1)


@examples(15)
@given(
    st.sampled_from([nn.Linear, Conv1D]),
    st.integers(1, 9),
    st.integers(1, 9),
    st.booleans(),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from(list(WAYS)),
)
def test_every_way_computes_the_same(
    kind: type[nn.Module], features: int, outputs: int, bias: bool, batch: list[int], strided: bool, name: str
) -> None:
    module = Function(lambda p, x: p["a"](x.transpose(0, -2) if strided else x), a=kind(features, outputs, bias=bias)).eval()
    x = torch.randn(*batch, features)
    captured = capture(module, (x,))
    program, (choice,) = select_products(captured, measuring(prefers(name)))
    transposed, apart = WAYS[name]
    there_is = (not transposed or min(features, outputs) > 1) and (not apart or bias)
    assert choice.chosen == (name if there_is else "library") and choice.gain == (2 if there_is and name != "library" else 1)
    assert len(program.graph) - len(captured.graph) == int(there_is and apart)
    assert weights(program)[0].is_contiguous() != (there_is and transposed)
    with torch.no_grad():
        (got,), expected = program.run((x,)), module(x)
    assert got.shape == expected.shape and got.stride() == expected.stride()
    assert relative_error(got, expected) < 1e-5


def two(**options: bool) -> Function:
    parts = {"a": nn.Linear(8, 16, **options), "b": Conv1D(16, 8, True)}
    return Function(lambda p, x: p["b"](p["a"](x).relu()).tanh(), **parts).eval()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", WAYS)
def test_executors_run_every_way(name: str, device: str) -> None:
    module, x = two().to(device), torch.randn(2, 6, 8, device=device)
    program, choices = select_products(capture(module, (x,)), measuring(prefers(name)))
    assert [c.chosen for c in choices] == [name, name]
    assert names(program).count("add") == 2 * WAYS[name][1] and len(program.derived.derived) == 2 * WAYS[name][0]
    agrees(module, program, x)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("which", ["a.weight", "a.bias", "b.weight", "b.bias"])
def test_weights_written_in_place_are_seen(which: str, name: str) -> None:
    module, x = two(), torch.randn(2, 6, 8)
    takes_new_weights(select_products(capture(module, (x,)), measuring(prefers(name)))[0], module, x, which)


def test_a_module_takes_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = prefers("transposed, bias apart")
    monkeypatch.setattr(Timer, "__call__", lambda self, program: cost(program))
    module, x = two(), torch.randn(2, 6, 8)
    fast = Nimble(module, select_products=True).prepare((x,))
    (prepared,) = fast.prepared.values()
    assert [d.chosen for d in prepared.schedule.decisions] == ["transposed, bias apart"] * 2  # type: ignore[union-attr]
    fast.load_state_dict(two().state_dict())
    with torch.no_grad():
        assert relative_error(fast(x), module(x)) < 1e-5
        for parameter in module.parameters():
            parameter.add_(0.1)
        assert relative_error(fast(x), module(x)) < 1e-5
    fast.close()


@pytest.mark.parametrize("name", ["transposed", "bias apart", "transposed, bias apart"])
def test_a_way_is_taken_only_where_it_is_faster_by_the_margin(name: str) -> None:
    captured = capture(two(), (torch.randn(2, 6, 8),))
    for times in (0.5, 1.0, (1 + MIN_GAIN) / 2):
        # Below 1 the others are all faster: then it is one of them.
        program, choices = select_products(captured, measuring(prefers(name, times)))
        assert all(c.chosen != name for c in choices)
        if times >= 1:
            assert program.graph == captured.graph and program.derived.derived == ()
    assert all(c.chosen == name for c in select_products(captured, measuring(prefers(name, 1.01 * MIN_GAIN)))[1])


def test_equal_products_are_measured_once_and_a_shared_weight_is_laid_out_once() -> None:
    parts = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}
    module = Function(lambda p, x: p["a"](p["b"](p["a"](x))), **parts).eval()
    measured: list[str] = []

    def cost(candidate: Program) -> float:
        measured.append(way(candidate))
        return prefers("transposed")(candidate)

    program, choices = select_products(capture(module, (torch.randn(2, 8),)), measuring(cost))
    assert measured == list(WAYS) and [c.operators for c in choices] == [(0,), (1,), (2,)]
    first, second, third = weights(program)
    assert first is third and first is not second and len(program.derived.derived) == 2
    takes_new_weights(program, module, torch.randn(2, 8), "a.weight")


def test_a_product_without_a_weight_of_its_own_stays() -> None:
    captured = capture(Function(lambda p, x: x @ x.t()), (torch.randn(3, 3),))
    program, choices = select_products(captured, measuring(prefers("transposed")))
    assert not choices and program.graph == captured.graph


def test_it_follows_merging_and_goes_before_fusing() -> None:
    """Stacked weights are laid out from what is derived itself, and a bias that stands apart joins what reads it."""

    class StandIn(Timer):
        def __call__(self, program: Program) -> float:
            return prefers("transposed, bias apart")(program) if len(weights(program)) == 1 else 9.0

        def at_once(self, program: Program) -> float:
            return 9.0

    def gated(p: nn.ModuleDict, x: Tensor) -> Tensor:
        return p["o"](p["q"](x).sigmoid().mul(p["k"](x))).tanh()

    module, x = Function(gated, **{name: nn.Linear(8, 8) for name in "qko"}).eval(), torch.randn(2, 6, 8)
    rewriting = Rewriting(merge_linears=True, select_products=True, fuse_elementwise=True)
    program, decisions = rewriting.apply(capture(module, (x,)), StandIn(torch.device("cpu")))
    assert names(program) == ["linear", "add", "split_with_sizes", "sigmoid_mul", "linear", "add_tanh"]
    assert [d.chosen for d in decisions if d.kind == "select_products"] == ["transposed, bias apart"] * 2
    agrees(module, program, x)
    takes_new_weights(program, module, x, "k.weight")


@pytest.mark.parametrize("system", ["nimble", *(pytest.param(s, marks=pytest.mark.slow) for s in ("ios", "opara"))])
def test_bert_with_what_was_measured(system: str) -> None:
    """Chosen by real measurements, so that what is chosen differs from run to run; the outputs do not."""
    loaded = models.load("bert", 1, sequence=16, layers=2)
    prepared = systems.load(system, select_products=True).prepare(loaded.module, loaded.inputs)
    decisions = [d for d in prepared.schedule.decisions if d.kind == "select_products"]
    assert [(d.pattern, d.count) for d in decisions] == [
        ("1x16x768, weight 768x768, with bias", 8),
        ("1x16x768, weight 3072x768, with bias, then gelu", 2),
        ("1x16x3072, weight 768x3072, with bias", 2),
        ("1x768, weight 768x768, with bias", 1),
    ]
    for decision in decisions:
        times = decision.milliseconds
        assert list(times) == list(WAYS) and all(t > 0 for t in times.values())
        if decision.chosen != "library":
            assert times[decision.chosen] == min(times.values()) and decision.gain >= MIN_GAIN - 1e-3  # of rounded times
    inputs = loaded.fresh_inputs(7)
    with torch.no_grad():
        for got, expected in zip(tree_leaves(prepared(*inputs)), tree_leaves(loaded.module(*inputs)), strict=True):
            assert relative_error(got, expected) < 1e-4
    prepared.close()
