"""Diffusion: the network of one denoising step. It needs the extra `diffusion`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from models.registry import BadModel, Input, is_small, register

CHANNELS = 4  # of a latent image
TEXT_TOKENS, STEPS = 77, 1000
SMALL_WIDTH = 64  # of the small form's text states


class DenoisingStep(nn.Module):
    """Latents [B, 4, H, H], time steps [B] and text states [B, 77, W] -> the noise, [B, 4, H, H]."""

    def __init__(self, **config: Any):
        super().__init__()
        try:
            from diffusers.models import UNet2DConditionModel
        except ImportError as error:
            raise BadModel("model sd15_unet needs diffusers: pip install diffusers") from error
        self.unet = UNet2DConditionModel(in_channels=CHANNELS, out_channels=CHANNELS, **config)

    def forward(self, latents: Tensor, steps: Tensor, text: Tensor) -> Tensor:
        noise: Tensor = self.unet(latents, steps, text, return_dict=False)[0]
        return noise


def _inputs(size: str) -> tuple[Input, ...]:
    side, width = (16, SMALL_WIDTH) if is_small(size) else (64, 768)
    return Input((CHANNELS, side, side)), Input((), STEPS), Input((TEXT_TOKENS, width))


@register(_inputs, is_made_in_place=True)
def sd15_unet(training: bool, *, size: str = "full") -> nn.Module:
    """The UNet of Stable Diffusion 1.5 (Rombach et al. 2022), for images of 512 pixels."""
    if is_small(size):
        blocks = {
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
        }
        return DenoisingStep(sample_size=16, cross_attention_dim=SMALL_WIDTH, attention_head_dim=8, **blocks)
    # Its defaults but for the width of the text states.
    return DenoisingStep(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
