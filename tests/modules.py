"""Modules that tests make up."""

from typing import Any

import torch
from torch import Tensor, nn

from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.program import Program


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, act: Any):
        super().__init__()
        self.act = act

    def forward(self, *inputs: Tensor) -> Any:
        return self.act(*inputs)


def captured(module: nn.Module, *inputs: Tensor) -> Program:
    """The program of a module in evaluation."""
    return capture(module.eval(), inputs)


class Mixed(nn.Module):
    """Two branches with a convolution, elementwise operators, views and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.a(x).relu() + self.b(x).sigmoid()).mean((2, 3)).flatten(1))


def mixed(device: str = "cpu") -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Mixed().eval().to(device), (torch.randn(2, 3, 16, 16, device=device),)


class Branches(nn.Module):
    """Two branches of a convolution and an elementwise operator that are of equal length."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(3, 64, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.a(x).relu(), self.b(x).sigmoid()), 1)
