"""What tests of Triton kernels share: devices, layouts, activations, and programs in which passes put kernels."""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType

import pytest
import torch
import triton
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program
from systems.scheduling.passes import fuse_in_triton
from systems.scheduling.passes.context import Context
from systems.scheduling.passes.rewriting import Rewriting

NAMES = (
    "tile",
    "convolution",
    "separable",
    "dense",
    "depthwise",
    "gemv",
    "grouped",
    "placed",
    "ordering",
    "pooled",
    "product",
    "attention",
    "group_norm",
)
MODULES = [f"systems.kernels.{name}" for name in NAMES]
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
LAYOUTS = {False: torch.contiguous_format, True: torch.channels_last}
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "relu6": functional.relu6,
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "hardswish": functional.hardswish,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.fixture(params=DEVICES)
def device_with_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A device on which the kernels run; on a CPU in an import of their modules that no other test sees."""
    if request.param == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        for name in ("sum", "max", "cumsum"):  # they were imported to be compiled
            monkeypatch.setattr(triton.language, name, triton.jit(getattr(triton.language, name).fn))
        for module in MODULES:
            monkeypatch.delitem(sys.modules, module, raising=False)
    yield request.param
    if request.param == "cpu":
        for module in MODULES:
            sys.modules.pop(module, None)


def kernels() -> ModuleType:
    return import_module("systems.kernels.separable")


def dense_kernels() -> ModuleType:
    return import_module("systems.kernels.dense")


acts = st.sampled_from(sorted(ACTS))
pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def places(draw: st.DrawFn, like: Tensor, dtype: torch.dtype, is_last: bool) -> list[Tensor]:
    """A part of the channels of a tensor of NaN, to write to, and the whole; or nothing."""
    if not draw(st.booleans()):
        return []
    before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    n, c, *size = like.shape
    whole = torch.full((n, before + c + after, *size), torch.nan, dtype=dtype, device=like.device)
    whole = whole.contiguous(memory_format=LAYOUTS[is_last])
    return [whole[:, before : before + c], whole]


def check_place(out: Tensor, place: list[Tensor], dtype: torch.dtype, is_last: bool) -> None:
    """A kernel has written where it was to write, and nowhere else."""
    assert out.dtype == dtype
    if place:
        part, whole = place
        assert out is part and not part.isnan().any()
        assert int(whole.isnan().sum()) == whole.numel() - part.numel()
    else:
        assert out.is_contiguous(memory_format=LAYOUTS[is_last])


def rewritten(module: nn.Module, x: Tensor, cost: Callable[[Program], float]) -> tuple[Program, list[str], Tensor]:
    """The program after the pass, what was chosen at each place, and eager's output."""
    from systems.profiling.timing import Timer

    with torch.no_grad():
        expected = module(x)
    program = capture(module, (x,))
    folded, _ = Rewriting(fold_batch_norm=True).apply(program, Timer(torch.device(x.device.type)))
    program, decisions = fuse_in_triton.fuse_in_triton(folded, Context(cost, cost))
    return program, [d.chosen for d in decisions], expected


def favour(*names: str) -> Callable[[Program], float]:
    """The first takes no time, the next one second, and so on; what has none of these names takes longest."""

    def cost(program: Program) -> float:
        target = program.graph.operators[0].target
        return float(next((i for i, name in enumerate(names) if name in target), len(names)))

    return cost


def favour_the_library(program: Program) -> float:
    return 2.0 if "opweave" in program.graph.operators[0].target else 1.0


class Returned(nn.Module):
    """Concatenations that a caller sees: one as a vector, one as it is, and one that is of no channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one, other = self.one(x), self.other(x)
        return torch.cat([one, other], 1).flatten(1), torch.cat([other, one], 1), torch.cat([one, other], 2).relu()
