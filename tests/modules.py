"""Modules that tests make up."""

from typing import Any

from torch import Tensor, nn


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, act: Any):
        super().__init__()
        self.act = act

    def forward(self, *inputs: Tensor) -> Any:
        return self.act(*inputs)
