"""Two-tower encoders: one network for images and one for texts, which meet in their last product."""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.clip import CLIPConfig, CLIPModel

from models.language import ATTENTION
from models.registry import Input, is_small, register

VOCABULARY = 49408
TOKENS = 77  # of a text
HIGHEST = 2  # the end token of the published configuration, by which a text is read at its highest token id


class Clip(nn.Module):
    """Images [B, 3, H, H] and token ids [B, 77] -> (similarity [B, B], texts [B, D], images [B, D])."""

    def __init__(self, config: CLIPConfig):
        super().__init__()
        self.clip = CLIPModel(config)

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        output = self.clip(input_ids=tokens, pixel_values=images)
        return output.logits_per_image, output.text_embeds, output.image_embeds


def _inputs(size: str) -> tuple[Input, ...]:
    side = 64 if is_small(size) else 224
    return Input((3, side, side)), Input((TOKENS,), VOCABULARY)


@register(_inputs)
def clip_vit_b32(training: bool, *, size: str = "full") -> nn.Module:
    """CLIP ViT-B/32 (Radford et al. 2021): an image tower and a text tower of 12 layers each."""
    text: dict[str, int] = {"eos_token_id": HIGHEST}
    vision: dict[str, int] = {}
    if is_small(size):
        width = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        text, vision = text | width, width | {"image_size": 64}
    # Its defaults are those of ViT-B/32.
    config = CLIPConfig(  # type: ignore[call-arg] # attn_implementation is of every configuration's base class
        text_config=text, vision_config=vision, attn_implementation=ATTENTION
    )
    return Clip(config)
