"""CIFAR-10 forms of ImageNet networks: 10 classes, 32x32 images, and fewer strides."""

from __future__ import annotations

from torch import nn
from torchvision import models as torchvision

from models.registry import images, register


@register(images(32))
def resnet50_cifar10(training: bool) -> nn.Module:
    """ResNet-50 with a 3x3 stem of stride 1 in place of 7x7 of stride 2, and without the max pool; it ends on 4x4."""
    module = torchvision.resnet50(weights=None, num_classes=10)
    module.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(module.conv1.weight, mode="fan_out", nonlinearity="relu")
    module.maxpool = nn.Identity()
    return module


@register(images(32))
def mobilenet_v2_cifar10(training: bool) -> nn.Module:
    """MobileNetV2 with a stride of 1 in the stem and in the first 24-channel block; it ends on 4x4."""
    strides = (1, 1, 2, 2, 1, 2, 1)
    blocks = ((1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1))
    setting = [[*block, stride] for block, stride in zip(blocks, strides, strict=True)]
    module = torchvision.mobilenet_v2(weights=None, num_classes=10, inverted_residual_setting=setting)
    module.features[0][0].stride = (1, 1)
    return module


@register(images(32))
def efficientnet_b0_cifar10(training: bool) -> nn.Module:
    """EfficientNet-B0 with a stride of 1 in the stem; every size is that of a 64x64 image, and it ends on 2x2."""
    module = torchvision.efficientnet_b0(weights=None, num_classes=10)
    module.features[0][0].stride = (1, 1)
    return module
