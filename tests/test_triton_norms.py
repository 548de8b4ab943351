"""The kernels of a group norm: against PyTorch, in either layout, and in the programs in which passes put them."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from drawing import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from rewriting import SWITCHES, Function, takes_new_weights
from torch import Tensor, nn
from torch.nn import functional
from triton_cases import ACTS, LAYOUTS, acts, device_with_kernels

from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.passes.context import Context, unchanged
from systems.scheduling.passes.own_kernels import SEPARATE
from systems.scheduling.passes.select_kernels import select_kernels
from systems.scheduling.passes.select_norms import OWN, select_norms

device = device_with_kernels
CLOSE = {"cpu": {"rtol": 1e-3, "atol": 1e-3}, "cuda": {"rtol": 2e-2, "atol": 2e-2}}  # a GPU's convolutions are in TF32
MOMENTS, NORM = "opweave.groupmoments", "opweave.groupnorm"


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), is_last=st.booleans(), after=acts, offset=st.sampled_from([0.0, 3e3]))
@pytest.mark.slow
def test_a_group_norm_computes_what_pytorch_does(
    device: str, data: st.DataObject, is_last: bool, after: str, offset: float
) -> None:
    """Also of numbers far from zero, whose squares would lose what they differ by."""
    draw = data.draw
    n, groups, channels, h = (draw(st.integers(1, most)) for most in (3, 5, 20, 9))
    w = draw(st.integers(2, 70))  # of one number PyTorch takes no variance
    random = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = (torch.randn(n, groups * channels, h, w, generator=random) + offset).to(device)
    x = x.contiguous(memory_format=LAYOUTS[is_last])
    weight, bias = torch.randn(2, groups * channels, generator=random).to(device)
    added = draw(st.sampled_from([0, 1, n]))
    addend = torch.randn(added, groups * channels, 1, 1, generator=random).to(device) if added else None
    kernels = import_module("systems.kernels.group_norm")
    splits = draw(st.sampled_from([kernels.splits_of(x, groups, 132), 1, 4]))
    moments = kernels.GroupMoments(groups, splits)(x, addend)
    out = kernels.GroupNorm(groups, 1e-3, after)(x, addend, moments, weight, bias)
    wide = x.double() if addend is None else x.double() + addend.double()
    expected = ACTS[after](functional.group_norm(wide, groups, weight.double(), bias.double(), 1e-3))
    assert out.stride() == x.stride()
    torch.testing.assert_close(out.double(), expected, rtol=1e-3 if offset else 1e-4, atol=1e-2 if offset else 1e-4)


class Block(nn.Module):
    """As a residual block of a diffusion model: the time is added to each channel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.before, self.after, self.last = (nn.GroupNorm(4, 8) for _ in range(3))
        for norm in (self.before, self.after, self.last):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(functional.silu(self.before(x)))
        y = self.second(functional.silu(self.after(y + time[:, :, None, None])))
        return x + self.last(y)


def arguments(device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 8, 10, 10, device=device), torch.randn(2, 8, device=device)


def context(is_own: bool, is_last: bool = False) -> Context:
    """Kernels of our own are the fastest, or the slowest. Convolutions are faster in channels_last, or slower."""

    def cost(program: Program) -> float:
        targets = [operator.target for operator in program.graph.operators]
        if any("conv2d" in target for target in targets):
            return 1.0 if program.examples[0].is_contiguous() is not is_last else 9.0
        return float(any(MOMENTS in target for target in targets) is not is_own) + 0.1

    return Context(cost, cost, unchanged, frozenset(SWITCHES))


def test_group_norms_take_what_stands_around_them_where_that_is_faster(device: str) -> None:
    module = Function(lambda p, *x: p["a"](*x), a=Block()).eval().to(device)
    captured = capture(module, arguments(device))
    program, decisions = select_norms(captured, context(is_own=True))
    assert [d.pattern.partition(" of ")[0] for d in decisions] == [
        "group_norm + silu",
        "add + group_norm + silu",
        "group_norm",
    ]
    assert {d.chosen for d in decisions} == {OWN}
    targets = [operator.target for operator in program.graph.operators]
    assert sum(MOMENTS in t for t in targets) == sum(NORM in t for t in targets) == 3
    assert "silu" not in {operator.name for operator in program.graph.operators}
    x = arguments(device)
    ((got,), (expected,)) = program.run(x), captured.run(x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert got.stride() == expected.stride()
    kept, decisions = select_norms(captured, context(is_own=False))
    assert kept.calls == captured.calls and {d.chosen for d in decisions} == {SEPARATE}


def test_new_weights_of_a_group_norm_are_taken(device: str) -> None:
    module = Function(lambda p, x: p["a"](x).relu(), a=nn.GroupNorm(2, 4)).eval().to(device)
    x = torch.randn(2, 4, 6, 6, device=device)
    program, _ = select_norms(capture(module, (x,)), context(is_own=True))
    takes_new_weights(program, module, x, "a.weight")


@pytest.mark.parametrize(
    "forward",
    [
        lambda p, x: (y := p["a"](x), y.relu()),  # another reads what the norm returns
        lambda p, x: p["a"](y := x + x[:, :, :1, :1]) + y,  # or what it reads
        lambda p, x: p["a"](x + x),
        lambda p, x: functional.tanh(p["a"](x)),
    ],
)
def test_what_others_read_is_computed_apart(device: str, forward: object) -> None:
    module = Function(forward, a=nn.GroupNorm(2, 4)).eval().to(device)  # type: ignore[arg-type]
    x = torch.randn(2, 4, 6, 6, device=device)
    captured = capture(module, (x,))
    program, (decision,) = select_norms(captured, context(is_own=True))
    assert len(decision.operators) == 1
    for got, expected in zip(program.run([x]), captured.run([x]), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("norm", "shape"), [(nn.GroupNorm(2, 4), (2, 4, 6)), (nn.GroupNorm(2, 4, affine=False), (2, 4, 6, 6))]
)
def test_what_no_kernel_takes_stays(device: str, norm: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, device=device)
    captured = capture(Function(lambda p, x: p["a"](x), a=norm).eval().to(device), (x,))
    program, decisions = select_norms(captured, context(is_own=True))
    assert program.calls == captured.calls and not decisions


def test_a_norm_that_changes_the_layout_stays(device: str) -> None:
    """As PyTorch's does on a GPU, of images in channels_last."""
    x = torch.randn(2, 4, 6, 6, device=device).contiguous(memory_format=torch.channels_last)
    captured = capture(Function(lambda p, x: p["a"](x), a=nn.GroupNorm(2, 4)).eval().to(device), (x,))
    calls = [replace(captured.calls[0], produces=torch.empty(2, 4, 6, 6, device="meta"))]
    changing = Program(captured.graph, calls, captured.outputs, captured.output_spec, captured.examples)
    program, decisions = select_norms(changing, context(is_own=True))
    assert program.calls == changing.calls and not decisions


@pytest.mark.parametrize("is_last", [False, True])
def test_between_convolutions_in_channels_last_a_norm_needs_no_copy(device: str, is_last: bool) -> None:
    module = Function(lambda p, *x: p["a"](*x), a=Block()).eval().to(device)
    captured = capture(module, arguments(device))
    program, _ = select_kernels(captured, context(True, is_last))
    program, decisions = select_norms(program, context(True, is_last))
    names = [operator.name for operator in program.graph.operators]
    assert {d.chosen for d in decisions} == {OWN} and len(decisions) == 3
    convolutions = [call for call in program.calls if "conv" in str(call.function)]
    assert all(call.produces.is_contiguous(memory_format=LAYOUTS[is_last]) for call in convolutions)
    assert names.count("clone") == (2 if is_last else 0), "of the input and of the output"
    x = arguments(device)
    ((got,), (expected,)) = program.run(x), captured.run(x)
    torch.testing.assert_close(got, expected, **CLOSE[device])
    assert got.stride() == expected.stride()


def test_a_norm_stays_contiguous_where_its_kernel_does_not_run(device: str) -> None:
    def failing(program: Program) -> float:
        if any("opweave.group" in operator.target for operator in program.graph.operators):
            raise RuntimeError("out of resource")
        return context(True, True).cost(program)

    captured = capture(Function(lambda p, *x: p["a"](*x), a=Block()).eval().to(device), arguments(device))
    broken = Context(failing, failing, unchanged, frozenset(SWITCHES))
    program, _ = select_kernels(captured, broken)
    program, decisions = select_norms(program, broken)
    assert {d.chosen for d in decisions} == {SEPARATE} and decisions[0].reasons == {OWN: "out of resource"}
    x = arguments(device)
    torch.testing.assert_close(program.run(x)[0], captured.run(x)[0], **CLOSE[device])
