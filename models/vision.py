"""ImageNet networks of torchvision, each at the input size of its paper."""

from __future__ import annotations

from torch import Tensor, nn
from torchvision import models as torchvision
from torchvision.models.squeezenet import Fire

from conf import not_one_of
from models.registry import BadModel, images, register


@register(images(224))
def googlenet(training: bool) -> nn.Module:
    """GoogLeNet with batch norm. The train form has both auxiliary heads and returns (logits, aux2, aux1)."""
    return torchvision.googlenet(weights=None, init_weights=False, aux_logits=training)


@register(images(299))
def inception_v3(training: bool) -> nn.Module:
    """Inception-v3. The train form has the auxiliary head, returns (logits, aux), and needs a batch of 2 or more."""
    return torchvision.inception_v3(weights=None, init_weights=False, aux_logits=training)


@register(images(224))
def resnet18(training: bool) -> nn.Module:
    """ResNet-18."""
    return torchvision.resnet18(weights=None)


@register(images(224))
def resnet34(training: bool) -> nn.Module:
    """ResNet-34."""
    return torchvision.resnet34(weights=None)


@register(images(224))
def resnet50(training: bool) -> nn.Module:
    """ResNet-50; as in torchvision, a block's stride is in its 3x3 convolution."""
    return torchvision.resnet50(weights=None)


@register(images(224))
def resnet101(training: bool) -> nn.Module:
    """ResNet-101; as in torchvision, a block's stride is in its 3x3 convolution."""
    return torchvision.resnet101(weights=None)


@register(images(224))
def mobilenet_v2(training: bool) -> nn.Module:
    """MobileNetV2."""
    return torchvision.mobilenet_v2(weights=None)


@register(images(224))
def efficientnet_b0(training: bool) -> nn.Module:
    """EfficientNet-B0."""
    return torchvision.efficientnet_b0(weights=None)


@register(images(456))
def efficientnet_b5(training: bool) -> nn.Module:
    """EfficientNet-B5, at 456 pixels."""
    return torchvision.efficientnet_b5(weights=None)


BYPASSES = ("none", "simple", "complex")


class BypassedFire(nn.Module):
    """A fire module plus its own input. A 1x1 convolution adapts the input where the channels differ."""

    def __init__(self, fire: Fire):
        super().__init__()
        inputs, outputs = channels(fire)
        self.fire = fire
        self.bypass = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, K, H, W]"""
        bypassed: Tensor = self.fire(x) + self.bypass(x)
        return bypassed


def channels(fire: Fire) -> tuple[int, int]:
    """The channels of a fire module's input and of its output."""
    return fire.squeeze.in_channels, fire.expand1x1.out_channels + fire.expand3x3.out_channels


@register(images(224))
def squeezenet(training: bool, *, bypass: str = "none") -> nn.Module:
    """SqueezeNet 1.0, the network of the paper (Iandola et al. 2016).

    Args:
        bypass: of the paper's Figure 2. "simple" is around the fire modules whose input and output have equal channels,
            "complex" around all of them, as in IOS's network.
    """
    if wrong := not_one_of("model.bypass", bypass, BYPASSES):
        raise BadModel(wrong)
    network = torchvision.squeezenet1_0(weights=None)
    for i, layer in enumerate(network.features):
        if isinstance(layer, Fire) and (bypass == "complex" or (bypass == "simple" and len({*channels(layer)}) == 1)):
            network.features[i] = BypassedFire(layer)
    return network


@register(images(224))
def vgg16(training: bool) -> nn.Module:
    """VGG-16 (configuration D), without batch norm."""
    return torchvision.vgg16(weights=None)
