"""What tests of training share: a network, optimizers, and a step of eager's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runners.cell.training import loss
from systems.nimble.system import NimbleSystem
from systems.scheduling.execution.training_step import TrainingStep
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stream_assignment import assign_streams

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
SMALL_BERT = {"sequence": 16, "layers": 2, "hidden": 64, "heads": 2}
# Of eight classes weights; of four rows classes, and values of eight features.
WEIGHTS = torch.rand(8, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([1, 7, 3, 0])
VALUES = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Branches, batch norm, dropout, in-place operators, tied weights, a buffer assigned anew, a parameter without use, one
    that is still to be read when its gradient is there (`gate`).
    """

    def __init__(self, counts: bool = True) -> None:
        super().__init__()
        self.counts = counts
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        # Without biases, whose gradient before a batch norm is nothing but rounding, which AdamW makes steps of.
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 1, bias=False)
        self.shared = nn.BatchNorm2d(8)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.unused, self.gate = nn.Parameter(torch.ones(3)), nn.Parameter(torch.rand(4, 8))
        self.drop, self.act = nn.Dropout(0.3), nn.ReLU(inplace=True)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls = self.calls + 1
        x = self.act(self.norm(self.stem(x)))
        x = self.shared(self.left(x)) + self.shared(self.drop(self.right(x)))
        x = self.drop(x.mean((2, 3))) * self.gate
        return self.b(self.act(self.a(x)))


def sgd(module: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), **{"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3} | more)


def adamw(module: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), **{"lr": 1e-3} | more)


def adam(module: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), **{"lr": 1e-3, "weight_decay": 1e-2} | more)


def groups(module: nn.Module) -> torch.optim.Optimizer:
    """Two groups with rates and decays of their own, Nesterov's momentum."""
    matrices = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    settings = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.2}]
    return torch.optim.SGD(settings, lr=0.02, momentum=0.8, nesterov=True)


def batch(seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(4, 3, 8, 8, generator=generator), torch.randint(8, (4,), generator=generator)
    return x.to(device), target.to(device)


def net(device: str = "cpu", counts: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return Net(counts).to(device)


def eager_step(module: nn.Module, optimizer: torch.optim.Optimizer, *data: Tensor) -> Tensor:
    optimizer.zero_grad()
    value = loss(module(*data[:-1]), data[-1])
    value.backward()
    optimizer.step()
    return value.detach()


def equal(a: Any, b: Any) -> bool:
    """Two state_dicts, bit by bit."""
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


def prepare_training(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any, Tensor], Tensor],
    inputs: Tensor | tuple[Tensor, ...],
    target: Tensor,
    assign: Callable[[OperatorGraph], Schedule] = assign_streams,
) -> TrainingStep:
    """A step of training, scheduled by `assign`."""

    class Assigned(NimbleSystem):
        def plan(self, program: Program) -> Schedule:
            return assign(program.graph)

    inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    return Assigned().prepare_training(module, optimizer, loss, inputs, target)
