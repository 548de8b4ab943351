"""Heads for segmentation and detection, whose branches see the same features at several scales."""

from __future__ import annotations

from torch import Tensor, nn
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.resnet import Bottleneck
from torchvision.models.segmentation import deeplabv3_resnet50 as torchvision_deeplab
from torchvision.models.segmentation.deeplabv3 import ASPPPooling

from models.registry import Input, is_small, register

CHANNELS, ANCHORS, CLASSES = 256, 9, 91
LEVELS, SMALL_LEVELS = (100, 50, 25, 13, 7), (16, 8, 4, 2, 1)  # sides of P3 to P7 of an image of 800 pixels; of 128


class Segmentation(nn.Module):
    """Images [B, 3, H, H] -> logits [B, 21, H, H]; in train form (logits, auxiliary logits)."""

    def __init__(self, training: bool):
        super().__init__()
        self.deeplab = torchvision_deeplab(weights=None, weights_backbone=None, num_classes=21, aux_loss=training)
        _damp_branches(self.deeplab.backbone)
        _fix_variance_of_means(self.deeplab.classifier)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        output = self.deeplab(images)
        return (output["out"], output["aux"]) if "aux" in output else output["out"]


class Detection(nn.Module):
    """Features of five levels, each [B, 256, H, H] -> (logits [B, A, 91], boxes [B, A, 4]) of all A anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.head = RetinaNetHead(CHANNELS, ANCHORS, CLASSES)
        for layer in self.head.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight)  # the library's begin so small that only the biases would be seen

    def forward(self, *levels: Tensor) -> tuple[Tensor, Tensor]:
        output = self.head(list(levels))
        return output["cls_logits"], output["bbox_regression"]


@register(lambda size: (Input((3, 97, 97) if is_small(size) else (3, 520, 520)),))
def deeplabv3_resnet50(training: bool, *, size: str = "full") -> nn.Module:
    """DeepLabv3 on ResNet-50 (Chen et al. 2017), at torchvision's 520 pixels. `size` is that of the image.

    Its random weights are torchvision's but for the scale of residual branches; one batch norm has a fixed variance.
    """
    is_small(size)
    return Segmentation(training)


@register(lambda size: tuple(Input((CHANNELS, side, side)) for side in (SMALL_LEVELS if is_small(size) else LEVELS)))
def retinanet_heads(training: bool, *, size: str = "full") -> nn.Module:
    """RetinaNet's class and box heads (Lin et al. 2017) on five levels, up to the anchors' values. `size` is the image's."""
    is_small(size)
    return Detection()


def _damp_branches(backbone: nn.Module) -> None:
    """Scale what a residual branch adds by 1 / sqrt(number of blocks), so that a block is near the identity.

    Deep residual networks learn from such a beginning (De and Smith 2020). Without it, differences grow with every
    normalized layer of random weights, as gradients do (Yang et al. 2019), and so does rounding. A classifier's mean over
    positions averages rounding out. Here every position is an output, and in bf16 most of it would be rounding.
    """
    blocks = [block for block in backbone.modules() if isinstance(block, Bottleneck)]
    for block in blocks:
        nn.init.constant_(block.bn3.weight, len(blocks) ** -0.5)


def _fix_variance_of_means(classifier: nn.Module) -> None:
    """Keep calibration from the batch norm behind a mean over the image, [B, C, 1, 1].

    A channel has one value for each image there, which random weights make nearly equal for all images. Dividing by so small
    a deviation would multiply rounding.
    """
    for pooling in classifier.modules():
        if isinstance(pooling, ASPPPooling):
            (norm,) = (layer for layer in pooling if isinstance(layer, nn.BatchNorm2d))
            assert norm.running_var is not None
            norm.running_var.fill_(1 / 3)  # what its convolution's uniform weights make of features of mean square 1
