"""What tests of the rewriting passes share."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runners.measurements.correctness import relative_error
from systems.scheduling.execution.execute import execute
from systems.scheduling.graph.program import Program
from systems.scheduling.passes.context import Context, Cost, unchanged
from systems.scheduling.passes.rewriting import SWITCHES
from systems.scheduling.plans.schedule import sequential
from systems.scheduling.plans.stream_assignment import assign_streams

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


class Function(nn.Module):
    """A forward over parts that are modules."""

    def __init__(self, forward: Callable[..., object], **parts: nn.Module):
        super().__init__()
        self.act = forward
        self.parts = nn.ModuleDict(parts)

    def forward(self, *inputs: Tensor) -> object:
        return self.act(self.parts, *inputs)


def batch_norm(channels: int, **options: bool) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, **options)
    norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
    norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    if norm.affine:
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.uniform_(norm.bias, -1, 1)
    return norm


def image(device: str = "cpu") -> Tensor:
    return torch.randn(2, 4, 10, 10, device=device)


def tokens(device: str = "cpu") -> Tensor:
    return torch.randn(2, 6, 8, device=device)


def count(program: Program) -> float:
    """A cost by which one operator is always faster than several."""
    return float(len(program.graph))


def measuring(cost: Cost, at_once: Cost | None = None, later: Callable[[Program], Program] = unchanged) -> Context:
    """What a pass is run with where every switch is on, and `cost` stands in for the timing."""
    return Context(cost, at_once or cost, later, frozenset(SWITCHES))


COUNTING = measuring(count)


def names(program: Program) -> list[str]:
    return [o.name for o in program.graph.operators]


def agrees(module: nn.Module, program: Program, *shape: Tensor, tolerance: float = 1e-5) -> None:
    """The program, sequential and on the executor with Nimble's streams, against the module, on inputs of its own."""
    tolerance = 1e-2 if shape[0].is_cuda else tolerance  # TF32
    inputs = tuple(torch.randn_like(x) for x in shape)
    with torch.no_grad():
        expected = tree_leaves(module(*inputs))
    prepared = execute(program, assign_streams(program.graph))
    for outputs in (program.run(inputs), tree_leaves(prepared(*inputs))):
        assert len(outputs) == len(expected)
        for got, reference in zip(outputs, expected, strict=True):
            assert got.shape == reference.shape and got.stride() == reference.stride()
            assert relative_error(got, reference) < tolerance
    prepared.close()


def takes_new_weights(program: Program, module: nn.Module, x: Tensor, which: str) -> None:
    """A part's tensor that is loaded in place is what the next call computes with."""
    prepared = execute(program, sequential(program.graph))
    before = prepared(x)
    state = module.state_dict()
    module.load_state_dict(state | {f"parts.{which}": torch.rand_like(state[f"parts.{which}"])})
    with torch.no_grad():
        assert relative_error(prepared(x), module(x)) < 1e-5
    assert relative_error(prepared(x), before) > 1e-3
    prepared.close()
