"""NASNet-A (Zoph et al. 2018, "Learning Transferable Architectures for Scalable Image Recognition")."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from models.registry import images, register

# The two cells of the paper's figure 4. A block adds two operations, each on one of the states: 0 is the cell's
# input, 1 the input of the cell before, 2 and on the blocks in turn. A cell concatenates the states it names.
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
    (("identity", 3), ("average", 2)),
    (("separable_3", 2), ("max", 0)),
)
REDUCTION_OUTPUT = (3, 4, 5, 6)


def norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, eps=1e-3)


class Separable(nn.Module):
    """ReLU, depthwise, pointwise, batch norm, twice over (appendix A.4). The first depthwise convolution strides."""

    def __init__(self, channels_in: int, channels: int, kernel: int, stride: int):
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.depthwise_1 = nn.Conv2d(channels_in, channels_in, kernel, stride, groups=channels_in, bias=False)
        self.pointwise_1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.norm_1 = norm(channels)
        self.depthwise_2 = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=channels, bias=False)
        self.pointwise_2 = nn.Conv2d(channels, channels, 1, bias=False)
        self.norm_2 = norm(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.kernel // 2
        # A stride of 2 on an even size pads one less at the top left than at the bottom right (TensorFlow's SAME).
        uneven = self.stride == 2 and x.shape[-1] % 2 == 0
        x = F.relu(x)
        if uneven:
            x = F.pad(x, (half - 1, half, half - 1, half))
        x = F.conv2d(x, self.depthwise_1.weight, None, self.stride, 0 if uneven else half, 1, x.shape[1])
        x = self.norm_1(self.pointwise_1(x))
        return self.norm_2(self.pointwise_2(self.depthwise_2(F.relu(x))))
