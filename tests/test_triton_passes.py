"""The programs in which passes put kernels of convolutions, with all that stands around them."""

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from triton_cases import Returned, dense_kernels, device_with_kernels, favour, favour_the_library, rewritten

from systems.kernels import kernel as kernel_module
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Call, Program
from systems.scheduling.graph.rewrite import Replacement
from systems.scheduling.graph.rewrite import replace as replace_operators
from systems.scheduling.passes import convolution_places, fuse_convolution, fuse_in_triton, own_kernels
from systems.scheduling.passes.context import Context

device = device_with_kernels


class Block(nn.Module):
    """Two separable branches of one activation, their sum, a residual block, and a strided pointwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.ModuleList(nn.Conv2d(12, 12, s, padding=s // 2, groups=12, bias=False) for s in (3, 5, 3))
        self.pointwise = nn.ModuleList(nn.Conv2d(12, 12, 1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(12) for _ in range(3))
        self.last = nn.Conv2d(12, 20, 1, stride=2)

    def separable(self, i: int, x: Tensor) -> Tensor:
        return self.norms[i](self.pointwise[i](self.depthwise[i](x)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = x.relu()
        y = self.separable(0, x) + self.separable(1, x)
        z = (self.separable(2, y.sigmoid()) + y).relu()
        return self.last(z)  # type: ignore[no-any-return]


def test_the_pass_leaves_what_the_model_computes(device: str) -> None:
    torch.manual_seed(0)
    module = Block().eval().to(device)
    x = torch.randn(1, 12, 7, 7, device=device)
    program, chosen, expected = rewritten(module, x, favour("opweave.separable", "opweave"))
    (out,) = program.run((x,))
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    targets = [o.target for o in program.graph.operators]
    assert len(chosen) == 4 and "separate" not in chosen
    # The relu that both branches read is gone; their sum stays, since neither branch is to wait for the other.
    assert [t for t in targets if "opweave" not in t] == ["aten.add.Tensor"]
    assert [t.split("[")[0] for t in targets if "opweave" in t] == ["opweave.separable"] * 3 + ["opweave.dense"]
    assert sum("before relu" in t for t in targets) == 2 and sum("before sigmoid, after relu" in t for t in targets) == 1
    with torch.no_grad():
        module.depthwise[0].weight.mul_(2)
    assert program.derived.refresh()
    torch.testing.assert_close(program.run((x,))[0], module(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("names", "others"),
    [
        (["opweave.dense", "aten"], ["aten.conv2d.default"] * 3),
        pytest.param(["opweave.depthwise", "aten"], ["aten.conv2d.default"] * 4, marks=pytest.mark.slow),
        pytest.param(["opweave.dense", "opweave.depthwise", "aten"], [], marks=pytest.mark.slow),
    ],
)
def test_parts_of_what_stays_separate_have_kernels_of_their_own(device: str, names: list[str], others: list[str]) -> None:
    """The kernel of either takes in the activation before it, also the one between them."""
    module, x = Block().eval().to(device), torch.randn(1, 12, 9, 9, device=device)
    program, chosen, expected = rewritten(module, x, favour(*names))
    assert len(chosen) == 10 and [chosen[i] for i in (0, 3, 6)] == ["separate"] * 3
    torch.testing.assert_close(program.run((x,))[0], expected, rtol=1e-3, atol=1e-3)
    targets = [o.target for o in program.graph.operators]
    assert [t for t in targets if t == "aten.conv2d.default"] == others
    for name, count in (("opweave.dense", 4), ("opweave.depthwise", 3)):
        assert sum(t.startswith(name) for t in targets) == (count if name in names else 0)
    with torch.no_grad():
        module.depthwise[0].weight.mul_(2)
        module.pointwise[1].weight.mul_(2)
    program.derived.refresh()
    torch.testing.assert_close(program.run((x,))[0], module(x), rtol=1e-3, atol=1e-3)


def test_what_is_not_faster_stays(device: str) -> None:
    x = torch.randn(1, 12, 9, 9, device=device)
    program, chosen, expected = rewritten(Block().eval().to(device), x, favour_the_library)
    assert chosen == ["separate"] * 10  # three places of two parts, and a convolution alone
    torch.testing.assert_close(program.run((x,))[0], expected, rtol=1e-3, atol=1e-3)


def test_a_tile_that_fails_has_a_reason(device: str) -> None:
    def cost(program: Program) -> float:
        if "16x16x16" in program.graph.operators[0].target:
            raise RuntimeError("out of resource: shared memory")
        return 1.0

    module, x = Block().eval().to(device), torch.randn(1, 12, 9, 9, device=device)
    with torch.no_grad():
        program = capture(module, (x,))
    _, decisions = fuse_in_triton.fuse_in_triton(program, Context(cost, cost))
    failed = [d for d in decisions if "out of resource: shared memory" in d.reasons.values()]
    assert failed and all(d.milliseconds[name] is None for d in failed for name in d.reasons)


def test_a_known_tile_is_asked_for_without_memory(device: str) -> None:
    """What is not known needs inputs on the device that it is measured on."""
    targets_by_device: defaultdict[str, set[str]] = defaultdict(set)

    def knows(program: Program) -> bool:
        return "16x16x16" in program.graph.operators[0].target

    def cost(program: Program) -> float:
        if (target := program.graph.operators[0].target).startswith("opweave."):
            targets_by_device[program.device.type].add(target)
        return 1.0

    with torch.no_grad():
        program = capture(Block().eval().to(device), (torch.randn(1, 12, 9, 9, device=device),))
    fuse_in_triton.fuse_in_triton(program, Context(cost, cost, knows=knows))
    assert {"16x16x16" in target for target in targets_by_device["meta"]} == {True}
    assert {"16x16x16" in target for target in targets_by_device[device]} == {False}


def test_equal_places_have_their_kernels_made_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[convolution_places.Place] = []
    calls = fuse_in_triton._calls
    monkeypatch.setattr(
        fuse_in_triton, "_calls", lambda program, place, cores: made.append(place) or calls(program, place, cores)
    )
    module = nn.Sequential(*(nn.Conv2d(12, 12, 1) for _ in range(5))).eval().to(device)
    _, chosen, _ = rewritten(module, torch.randn(1, 12, 9, 9, device=device), favour_the_library)
    assert chosen == ["separate"] * 5 and len(made) == 1


class Shared(nn.Module):
    """What a fusion would take from others: the depthwise output and the activation after are read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pointwise = nn.Conv2d(8, 8, 1)
        self.grouped = nn.Conv2d(8, 8, 1, groups=2)
        self.wide = nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        d = self.depthwise(x)
        p = self.pointwise(d)
        return d, p, p.relu(), self.wide(self.grouped(p))


def test_what_others_read_is_not_fused(device: str) -> None:
    module, x = Shared().eval().to(device), torch.randn(1, 8, 6, 6, device=device)
    program, chosen, expected = rewritten(module, x, favour("opweave"))
    assert len(chosen) == 3
    targets = [o.target for o in program.graph.operators if "opweave" in o.target]
    assert [t.split(",")[0] for t in targets] == ["opweave.depthwise[3x3", "opweave.dense[1x1", "opweave.dense[3x3"]
    assert not any("after" in t for t in targets)
    torch.testing.assert_close(tuple(program.run((x,))), expected, rtol=1e-3, atol=1e-3)


def test_what_was_measured_of_other_code_is_not_taken(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's name has a digest of its source, and of what that imports."""
    tile = dense_kernels().DenseTile(16, 16, 16, 1, 1)
    kernel = dense_kernels().Dense((1, 1), (1, 1), (0, 0), (1, 1), "none", "none", "ieee", False, tile)
    call = Call(kernel, (), {}, None)
    before = own_kernels.target_of(call)
    source = inspect.getsource
    for module in ("dense", "tile", "placed"):
        changed = sys.modules.get(f"systems.kernels.{module}")
        monkeypatch.setattr(inspect, "getsource", lambda of, it=changed: source(of) + "#" * (of is it))
        kernel_module._digest.cache_clear()
        assert (own_kernels.target_of(call) == before) == (module == "placed")
    kernel_module._digest.cache_clear()


def test_without_a_gpu_nothing_changes() -> None:
    program = capture(Block().eval(), (torch.randn(1, 12, 9, 9),))
    assert fuse_in_triton.fuse_in_triton(program, Context(favour("opweave"), favour("opweave"))) == (program, [])


class Sums(nn.Module):
    """Two separable convolutions, each with a sum and an activation: one adds its input, one another branch's output."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.pointwise = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1)
        self.other, self.branch = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = (self.pointwise(self.depthwise(x)) + x).relu()
        side = self.branch(y)  # captured first: the sum is then of the pointwise convolution, which is the later one
        return (side + self.pointwise(self.other(y))).relu()


def test_no_branch_waits_for_what_the_vendors_kernel_adds() -> None:
    """cuDNN's convolution + sum + relu takes its depthwise convolution in only where the addend is there before that begins.

    The program is a CPU's with cuDNN's kernels in it, and does not run.
    """
    program = capture(Sums().eval(), (torch.randn(1, 8, 6, 6),))
    vendors = [
        Replacement(p.operators, "fused", "fused", fuse_convolution._fused(program, p, "cuda"), {p.operators[-1]: None})
        for p in fuse_convolution._places(program, "cuda")
    ]
    assert len(vendors) == 2
    places = convolution_places.places(replace_operators(program, vendors)[0])
    assert [(p.conv.weight.shape[2], len(p.operators), p.depthwise is not None, p.after) for p in places] == [
        (1, 2, True, "relu"),
        (3, 1, False, "none"),
        (3, 1, False, "none"),
        (1, 1, False, "relu"),
    ]


class Twice(nn.Module):
    """Three equal pointwise convolutions, of which two read an activation and one its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.relu()
        return self.first(y), self.second(x), self.second(y)


def test_places_that_differ_in_what_they_compute_before_are_measured_apart(device: str) -> None:
    """Their operators are equal where the activation before has other readers."""
    module, x = Twice().eval().to(device), torch.randn(1, 8, 6, 6, device=device)
    with torch.no_grad():
        program = capture(module, (x,))
    _, decisions = fuse_in_triton.fuse_in_triton(program, Context(favour("opweave"), favour("opweave")))
    assert len(decisions) == 3 and len({d.place for d in decisions}) == 2


def test_a_kernel_that_saves_none_has_to_be_clearly_faster(device: str) -> None:
    """Of two pointwise convolutions one takes an activation in; each kernel is 3 % faster than what is there.

    Where a concatenation alone reads it, it may save that one's kernel.
    """
    module = nn.Sequential(nn.Conv2d(8, 8, 1), nn.MaxPool2d(1), nn.Conv2d(8, 8, 1), nn.Sigmoid(), nn.MaxPool2d(1))
    x = torch.randn(1, 8, 6, 6, device=device)

    def cost(faster: float) -> Callable[[Program], float]:
        return lambda program: faster if "opweave" in program.graph.operators[0].target else 1.0

    assert [name == "separate" for name in rewritten(module.eval().to(device), x, cost(0.97))[1]] == [True, False]
    assert [name == "separate" for name in rewritten(module.eval().to(device), x, cost(0.94))[1]] == [False, False]
    assert [name == "separate" for name in rewritten(module.eval().to(device), x, cost(1.0))[1]] == [True, True]
    assert [name == "separate" for name in rewritten(Returned().eval().to(device), x, cost(0.97))[1]] == [False, False]


class Squeezed(nn.Module):
    """A depthwise convolution whose output a pointwise one and another operator read, as where channels are weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.pointwise = nn.Conv2d(8, 8, 5, padding=2, stride=2, groups=8), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.silu(self.depthwise(functional.relu6(x)))
        return self.pointwise(y * y.mean((2, 3), keepdim=True))  # type: ignore[no-any-return]


def test_a_depthwise_convolution_alone_takes_in_its_activations(device: str) -> None:
    module, x = Squeezed().eval().to(device), torch.randn(1, 8, 9, 9, device=device)
    program, chosen, expected = rewritten(module, x, favour("opweave"))
    targets = [o.target for o in program.graph.operators]
    assert len(chosen) == 2 and targets[0].startswith("opweave.depthwise[5x5, before relu6, after silu")
    torch.testing.assert_close(program.run((x,))[0], expected, rtol=1e-3, atol=1e-3)


class Weighed(nn.Module):
    """A depthwise convolution whose activation several read, one of them a convolution that could compute it itself."""

    def __init__(self, way: int) -> None:
        super().__init__()
        self.depthwise, self.other = (nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(2))
        self.dense, self.pointwise = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).relu()
        if self.way == 0:
            return self.dense(y) + y  # type: ignore[no-any-return]
        if self.way == 1:
            return self.pointwise(self.other(y)) + self.dense(y)  # type: ignore[no-any-return]
        if self.way == 2:
            return torch.cat([y, self.pointwise(y)], 1).exp()
        return self.pointwise(y * self.dense(y).sigmoid())  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", range(4))
def test_an_activation_that_several_read_is_of_one_kernel(device: str, way: int) -> None:
    module, x = Weighed(way).eval().to(device), torch.randn(1, 8, 6, 6, device=device)
    program, _, expected = rewritten(module, x, favour("opweave"))
    torch.testing.assert_close(program.run((x,))[0], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("is_part_first", [False, True])
def test_equal_places_are_weighed_by_who_reads_them(device: str, is_part_first: bool) -> None:
    """A kernel that is a little faster is taken where a concatenation alone reads it, whichever comes first."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            if is_part_first:
                return torch.cat([self.one(x), x], 1).exp(), self.two(x).exp()
            other = self.two(x).exp()
            return torch.cat([self.one(x), x], 1).exp(), other

    x = torch.randn(1, 8, 6, 6, device=device)

    def cost(program: Program) -> float:
        return 0.97 if "opweave" in program.graph.operators[0].target else 1.0

    with torch.no_grad():
        program = capture(Both().eval().to(device), (x,))
    _, decisions = fuse_in_triton.fuse_in_triton(program, Context(cost, cost))
    readers = {d.operators[0]: d.chosen for d in decisions}
    first, second = (readers[v] for v in sorted(readers))
    assert (first == "separate", second == "separate") == (not is_part_first, is_part_first)
