"""Convolutions of one input merged into one: each pattern, what must not match, any network of branches; whole models."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from rewriting import COUNTING, DEVICES, Function, agrees, count, image, measuring, names, takes_new_weights
from torch import Tensor, nn

import models
import systems
from runners.measurements.correctness import relative_error
from systems.profiling.timing import Timer
from systems.scheduling.decision import Decision
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.passes.context import Context
from systems.scheduling.passes.fuse_concatenations import fuse_concatenations
from systems.scheduling.passes.fuse_in_triton import fuse_in_triton
from systems.scheduling.passes.merge_convolutions import FEWER, MERGED, merge_convolutions
from systems.scheduling.passes.rewriting import PASSES, Rewriting


def convolutions(program: Program) -> int:
    return names(program).count("conv2d")


def branches(p: nn.ModuleDict, x: Tensor) -> Tensor:
    return p["a"](x).abs() * p["b"](x)


def concatenated(p: nn.ModuleDict, x: Tensor) -> Tensor:
    first, second, third = (p[name](x).relu() for name in "abc")
    return torch.cat([first, p["d"](second), p["d"](third)], 1).sigmoid()


def conv(k: int = 4, kernel: int = 1, **options: Any) -> nn.Module:
    return nn.Conv2d(4, k, kernel, **options)


# forward, parts, convolutions before and after
PLACES: dict[str, tuple[Callable[..., object], dict[str, nn.Module], int, int]] = {
    "two": (branches, {"a": conv(), "b": conv()}, 2, 1),
    "without biases": (branches, {"a": conv(bias=False), "b": conv(bias=False)}, 2, 1),
    "of a larger kernel": (branches, {"a": conv(4, 3, padding=1, stride=2), "b": conv(4, 3, padding=1, stride=2)}, 2, 1),
    "with the activation after": (concatenated, {"a": conv(2), "b": conv(), "c": conv(), "d": conv()}, 5, 3),
    "that read equal activations": (
        lambda p, x: p["a"](x.relu()).abs() * p["b"](x.relu()),
        {"a": conv(), "b": conv()},
        2,
        1,
    ),
    "that read another activation": (
        lambda p, x: p["a"](x.relu()).abs() * p["b"](x.sigmoid()),
        {"a": conv(), "b": conv()},
        2,
        2,
    ),
    "of another kernel": (branches, {"a": conv(), "b": conv(4, 3, padding=1)}, 2, 2),
    "with another activation after": (
        lambda p, x: p["a"](x).relu() * p["b"](x).sigmoid(),
        {"a": conv(), "b": conv()},
        2,
        2,
    ),
    "of another stride": (lambda p, x: p["a"](x) * p["b"](x).mean(), {"a": conv(), "b": conv(stride=2)}, 2, 2),
    "of groups": (branches, {"a": conv(groups=2), "b": conv(groups=2)}, 2, 2),
    "of which one has a bias": (branches, {"a": conv(), "b": conv(bias=False)}, 2, 2),
    "of which one's output is the model's": (lambda p, x: (p["a"](x), p["b"](x).abs()), {"a": conv(), "b": conv()}, 2, 2),
    "of no batch": (lambda p, x: p["a"](y := x[0, :, :8]).abs() * p["b"](y), {"a": conv(), "b": conv()}, 2, 2),
    "of computed biases": (
        lambda p, x: torch.conv2d(x, p["a"].weight, p["a"].bias * 2) * torch.conv2d(x, p["b"].weight, x[0, 0, 0, :4]),
        {"a": conv(), "b": conv()},
        2,
        2,
    ),
    "of a chain": (lambda p, x: p["b"](p["a"](x)), {"a": conv(), "b": conv()}, 2, 2),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", PLACES)
def test_a_place(place: str, device: str) -> None:
    torch.manual_seed(0)
    forward, parts, before, after = PLACES[place]
    module = Function(forward, **parts).eval().to(device)
    x = image(device)
    program = capture(module, (x,))
    assert convolutions(program) == before
    rewritten, decisions = merge_convolutions(program, COUNTING)
    assert convolutions(rewritten) == after and len(decisions) == (before != after)
    agrees(module, rewritten, x)


def test_one_image_may_be_split_where_its_output_is_the_models() -> None:
    """Its channels lie one after the other."""
    forward, parts, *_ = PLACES["of which one's output is the model's"]
    module, x = Function(forward, **parts).eval(), torch.randn(1, 4, 6, 6)
    program = capture(module, (x,))
    rewritten, _ = merge_convolutions(program, COUNTING)
    # The caller sees the strides of its tensors: those of a dimension of one element differ.
    assert convolutions(rewritten) == 2
    agrees(module, rewritten, x)


def test_an_activation_that_all_have_is_one() -> None:
    forward, parts, *_ = PLACES["with the activation after"]
    module, x = Function(forward, **parts).eval(), image()
    rewritten, _ = merge_convolutions(capture(module, (x,)), COUNTING)
    assert names(rewritten).count("relu") == 1 and names(rewritten).count("split_with_sizes") == 1


def test_equal_activations_before_are_one() -> None:
    forward, parts, *_ = PLACES["that read equal activations"]
    module, x = Function(forward, **parts).eval(), image()
    rewritten, _ = merge_convolutions(capture(module, (x,)), COUNTING)
    assert names(rewritten).count("relu") == 1


@pytest.mark.parametrize(("choice", "sizes"), [(MERGED, [4, 4, 2]), (FEWER, [4, 4])])
def test_what_is_concatenated_comes_last_or_stays(choice: str, sizes: list[int]) -> None:
    forward, parts, *_ = PLACES["with the activation after"]
    module, x = Function(forward, **parts).eval(), image()
    program = capture(module, (x,))
    _, (decision,) = merge_convolutions(program, COUNTING)
    assert set(decision.milliseconds) == {"in turn", "at once", MERGED, FEWER} and "(concatenated)" in decision.pattern
    context = measuring(count)
    chosen = {decision.place: choice}
    rewritten, (again,) = merge_convolutions(program, type(context)(**vars(context) | {"choices": chosen}))
    assert again.chosen == choice
    (split,) = (call for call in rewritten.calls if call.function is torch.ops.aten.split_with_sizes.default)
    assert split.args[1] == sizes
    agrees(module, rewritten, x)


def test_what_is_not_faster_stays() -> None:
    forward, parts, *_ = PLACES["two"]
    program = capture(Function(forward, **parts).eval(), (image(),))
    for at_once, expected in ((0.5, "at once"), (2.0, MERGED)):
        context = measuring(count, lambda program, at_once=at_once: at_once)
        rewritten, (decision,) = merge_convolutions(program, context)
        assert decision.chosen == expected and convolutions(rewritten) == (1 if expected == MERGED else 2)


def test_new_weights_are_stacked() -> None:
    forward, parts, *_ = PLACES["two"]
    module, x = Function(forward, **parts).eval(), image()
    rewritten, _ = merge_convolutions(capture(module, (x,)), COUNTING)
    takes_new_weights(rewritten, module, x, "b.weight")


class Network(nn.Module):
    """Layers of branches, drawn at random: each reads one of the tensors so far, through an activation or none."""

    def __init__(self, draw: st.DrawFn):
        super().__init__()
        self.convs, self.branches = nn.ModuleList(), []
        for i in range(draw(st.integers(2, 6))):
            size, channels = draw(st.sampled_from([1, 3])), 4
            self.convs.append(nn.Conv2d(4, channels, size, padding=size // 2, bias=draw(st.booleans())))
            acts = [draw(st.sampled_from(["relu", "sigmoid", None])) for _ in range(2)]
            self.branches.append((draw(st.integers(0, i)), *acts))
        self.is_concatenated = draw(st.booleans())

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, (source, before, after) in zip(self.convs, self.branches, strict=True):
            y = values[source] if before is None else getattr(values[source], before)()
            y = layer(y)
            values.append(y if after is None else getattr(y, after)())
        return torch.cat(values, 1) * 2 if self.is_concatenated else torch.stack(values).sum(0)


@examples(8)
@given(st.data())
def test_any_network_of_branches(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 100)))
    module = data.draw(st.composite(Network)()).eval()
    x = torch.randn(data.draw(st.integers(1, 2)), 4, 5, 5)
    rewritten, decisions = merge_convolutions(capture(module, (x,)), COUNTING)
    agrees(module, rewritten, x)
    num_merged = sum(len(d.operators) - 1 for d in decisions if d.chosen == MERGED)
    assert convolutions(rewritten) == len(module.convs) - num_merged


def always_merged(program: Program, _: Any) -> tuple[Program, list[Decision]]:
    return merge_convolutions(program, COUNTING)


SLOW = pytest.mark.slow
LARGE = [
    pytest.param(*case, marks=SLOW)
    for case in (("googlenet", 18, 1), ("googlenet", 18, 2), ("nasnet", 1, 1), ("nasnet", 1, 2))
]


@pytest.mark.parametrize(("model", "num_merged", "batch"), LARGE)
def test_a_model_with_every_place_merged(model: str, num_merged: int, batch: int) -> None:
    loaded = models.load(model, batch)
    models.calibration.calibrate(loaded.module, loaded.inputs)
    timer = Timer(torch.device("cpu"))
    folded, _ = Rewriting(fold_batch_norm=True).apply(capture(loaded.module, loaded.inputs), timer)
    rewritten, decisions = always_merged(folded, None)
    assert sum(len(d.operators) - 1 for d in decisions if d.is_change) >= num_merged
    with torch.no_grad():
        expected = loaded.module(*loaded.inputs)
    (out,) = rewritten.run(loaded.inputs)
    assert relative_error(out, expected) < 1e-4


class Inception(nn.Module):
    """A branch that is concatenated as it is, and two that go on; what the last returns may be seen by the caller.

    Or one that goes on too is concatenated, whose channels are not the merged convolution's last.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(4, k, 1) for k in (3, 5, 6))
        self.fourth, self.fifth, self.last = nn.Conv2d(5, 2, 3, padding=1), nn.Conv2d(6, 2, 3, padding=1), nn.Conv2d(7, 4, 1)
        self.form = form

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, second, third = self.first(x).relu(), self.second(x).relu(), self.third(x).relu()
        if self.form == "first":
            return self.last(torch.cat([second, self.fourth(second)], 1)), self.fifth(third)
        y = self.last(torch.cat([first, self.fourth(second), self.fifth(third)], 1))
        return (y, third.flatten(1)) if self.form == "returned" else (y,)


@pytest.mark.parametrize(
    ("batch", "form", "num_copies"), [(1, "last", 0), (2, "last", 1), (1, "returned", 1), (1, "first", 1)]
)
def test_a_merged_convolution_writes_where_a_concatenation_is_read(
    monkeypatch: pytest.MonkeyPatch, batch: int, form: str, num_copies: int
) -> None:
    """In Triton's interpreter. Of several images, of what the caller sees, and where others follow, the slice is copied."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for module in ("tile", "separable", "dense", "placed"):
        monkeypatch.delitem(sys.modules, f"systems.kernels.{module}", raising=False)
    torch.manual_seed(0)
    network, x = Inception(form).eval(), torch.randn(batch, 4, 5, 5)

    def favour(program: Program) -> float:
        return float("opweave" not in program.graph.operators[-1].target)

    context = Context(favour, favour)
    program, _ = merge_convolutions(capture(network, (x,)), COUNTING)
    program, _ = fuse_in_triton(program, context)
    program, (decision,) = fuse_concatenations(program, context)
    targets = [o.target.split("[")[0] for o in program.graph.operators]
    assert targets.count("opweave.dense") == 4 and targets.count("opweave.placed") == num_copies
    assert decision.chosen == "written by its parts" and targets.count("opweave.joined") == 1
    for scale in (1.0, -3.0):  # memory that the program keeps is written again
        with torch.no_grad():
            expected = network(x * scale)
        torch.testing.assert_close(tuple(program.run((x * scale,))), expected, rtol=1e-3, atol=1e-3)
    for module in ("tile", "separable", "dense", "placed"):
        sys.modules.pop(f"systems.kernels.{module}", None)


def test_weave_alone_has_the_switch() -> None:
    assert "merge_convolutions" in {switch for p in PASSES for switch in p.switches}
    for name, is_on in (("weave", True), ("nimble_fused", False), ("opara_fused", False), ("ios_fused", False)):
        system = systems.load(name)
        assert ("merge_convolutions" in system.rewriting.switches) is is_on  # type: ignore[attr-defined]
