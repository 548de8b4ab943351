"""How translated operators are put together: every part takes all inputs of the whole, and gives one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Slot(nn.Module):
    """An input of the whole, by its place."""

    def __init__(self, place: int):
        super().__init__()
        self.place = place

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        return inputs[self.place]


class Chain(nn.Module):
    """An operator behind a part."""

    def __init__(self, source: nn.Module, operator: nn.Module):
        super().__init__()
        self.source, self.operator = source, operator

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        result: Tensor = self.operator(self.source(inputs))
        return result


class Union(nn.Module):
    """Parts side by side: [B, sum of their widths]."""

    def __init__(self, parts: Sequence[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        parts = [part(inputs) for part in self.parts]
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


class Within(nn.Module):
    """A graph of one input as an operator."""

    def __init__(self, root: nn.Module):
        super().__init__()
        self.root = root

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.root((x,))
        return result


class Network(nn.Module):
    """A translated pipeline: its inputs -> raw scores [B, K]."""

    def __init__(self, root: nn.Module):
        super().__init__()
        self.root = root

    def forward(self, *inputs: Tensor) -> Tensor:
        scores: Tensor = self.root(inputs)
        return scores
