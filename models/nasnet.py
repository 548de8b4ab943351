"""NASNet-A (Zoph et al. 2018, "Learning Transferable Architectures for Scalable Image Recognition")."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from models.registry import images, register

# The two cells of the paper's figure 4. A block adds the results of two operations, each on one state. State 0 is the
# cell's input, state 1 the previous cell's input, state 2 + i the i-th block. A cell concatenates its output states.
Block = tuple[tuple[str, int], tuple[str, int]]
NORMAL: tuple[Block, ...] = (
    (("separable_5", 0), ("separable_3", 1)),
    (("separable_5", 1), ("separable_3", 1)),
    (("average", 0), ("identity", 1)),
    (("average", 1), ("average", 1)),
    (("separable_3", 0), ("identity", 0)),
)
NORMAL_OUTPUT = (1, 2, 3, 4, 5, 6)
REDUCTION: tuple[Block, ...] = (
    (("separable_5", 0), ("separable_7", 1)),
    (("max", 0), ("separable_7", 1)),
    (("average", 0), ("separable_5", 1)),
    (("average", 2), ("identity", 3)),
    (("separable_3", 2), ("max", 0)),
)
REDUCTION_OUTPUT = (3, 4, 5, 6)


def norm(channels: int) -> nn.Module:
    """A batch norm with the paper's epsilon."""
    return nn.BatchNorm2d(channels, eps=1e-3)


class Separable(nn.Module):
    """ReLU, depthwise, pointwise, batch norm, twice (appendix A.4). The first depthwise convolution has the stride.

    Args:
        uneven: the stride meets an even size, where TensorFlow's SAME pads one pixel less at the top left.
    """

    def __init__(self, channels_in: int, channels: int, kernel: int, stride: int, uneven: bool):
        super().__init__()
        half = kernel // 2
        self.pad = nn.ZeroPad2d((half - 1, half, half - 1, half)) if uneven else nn.Identity()
        padding = 0 if uneven else half
        self.depthwise_1 = nn.Conv2d(channels_in, channels_in, kernel, stride, padding, groups=channels_in, bias=False)
        self.pointwise_1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.norm_1 = norm(channels)
        self.depthwise_2 = nn.Conv2d(channels, channels, kernel, padding=half, groups=channels, bias=False)
        self.pointwise_2 = nn.Conv2d(channels, channels, 1, bias=False)
        self.norm_2 = norm(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm_1(self.pointwise_1(self.depthwise_1(self.pad(F.relu(x)))))
        return self.norm_2(self.pointwise_2(self.depthwise_2(F.relu(x))))


class Squeeze(nn.Sequential):
    """ReLU, 1x1 convolution, batch norm: brings a cell's input to the cell's number of channels."""

    def __init__(self, channels_in: int, channels: int):
        super().__init__(nn.ReLU(), nn.Conv2d(channels_in, channels, 1, bias=False), norm(channels))


class FactorizedReduction(nn.Module):
    """Halves height and width: every second pixel, concatenated with the pixels one further down and right."""

    def __init__(self, channels_in: int, channels: int):
        super().__init__()
        self.subsample = nn.AvgPool2d(1, stride=2)
        self.left = nn.Conv2d(channels_in, channels // 2, 1, bias=False)
        self.right = nn.Conv2d(channels_in, channels // 2, 1, bias=False)
        self.norm = norm(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(x)
        shifted = F.pad(x, (-1, 1, -1, 1))
        return self.norm(torch.cat([self.left(self.subsample(x)), self.right(self.subsample(shifted))], 1))


def operation(name: str, channels_in: int, channels: int, stride: int, uneven: bool) -> nn.Module:
    """An operation of a cell by its name in the tables above."""
    if name == "identity":
        return nn.Identity()
    # Padding is outside of the window, not zeros. For both pools ceil_mode equals SAME's padding at the bottom right.
    padding, ceil = (0, True) if uneven else (1, False)
    if name == "average":
        return nn.AvgPool2d(3, stride, padding, ceil_mode=ceil, count_include_pad=False)
    if name == "max":
        return nn.MaxPool2d(3, stride, padding, ceil_mode=ceil)
    return Separable(channels_in, channels, int(name.removeprefix("separable_")), stride, uneven)


class Cell(nn.Module):
    """One cell: `adapt_input` and `adapt_before` bring its two inputs to its shape; its blocks follow.

    Args:
        before: channels that `adapt_before` returns; None for `channels`.
        reduce_from: the height of a reduction cell's inputs; None for a normal cell.
    """

    def __init__(
        self,
        adapt_input: nn.Module,
        adapt_before: nn.Module,
        channels: int,
        before: int | None = None,
        reduce_from: int | None = None,
    ):
        super().__init__()
        self.adapt_input, self.adapt_before = adapt_input, adapt_before
        self.blocks = NORMAL if reduce_from is None else REDUCTION
        self.output = NORMAL_OUTPUT if reduce_from is None else REDUCTION_OUTPUT
        self.operations = nn.ModuleList()
        for block in self.blocks:
            for name, source in block:
                strided = reduce_from is not None and source < 2
                uneven = reduce_from is not None and reduce_from % 2 == 0 and strided
                channels_in = before if before is not None and source == 1 else channels
                self.operations.append(operation(name, channels_in, channels, 2 if strided else 1, uneven))

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        states = [self.adapt_input(x), self.adapt_before(before)]
        operations = iter(self.operations)
        for (_, left), (_, right) in self.blocks:
            states.append(next(operations)(states[left]) + next(operations)(states[right]))
        return torch.cat([states[i] for i in self.output], 1)


class NASNet(nn.Module):
    """NASNet-A (`cells` @ 24 * `filters`) for ImageNet: [B, 3, size, size] -> [B, 1000].

    A convolution; two reduction cells at a quarter and at half of the filters; three stacks of `cells` normal cells. A
    reduction cell before each stack but the first doubles the filters (the paper's figure 2 and appendix A.4).
    """

    def __init__(self, cells: int, filters: int, stem: int, size: int):
        super().__init__()
        self.convolution = nn.Sequential(nn.Conv2d(3, stem, 3, stride=2, bias=False), norm(stem))
        size = (size - 1) // 2
        self.stem_0 = Cell(Squeeze(stem, filters // 4), nn.Identity(), filters // 4, before=stem, reduce_from=size)
        size = (size + 1) // 2
        self.stem_1 = Cell(
            Squeeze(filters, filters // 2), FactorizedReduction(stem, filters // 2), filters // 2, reduce_from=size
        )
        size = (size + 1) // 2

        self.cells = nn.ModuleList()
        before, current, just_reduced = filters, 2 * filters, True
        for stack in range(3):
            channels = filters * 2**stack
            if stack > 0:
                self.cells.append(Cell(Squeeze(current, channels), Squeeze(before, channels), channels, reduce_from=size))
                size = (size + 1) // 2
                before, current, just_reduced = current, 4 * channels, True
            for _ in range(cells):
                adapt = FactorizedReduction if just_reduced else Squeeze
                self.cells.append(Cell(Squeeze(current, channels), adapt(before, channels), channels))
                before, current, just_reduced = current, 6 * channels, False

        self.dropout = nn.Dropout(0.5)
        self.classifier = nn.Linear(current, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(x)
        before, x = x, self.stem_0(x, x)
        before, x = x, self.stem_1(x, before)
        for cell in self.cells:
            before, x = x, cell(x, before)
        x = F.adaptive_avg_pool2d(F.relu(x), 1).flatten(1)
        return self.classifier(self.dropout(x))


@register(images(224))
def nasnet(training: bool) -> nn.Module:
    """NASNet-A (4 @ 1056), the mobile one: 4 cells a stack, 44 filters, a stem of 32 (appendix A.6)."""
    return NASNet(cells=4, filters=44, stem=32, size=224)


@register(images(331))
def nasnet_large(training: bool) -> nn.Module:
    """NASNet-A (6 @ 4032), of timm, at its 331 pixels."""
    import timm

    return timm.create_model("nasnetalarge", pretrained=False)
