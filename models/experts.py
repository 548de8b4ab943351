"""Mixtures of experts: each token goes to a few of many perceptrons."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

from models.language import ATTENTION
from models.registry import Input, is_small, register

VOCABULARY = 32_000


class Mixture(nn.Module):
    """Token ids [B, S] -> logits [B, S, vocabulary]."""

    def __init__(self, config: Qwen3MoeConfig):
        super().__init__()
        self.mixture = Qwen3MoeForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.mixture(tokens, use_cache=False).logits
        return logits


def configured(size: str, layers: int = 4, experts: int = 32, vocabulary: int = VOCABULARY) -> Qwen3MoeConfig:
    """Layers as wide as those of Qwen3-30B-A3B, which has 48 of them and 128 experts in each."""
    width, inner, heads, head, chosen = 2048, 768, 32, 128, 8
    if is_small(size):
        layers, experts = 2, 8
        width, inner, heads, head, chosen = 64, 32, 8, 16, 2
    return Qwen3MoeConfig(  # type: ignore[call-arg]
        hidden_size=width,
        moe_intermediate_size=inner,
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=chosen,
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=head,
        norm_topk_prob=True,
        vocab_size=vocabulary,
        use_cache=False,
        attn_implementation=ATTENTION,
    )


@register(lambda size, sequence: (Input((sequence,), VOCABULARY),), is_made_in_place=True)
def qwen3_moe(training: bool, *, size: str = "full", sequence: int = 64) -> nn.Module:
    """Four layers of Qwen3-MoE with 32 experts each, of which a token takes 8; the experts as the library computes them."""
    return Mixture(configured(size))
