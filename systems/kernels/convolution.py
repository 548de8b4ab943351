"""What kernels of convolutions have in common."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernel import Kernel


@dataclass(frozen=True)
class Convolution(Kernel, ABC):
    """A kernel that goes through an image by windows.

    Args:
        kernel, stride, padding, dilation: each (height, width).
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def output(self, x: Tensor, channels: int, is_channels_last: bool) -> Tensor:
        """What it writes to of x [N, C, H, W]: a new tensor [N, channels, H', W'], contiguous if not `is_channels_last`."""
        sizes = (
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, k, s, p, d in zip(x.shape[2:], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        )
        layout = torch.channels_last if is_channels_last else torch.contiguous_format
        return torch.empty((x.shape[0], channels, *sizes), dtype=x.dtype, device=x.device, memory_format=layout)

    @property
    def window(self) -> str:
        """The kernel's size in words."""
        return f"{self.kernel[0]}x{self.kernel[1]}"
