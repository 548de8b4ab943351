"""IOS's operator merge."""

from collections.abc import Callable

import pytest
import torch
from drawing import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from rewriting import Function
from torch import Tensor, nn

from runners.measurements.correctness import relative_error
from systems.ios.stage_timer import StageTimer
from systems.ios.units import find_units
from systems.profiling.timing import Timer
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.graph.rewrite import replace
from systems.scheduling.plans.merge import merge, mergeable

READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "returned": lambda y: y,
    "rows of all images": lambda y: y.view(-1, y.shape[-1]) * 2,
    "rows of pixels": lambda y: y.permute(0, 2, 3, 1).view(-1, y.shape[1]) * 2,
    "returned pixels": lambda y: y.permute(0, 2, 3, 1),
    "memory": lambda y: y.as_strided((2, y.numel() // 4), (y.numel() // 2, 1), 0) * 2,
    "elementwise": lambda y: y * 2,
    "pooled": lambda y: nn.functional.max_pool2d(y, 2),
}


class Parallel(nn.Module):
    """Convolutions of one input, each with what stands after it; `read` is applied to the output of each."""

    def __init__(self, branches: list[nn.Module], read: Callable[[Tensor], Tensor] = READERS["returned"]):
        super().__init__()
        self.branches, self.read = nn.ModuleList(branches), read

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.read(branch(x)) for branch in self.branches]


def norm(channels: int) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(channels)
    for tensor in (made.running_mean, made.running_var, made.weight.data, made.bias.data):
        tensor.uniform_(0.5, 2)  # type: ignore[union-attr]
    return made


def merged(module: nn.Module, x: Tensor) -> tuple[Program, Program | None]:
    program = capture(module.eval(), (x,))
    units = [u for u in find_units(program, "conv_relu") if len(u) > 1 or "conv" in name(program, u)]
    replacement = merge(program, units)
    assert mergeable(program, units) == (replacement is not None)
    return program, None if replacement is None else replace(program, [replacement])[0]


def name(program: Program, unit: tuple[int, ...]) -> str:
    return program.graph.operators[unit[0]].name


@st.composite
def convolutions(draw: st.DrawFn) -> list[nn.Module]:
    stride, dilation, groups = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    bias, normed, activated = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    branches: list[nn.Module] = []
    for _ in range(draw(st.integers(2, 3))):
        kernel = draw(st.tuples(st.sampled_from([1, 3, 5]), st.sampled_from([1, 3, 7])))
        padding = tuple(dilation * (k // 2) for k in kernel)
        channels = groups * draw(st.integers(1, 3))
        layers: list[nn.Module] = [nn.Conv2d(4, channels, kernel, stride, padding, dilation, groups, bias and not normed)]
        layers += [norm(channels)] * normed + [nn.ReLU()] * activated
        branches.append(nn.Sequential(*layers))
    return branches


@examples(25)
@given(convolutions())
def test_merged_convolutions_compute_the_same(branches: list[nn.Module]) -> None:
    module, x = Parallel(branches), torch.randn(2, 4, 9, 8)
    program, one = merged(module, x)
    assert one is not None and len(one.graph) == 1 and len(program.graph) >= 2
    for got, expected in zip(one.run((x,)), module(x), strict=True):
        assert got.shape == expected.shape and relative_error(got, expected.detach()) < 1e-5


@pytest.mark.usefixtures("cache_folder")
def test_a_merge_that_copies_its_outputs_has_a_time_of_its_own() -> None:
    """The time of one that does not is known from another program."""
    timer, branches = Timer(torch.device("cpu")), [nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)]
    for reader, taken in (("elementwise", 1), ("rows of all images", 2), ("rows of all images", 2)):
        program = capture(Parallel(branches, READERS[reader]).eval(), (torch.randn(2, 4, 9, 8),))
        units = [unit for unit in find_units(program, "conv_relu") if "conv" in name(program, unit)]
        assert StageTimer(program, timer).merged(units) and timer.taken == taken


@examples(25)
@given(convolutions(), st.sampled_from(list(READERS)), st.integers(1, 2), st.booleans())
@pytest.mark.slow
def test_who_reads_a_merged_convolution_gets_what_eager_gives(
    branches: list[nn.Module], reader: str, batch: int, is_channels_last: bool
) -> None:
    layout = torch.channels_last if is_channels_last else torch.contiguous_format
    module, x = Parallel(branches, READERS[reader]).to(memory_format=layout), torch.randn(batch, 4, 9, 8)  # type: ignore[call-overload]
    x = x.contiguous(memory_format=layout)
    try:
        expected = module.eval()(x)
    except RuntimeError:  # a view of what does not lie so
        assume(False)
    _, one = merged(module, x)
    assert one is not None
    for got, reference in zip(one.run((x,)), expected, strict=True):
        strides = [(a, b) for n, a, b in zip(got.shape, got.stride(), reference.stride(), strict=True) if n > 1]
        assert got.shape == reference.shape and all(a == b for a, b in strides)
        assert relative_error(got, reference.detach()) < 1e-5


@pytest.mark.parametrize("is_computed", [False, True])
@pytest.mark.parametrize("which", ["bias", "gamma"])
def test_what_is_not_the_modules_own_is_not_merged(which: str, is_computed: bool) -> None:
    def forward(parts: nn.ModuleDict, x: Tensor, own: Tensor) -> list[Tensor]:
        vector = own.exp() if is_computed else own
        outputs = [nn.functional.conv2d(x, parts[name].weight, vector if which == "bias" else None) for name in "ab"]  # type: ignore[arg-type]
        mean, variance = parts["norm"].running_mean, parts["norm"].running_var
        return [nn.functional.batch_norm(y, mean, variance, vector) if which == "gamma" else y for y in outputs]  # type: ignore[arg-type]

    module, x = Function(forward, a=nn.Conv2d(4, 2, 3), b=nn.Conv2d(4, 2, 3), norm=norm(2)), torch.randn(2, 4, 8, 8)
    program = capture(module.eval(), (x, torch.rand(2)))
    units = [u for u in find_units(program, "conv_relu") if "conv" in name(program, u)]
    assert len(units) == 2 and merge(program, units) is None


def test_unbatched_convolutions_are_not_merged() -> None:
    module = Parallel([nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(4, 2, 1)])
    assert merged(module, torch.randn(4, 12, 8))[1] is None


@pytest.mark.parametrize(
    "branches",
    [
        [nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(4, 2, 3, stride=2, padding=1)],
        [nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(4, 2, 3)],
        [nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(4, 2, 3, padding=2, dilation=2)],
        [nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, groups=2)],
        [nn.Conv2d(4, 4, 1), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())],
        [nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), nn.Sequential(nn.Conv2d(4, 4, 1), nn.SiLU())],
        [nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 1)), nn.Conv2d(4, 4, 1)],
    ],
)
def test_what_cannot_be_merged(branches: list[nn.Module]) -> None:
    assert merged(Parallel(branches), torch.randn(1, 4, 8, 8))[1] is None


def test_merged_weights_follow_the_modules() -> None:
    module, x = Parallel([nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(4, 3, 1)]), torch.randn(1, 4, 8, 8)
    _, one = merged(module, x)
    assert one is not None
    with torch.no_grad():
        module.branches[1].weight.mul_(3)  # type: ignore[operator,union-attr]
    assert one.derived.refresh()
    assert relative_error(one.run((x,))[1], module(x)[1].detach()) < 1e-5
