"""Backbones of 2020 to 2024: transformers over images, and convolutional networks that take after them."""

from __future__ import annotations

import timm
from torch import nn
from torchvision import models as torchvision
from torchvision.models.convnext import CNBlockConfig

from models.registry import Input, is_small, register


def _images(size: str) -> tuple[Input, ...]:
    side = 64 if is_small(size) else 224
    return (Input((3, side, side)),)


@register(_images)
def vit_b16(training: bool, *, size: str = "full") -> nn.Module:
    """ViT-B/16 (Dosovitskiy et al. 2020)."""
    if is_small(size):
        network = torchvision.VisionTransformer(64, 16, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128)
    else:
        network = torchvision.vit_b_16(weights=None)
    nn.init.xavier_uniform_(network.heads.head.weight)  # torchvision leaves zeros, with which every answer is zero
    return network


@register(_images)
def swin_t(training: bool, *, size: str = "full") -> nn.Module:
    """Swin-T (Liu et al. 2021): attention within windows of 7, shifted in every second block."""
    if is_small(size):
        return torchvision.SwinTransformer(
            [4, 4], embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=[7, 7], stochastic_depth_prob=0.0
        )
    return torchvision.swin_t(weights=None)


@register(_images)
def convnext_t(training: bool, *, size: str = "full") -> nn.Module:
    """ConvNeXt-T (Liu et al. 2022)."""
    if is_small(size):
        return torchvision.ConvNeXt([CNBlockConfig(32, 64, 2), CNBlockConfig(64, None, 2)])
    return torchvision.convnext_tiny(weights=None)


@register(_images)
def mobilenet_v4(training: bool, *, size: str = "full") -> nn.Module:
    """MobileNetV4-Conv-M (Qin et al. 2024), at 224 pixels. `size` is that of the image."""
    is_small(size)
    return timm.create_model("mobilenetv4_conv_medium", pretrained=False)
