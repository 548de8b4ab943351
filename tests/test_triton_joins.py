"""Concatenations, pools and sums that kernels write or read by themselves."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from drawing import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from rewriting import Function
from torch import Tensor, nn
from torch.nn import functional
from triton_cases import (
    ACTS,
    LAYOUTS,
    Returned,
    acts,
    check_place,
    device_with_kernels,
    favour,
    favour_the_library,
    pairs,
    places,
)

from systems.scheduling.decision import Decision
from systems.scheduling.graph.capture import capture, on_meta
from systems.scheduling.graph.program import Program
from systems.scheduling.passes import fuse_concatenations, fuse_in_triton, fuse_pools, fuse_sums
from systems.scheduling.passes.context import Context

device = device_with_kernels


class Inception(nn.Module):
    """A concatenation of convolutions, a sum, a pool, an activation and another concatenation; one part is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(8, 6, 1)
        self.depthwise, self.pointwise = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 4, 1)
        self.pool, self.last = nn.MaxPool2d(3, 1, 1), nn.Conv2d(46, 4, 1)
        self.alone = nn.Conv2d(8, 8, 5, padding=2, groups=8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.first(x).relu()
        inner = torch.cat([self.second(x), self.pointwise(self.depthwise(x)), self.alone(x.sigmoid()).relu()], 1)
        third = self.third(x)
        y = torch.cat([first, inner, (self.pool(x) + x).relu(), self.pool(first), third], 1)
        return self.last(y), torch.cat([third, first], 1)


def joined(module: nn.Module, x: Tensor, cost: Callable[[Program], float]) -> tuple[Program, list[Decision]]:
    """The program after both passes; every convolution is a kernel."""
    with torch.no_grad():
        program = capture(module, (x,))
    program, _ = fuse_in_triton.fuse_in_triton(program, Context(favour("opweave"), favour("opweave")))
    return fuse_concatenations.fuse_concatenations(program, Context(cost, cost))


@pytest.mark.parametrize(
    ("batch", "is_last"),
    [(1, False), (2, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, True), (2, False)))],
)
def test_parts_are_written_where_a_concatenation_is_read(device: str, is_last: bool, batch: int) -> None:
    torch.manual_seed(0)
    layout = LAYOUTS[is_last]
    module = Inception().eval().to(device, memory_format=layout)
    x = torch.randn(batch, 8, 5, 5, device=device).contiguous(memory_format=layout)
    program, (decision,) = joined(module, x, lambda program: float("aten.cat" in program.graph.operators[-1].target))
    targets = [o.target for o in program.graph.operators]
    assert decision.chosen == "written by its parts" and len(decision.operators) == 2
    # The other concatenation is an output of the model. The pool is copied, the sum with its activation is not.
    assert targets.count("opweave.joined") == 1 and targets.count("aten.cat.default") == 1
    assert "aten.add.Tensor" not in targets and "aten.relu.default" not in targets
    # What others read beside is copied where its strides would be others.
    num_copies = 2 if (batch, is_last) == (1, False) else 4
    assert sum(t.startswith("opweave.placed") for t in targets) == num_copies
    assert f"{num_copies - 1} of them copied" in decision.pattern
    for scale in (1.0, -3.0):
        with torch.no_grad():
            expected = module(x * scale)
        tolerance = 1e-2 if device == "cuda" else 1e-3  # TF32, in two convolutions one after the other
        torch.testing.assert_close(tuple(program.run((x * scale,))), expected, rtol=tolerance, atol=tolerance)


def test_a_concatenation_names_the_places_that_would_let_it_gain(device: str) -> None:
    """Without kernels of this project its parts are copied; at the places that it names they become such kernels."""
    module, x = Inception().eval().to(device), torch.randn(1, 8, 5, 5, device=device)
    with torch.no_grad():
        program = capture(module, (x,))

    def both(choices: dict[str, str]) -> tuple[Program, list[Decision], Decision]:
        own = Context(favour_the_library, favour_the_library, choices=choices)
        rewritten, kernels = fuse_in_triton.fuse_in_triton(program, own)
        joined, (decision, *_) = fuse_concatenations.fuse_concatenations(rewritten, own)
        return joined, kernels, decision

    _, kernels, before = both({})
    assert {d.chosen for d in kernels} == {"separate"} and len(before.needs) >= 3
    alternatives = {d.place: next(name for name in d.milliseconds if name != "separate") for d in kernels}
    assert set(before.needs) <= set(alternatives)
    rewritten, _, after = both(
        {place: alternatives[place] for place in before.needs} | {before.place: "written by its parts"}
    )
    assert (
        after.place == before.place and after.chosen == "written by its parts" and not set(after.needs) & set(before.needs)
    )
    with torch.no_grad():
        torch.testing.assert_close(tuple(rewritten.run((x,))), module(x), rtol=1e-3, atol=1e-3)


class Doubled(nn.Module):
    """A concatenation of a convolution, an activation and a sum, each twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.first(x), x.cos().relu(), x.cos() + x.sin()
        return torch.cat([*parts, *parts], 1).exp()


def test_what_is_concatenated_twice_is_written_once_and_copied(device: str) -> None:
    module, x = Doubled().eval().to(device), torch.randn(1, 8, 5, 5, device=device)
    program, (decision,) = joined(module, x, lambda program: float("aten.cat" in program.graph.operators[-1].target))
    assert decision.chosen == "written by its parts" and "3 of them copied" in decision.pattern
    targets = [o.target for o in program.graph.operators]
    assert "aten.relu.default" not in targets and "aten.add.Tensor" not in targets
    with torch.no_grad():
        torch.testing.assert_close(program.run((x,))[0], module(x), rtol=1e-3, atol=1e-3)


def test_what_a_caller_sees_is_copied(device: str) -> None:
    """A later run would write it again."""
    module, x = Returned().eval().to(device), torch.randn(1, 8, 5, 5, device=device)
    program, decisions = joined(module, x, lambda program: float("aten.cat" in program.graph.operators[-1].target))
    assert decisions == [] and sum(o.target == "aten.cat.default" for o in program.graph.operators) == 3


def test_a_concatenation_that_is_not_slower_stays(device: str) -> None:
    """Of the outer one two parts are copied. The inner one is a place of its own where the outer stays; it copies none."""
    module, x = Inception().eval().to(device), torch.randn(1, 8, 5, 5, device=device)
    program, (outer, inner) = joined(module, x, lambda _: 1.0)
    assert outer.chosen == "separate" and outer.milliseconds == {"separate": 1.0, "written by its parts": 1.0}
    assert inner.chosen == "written by its parts" and inner.milliseconds == {"separate": 1.0, "written by its parts": 0.0}
    assert sum(o.target == "aten.cat.default" for o in program.graph.operators) == 2


@st.composite
def windows(draw: st.DrawFn, height: int, width: int) -> tuple[Any, Callable[[Tensor], Tensor], bool]:
    """A window that fits, what PyTorch computes by it, and whether the last windows may pass the end."""
    kind, ceil = draw(st.sampled_from(["average", "max"])), draw(st.booleans())
    kernel = draw(st.tuples(st.integers(1, min(4, height)), st.integers(1, min(4, width))))
    stride = draw(pairs)
    padding = draw(st.tuples(*(st.integers(0, k // 2) for k in kernel)))
    counts = kind == "average" and draw(st.booleans())
    window = import_module("systems.kernels.pooled").Window(kind, kernel, stride, padding, counts)
    if kind == "average":
        return window, lambda x: functional.avg_pool2d(x, kernel, stride, padding, ceil, counts), ceil
    return window, lambda x: functional.max_pool2d(x, kernel, stride, padding, 1, ceil), ceil


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), after=acts, is_last=st.booleans(), second=st.sampled_from(["none", "same", "pool"]))
def test_a_sum_of_pools_is_what_pytorch_computes(
    device: str, data: st.DataObject, after: str, is_last: bool, second: str
) -> None:
    n, c, h, w = (data.draw(st.integers(1, most)) for most in (3, 9, 9, 9))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    window, pool, _ = data.draw(windows(h, w))

    def tensor(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=random).to(device, dtype)
        return made.contiguous(memory_format=LAYOUTS[data.draw(st.booleans())])

    x = tensor(n, c, h, w)
    if data.draw(st.booleans()):
        x[0, 0, h // 2, w // 2] = torch.nan
    expected, y, other = pool(x.double()), None, None
    if second == "same":
        y, other = tensor(*expected.shape), import_module("systems.kernels.pooled").Window()
        expected = expected + y.double()
    elif second == "pool":  # the same window of another tensor
        y, other = tensor(n, c, h, w), window
        expected = expected + pool(y.double())
    expected = ACTS[after](expected)
    pooled = import_module("systems.kernels.pooled").Pooled(window, other, after, *expected.shape[2:], is_last)
    place = [] if x.isnan().any() else data.draw(places(expected, dtype, is_last))
    out = pooled(x, y, *place[:1])
    check_place(out, place, dtype, is_last)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


class Cell(nn.Module):
    """Sums of pools as in NASNet's cells: with another tensor, with another pool, with itself, and with an activation after;
    a pool that others read too, one that is a part of a concatenation, and pools that no kernel takes."""

    def __init__(self) -> None:
        super().__init__()
        self.average, self.max = nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.MaxPool2d(3, 2, 1)
        self.dilated = nn.MaxPool2d(3, 1, 1, dilation=2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        twice = self.average(y)
        pooled = self.max(x)
        joined = torch.cat(
            [self.average(x) + y, twice + twice, (self.average(x) + self.average(y)).relu(), self.average(x)], 1
        )
        divided = functional.avg_pool2d(x, 3, 1, 1, divisor_override=2) + y
        others = self.dilated(x) + self.dilated(y), torch.add(self.average(x), y, alpha=2), divided
        # By default windows stand one after the other, and an average counts the padding.
        halves = functional.avg_pool2d(x, 2, padding=1) + functional.avg_pool2d(y, 2, padding=1)
        return joined, pooled + pooled.cos(), *others, halves


@pytest.mark.parametrize("is_last", [False, True])
def test_sums_take_in_the_pools_that_they_alone_read(device: str, is_last: bool) -> None:
    x, y = (torch.randn(2, 3, 6, 5, device=device).contiguous(memory_format=LAYOUTS[is_last]) for _ in range(2))
    module = Cell().eval()
    captured = capture(module, (x, y))
    program, decisions = fuse_pools.fuse_pools(captured, Context(favour("opweave"), favour("opweave")))
    kept, others = fuse_pools.fuse_pools(captured, Context(favour("aten"), favour("aten")))
    assert kept.graph == captured.graph and {d.chosen for d in others} == {"separate"}
    assert sorted(len(d.operators) for d in decisions) == [1, 2, 2, 3, 4] and {d.chosen for d in decisions} == {"one kernel"}
    library_names = [o.name for o in program.graph.operators if not o.target.startswith("opweave")]
    assert sorted(library_names) == ["add"] * 4 + ["avg_pool2d"] * 2 + ["cat", "cos"] + ["max_pool2d"] * 3
    for out, expected in zip(program.run((x, y)), module(x, y), strict=True):
        assert out.stride() == expected.stride()
        torch.testing.assert_close(out, expected)


class Addends(nn.Module):
    """Sums of two convolutions, of which one is deeper; of one with a pool; of one that others read; of one that adds
    already; of one that an activation follows before; and one that is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(8))
        self.average = nn.AvgPool2d(3, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        convolutions = iter(self.convolutions)
        deeper = (next(convolutions)(next(convolutions)(x).cos()) + next(convolutions)(x)).relu()
        pooled = self.average(x) + next(convolutions)(x)
        shared = next(convolutions)(x)
        twice = (next(convolutions)(x) + x) + self.average(shared)
        rectified = next(convolutions)(x).relu() + x.cos()
        broadcast = next(convolutions)(x) + x.mean((2, 3), keepdim=True)
        return deeper, pooled, shared + shared.cos(), twice, rectified, broadcast


@pytest.mark.parametrize("is_last", [False, True])
def test_a_sum_becomes_part_of_the_kernel_of_its_deeper_addend(device: str, is_last: bool) -> None:
    x = torch.randn(2, 4, 6, 5, device=device).contiguous(memory_format=LAYOUTS[is_last])
    module = Addends().eval().to(device, memory_format=LAYOUTS[is_last])
    with torch.no_grad():
        captured = capture(module, (x,))
    ours = Context(favour("opweave"), favour("opweave"))
    program, _ = fuse_in_triton.fuse_in_triton(captured, ours)
    fused, decisions = fuse_sums.fuse_sums(program, Context(lambda p: float(len(p.graph)), favour("opweave")))
    assert [(d.chosen, d.is_change) for d in decisions] == [(fuse_sums.FUSED, True)] * 2
    # The deeper of the first two adds, and is the last of them; the other reads the model's input.
    (first,) = (i for i, o in enumerate(fused.graph.operators) if o.name.endswith("add_relu"))
    assert "cos" in [fused.graph.operators[u].name for u in fused.graph.predecessors[first]]
    assert len(fused.graph) == len(program.graph) - 3
    left, others = fuse_sums.fuse_sums(program, Context(lambda p: -float(len(p.graph)), favour("opweave")))
    assert left.graph == program.graph and not any(d.is_change for d in others)
    tolerance = 1e-2 if device == "cuda" else 1e-4  # TF32
    with torch.no_grad():
        for out, expected in zip(fused.run((x,)), module(x), strict=True):
            assert out.stride() == expected.stride()
            torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_sum_in_a_kernel_lies_as_pytorchs_does(device: str, is_last: bool, size: int) -> None:
    """Of channels_last tensors of one pixel a convolution returns other strides than a sum."""
    parts = (nn.Conv2d(4, 4, 1).eval().to(device, memory_format=LAYOUTS[is_last]) for _ in range(2))
    module = Function(lambda p, x: p["a"](x) + p["b"](x), **dict(zip("ab", parts, strict=True)))
    x = torch.randn(2, 4, size, size, device=device).contiguous(memory_format=LAYOUTS[is_last])
    with torch.no_grad():
        expected, captured = module(x), capture(module, (x,))
    values: dict[int, Tensor] = {}  # as they are returned, which capture looks at on a GPU alone
    captured.run((x,), lambda v, out: values.update({v: on_meta(out)}))
    calls = [replace(call, produces=values[v]) for v, call in enumerate(captured.calls)]
    observed = Program(captured.graph, calls, captured.outputs, captured.output_spec, captured.examples)
    program, _ = fuse_in_triton.fuse_in_triton(observed, Context(favour("opweave"), favour("opweave")))
    fused, _ = fuse_sums.fuse_sums(program, Context(lambda p: float(len(p.graph)), favour("opweave")))
    (out,) = fused.run((x,))
    assert len(fused.graph) == 2 and out.stride() == fused.calls[-1].produces.stride() == expected.stride()
    tolerance = 1e-2 if device == "cuda" else 1e-4  # TF32
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
