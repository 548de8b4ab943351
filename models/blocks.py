"""Two small networks of IOS: the sample of its figures 2 and 8, and the last block of Inception-v3, of its figure 10."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.inception import InceptionE

from models.registry import Input, register

CHANNELS, SIDE = 384, 15  # of the sample's input; the paper's text has none, the released code of its figure 8 has these
LAST_CHANNELS, LAST_SIDE = 2048, 8  # of the last block's input, for an image of 299 pixels


class Sample(nn.Module):
    """Four 3x3 convolutions with ReLU: a, and b after it; c and d beside them. Three of them are concatenated."""

    def __init__(self, channels: int):
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1)
        self.b = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.c = nn.Conv2d(channels, channels, 3, padding=1)
        self.d = nn.Conv2d(channels, 2 * channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, 5 C, H, W]"""
        a, c, d = (functional.relu(convolution(x)) for convolution in (self.a, self.c, self.d))
        return torch.cat([functional.relu(self.b(a)), d, c], 1)


@register(lambda **options: (Input((CHANNELS, SIDE, SIDE)),))
def ios_sample(training: bool) -> nn.Module:
    """The sample network of IOS (Ding et al. 2021), figure 2."""
    return Sample(CHANNELS)


@register(lambda **options: (Input((LAST_CHANNELS, LAST_SIDE, LAST_SIDE)),))
def inception_v3_last_block(training: bool) -> nn.Module:
    """The last block of Inception-v3, [B, 2048, 8, 8] -> [B, 2048, 8, 8]."""
    return InceptionE(LAST_CHANNELS)
