"""DARTS and AmoebaNet-A for ImageNet, as the DARTS repository builds them (Liu et al. 2019, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from models.registry import images, register


@dataclass(frozen=True)
class CellType:
    """A cell: each pair of operations makes a new state, the sum of their results.

    Attributes:
        operations: (name, state that it reads). States 0 and 1 are the outputs of the two previous cells; state 2 + i is
            the sum of the i-th pair.
        output: the states that the cell concatenates.
    """

    operations: tuple[tuple[str, int], ...]
    output: tuple[int, ...]


@dataclass(frozen=True)
class Genotype:
    """The two cells of a network; the reduction cell halves height and width."""

    normal: CellType
    reduction: CellType


# The cells that DARTS found with the second-order approximation (its figures 4 and 5; DARTS_V2 in the repository).
DARTS = Genotype(
    normal=CellType(
        (
            *(("sep_conv_3", 0), ("sep_conv_3", 1)),
            *(("sep_conv_3", 0), ("sep_conv_3", 1)),
            *(("sep_conv_3", 1), ("skip", 0)),
            *(("skip", 0), ("dil_conv_3", 2)),
        ),
        (2, 3, 4, 5),
    ),
    reduction=CellType(
        (
            *(("max_pool", 0), ("max_pool", 1)),
            *(("skip", 2), ("max_pool", 1)),
            *(("max_pool", 0), ("skip", 2)),
            *(("skip", 2), ("max_pool", 1)),
        ),
        (2, 3, 4, 5),
    ),
)
# AmoebaNet-A (Real et al. 2019, figure 5) in the repository's encoding.
AMOEBANET = Genotype(
    normal=CellType(
        (
            *(("avg_pool", 0), ("max_pool", 1)),
            *(("sep_conv_3", 0), ("sep_conv_5", 2)),
            *(("sep_conv_3", 0), ("avg_pool", 3)),
            *(("sep_conv_3", 1), ("skip", 1)),
            *(("skip", 0), ("avg_pool", 1)),
        ),
        (4, 5, 6),
    ),
    reduction=CellType(
        (
            *(("avg_pool", 0), ("sep_conv_3", 1)),
            *(("max_pool", 0), ("sep_conv_7", 2)),
            *(("sep_conv_7", 0), ("avg_pool", 1)),
            *(("max_pool", 0), ("max_pool", 1)),
            *(("conv_7x1_1x7", 0), ("sep_conv_3", 5)),
        ),
        (3, 4, 6),
    ),
)


def convolution(
    channels_in: int, channels: int, kernel: int = 1, stride: int = 1, dilation: int = 1, depthwise: bool = False
) -> nn.Module:
    """A convolution without bias, padded so that only its stride changes height and width."""
    groups = channels_in if depthwise else 1
    padding = dilation * (kernel // 2)
    return nn.Conv2d(channels_in, channels, kernel, stride, padding, dilation, groups, bias=False)


def squeeze(channels_in: int, channels: int) -> nn.Sequential:
    """ReLU, 1x1 convolution, batch norm: [B, channels_in, H, W] -> [B, channels, H, W]."""
    return nn.Sequential(nn.ReLU(), convolution(channels_in, channels), nn.BatchNorm2d(channels))


def separable(channels: int, kernel: int, stride: int, dilation: int = 1) -> list[nn.Module]:
    """ReLU, depthwise, pointwise, batch norm."""
    return [
        nn.ReLU(),
        convolution(channels, channels, kernel, stride, dilation, depthwise=True),
        convolution(channels, channels),
        nn.BatchNorm2d(channels),
    ]


class FactorizedReduction(nn.Module):
    """Halves height and width by two 1x1 convolutions of stride 2, the second one pixel further down and right."""

    def __init__(self, channels_in: int, channels: int):
        super().__init__()
        self.left = convolution(channels_in, channels // 2, stride=2)
        self.right = convolution(channels_in, channels // 2, stride=2)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(x)
        return self.norm(torch.cat([self.left(x), self.right(x[:, :, 1:, 1:])], 1))


def operation(name: str, channels: int, stride: int) -> nn.Module:
    """An operation of a cell by its name in the genotypes."""
    kind, _, kernel = name.rpartition("_")
    if name == "skip":
        return nn.Identity() if stride == 1 else FactorizedReduction(channels, channels)
    if name == "avg_pool":
        return nn.AvgPool2d(3, stride, 1, count_include_pad=False)
    if name == "max_pool":
        return nn.MaxPool2d(3, stride, 1)
    if name == "conv_7x1_1x7":
        row = nn.Conv2d(channels, channels, (1, 7), (1, stride), (0, 3), bias=False)
        column = nn.Conv2d(channels, channels, (7, 1), (stride, 1), (3, 0), bias=False)
        return nn.Sequential(nn.ReLU(), row, column, nn.BatchNorm2d(channels))
    if kind == "sep_conv":
        return nn.Sequential(*separable(channels, int(kernel), stride), *separable(channels, int(kernel), 1))
    if kind == "dil_conv":
        return nn.Sequential(*separable(channels, int(kernel), stride, dilation=2))
    raise ValueError(f"no operation {name!r}")


class Cell(nn.Module):
    """One cell on the outputs of the two previous cells, of `channels_in` channels each."""

    def __init__(self, cell: CellType, channels_in: tuple[int, int], channels: int, reduction: bool, after_reduction: bool):
        super().__init__()
        adapt = FactorizedReduction if after_reduction else squeeze
        self.adapt = nn.ModuleList([adapt(channels_in[0], channels), squeeze(channels_in[1], channels)])
        self.sources = [source for _, source in cell.operations]
        self.output = cell.output
        self.operations = nn.ModuleList(
            operation(name, channels, stride=2 if reduction and source < 2 else 1) for name, source in cell.operations
        )

    def forward(self, *before: torch.Tensor) -> torch.Tensor:
        states = [adapt(x) for adapt, x in zip(self.adapt, before, strict=True)]
        operations = iter(zip(self.operations, self.sources, strict=True))
        for (left, a), (right, b) in zip(operations, operations, strict=True):
            states.append(left(states[a]) + right(states[b]))
        return torch.cat([states[i] for i in self.output], 1)


class Auxiliary(nn.Sequential):
    """The auxiliary classifier, [B, channels, 14, 14] -> [B, 1000]; without a second batch norm, as in the paper."""

    def __init__(self, channels: int):
        super().__init__(
            nn.ReLU(),
            nn.AvgPool2d(5, stride=2, count_include_pad=False),
            nn.Conv2d(channels, 128, 1, bias=False),
            nn.BatchNorm2d(128),
            nn.ReLU(),
            nn.Conv2d(128, 768, 2, bias=False),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(768, 1000),
        )


class Network(nn.Module):
    """`layers` cells for ImageNet, [B, 3, 224, 224] -> [B, 1000].

    The cells at 1/3 and 2/3 are reduction cells: they halve height and width and double the channels. With `auxiliary` the
    network returns (logits, auxiliary logits).
    """

    def __init__(self, genotype: Genotype, channels: int, layers: int, auxiliary: bool):
        super().__init__()
        self.stem_0 = nn.Sequential(
            convolution(3, channels // 2, 3, stride=2),
            nn.BatchNorm2d(channels // 2),
            nn.ReLU(),
            convolution(channels // 2, channels, 3, stride=2),
            nn.BatchNorm2d(channels),
        )
        self.stem_1 = nn.Sequential(nn.ReLU(), convolution(channels, channels, 3, stride=2), nn.BatchNorm2d(channels))
        self.cells = nn.ModuleList()
        channels_in, just_reduced = (channels, channels), True
        self.auxiliary_after = 2 * layers // 3
        self.auxiliary: nn.Module | None = None
        for i in range(layers):
            reduction = i in (layers // 3, 2 * layers // 3)
            channels *= 2 if reduction else 1
            cell = genotype.reduction if reduction else genotype.normal
            self.cells.append(Cell(cell, channels_in, channels, reduction, just_reduced))
            channels_in, just_reduced = (channels_in[1], len(cell.output) * channels), reduction
            if auxiliary and i == self.auxiliary_after:
                self.auxiliary = Auxiliary(channels_in[1])
        self.classifier = nn.Linear(channels_in[1], 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        before = self.stem_0(x)
        x = self.stem_1(before)
        auxiliary = None
        for i, cell in enumerate(self.cells):
            before, x = x, cell(before, x)
            if self.auxiliary is not None and i == self.auxiliary_after:
                auxiliary = self.auxiliary(x)
        logits = self.classifier(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits if auxiliary is None else (logits, auxiliary)


@register(images(224))
def darts(training: bool) -> nn.Module:
    """DARTS, second order: 14 cells, 48 channels. The train form returns (logits, auxiliary)."""
    return Network(DARTS, channels=48, layers=14, auxiliary=training)


@register(images(224))
def amoebanet(training: bool) -> nn.Module:
    """AmoebaNet-A's cells in DARTS's network, 14 cells, 48 channels. The train form returns (logits, auxiliary)."""
    return Network(AMOEBANET, channels=48, layers=14, auxiliary=training)
