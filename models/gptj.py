"""GPT-J, whose blocks compute attention beside a perceptron: over a prompt, and for one token with a static K/V cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.gptj import GPTJConfig, GPTJForCausalLM

from models.registry import BadModel, Input, is_small, register

VOCABULARY, POSITIONS = 50400, 2048


def configured(size: str) -> GPTJConfig:
    """Of GPT-J 6B, or of two narrow layers."""
    width, layers, heads, rotary = (64, 2, 4, 8) if is_small(size) else (4096, 28, 16, 64)
    return GPTJConfig(
        vocab_size=VOCABULARY,
        n_positions=POSITIONS,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        rotary_dim=rotary,
        use_cache=False,
    )


class Prompt(nn.Module):
    """Token ids [B, S] -> logits [B, S, vocabulary]."""

    causal: Tensor
    places: Tensor

    def __init__(self, config: GPTJConfig, sequence: int):
        super().__init__()
        self.gptj = GPTJForCausalLM(config)
        # The library would make the mask anew in each call, from a scalar on the CPU.
        above = torch.full((sequence, sequence), float("-inf")).triu(1)
        self.register_buffer("causal", above[None, None], persistent=False)
        self.register_buffer("places", torch.arange(sequence)[None], persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.gptj(tokens, attention_mask=self.causal, position_ids=self.places, use_cache=False).logits
        return logits


class StaticCache(nn.Module):
    """Keys and values of a fixed number of places, which a step writes at one of them.

    Invariant: the tensors stay where they are; `position` says where the step writes, and what lies beyond it is not read.

    Args:
        batch: samples.
        places: of each.
        position: where the step writes; those before it hold random keys and values, as of a prompt.
    """

    position: Tensor

    def __init__(self, config: GPTJConfig, batch: int, places: int, position: int):
        super().__init__()
        shape = (batch, config.n_head, places, config.n_embd // config.n_head)
        for layer in range(config.n_layer):
            self.register_buffer(f"keys_{layer}", torch.randn(shape), persistent=False)
            self.register_buffer(f"values_{layer}", torch.randn(shape), persistent=False)
        self.register_buffer("position", torch.tensor([position]), persistent=False)

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """What the library's attention calls: [B, heads, 1, D] is written, all [B, heads, places, D] come back."""
        keys, values = self.get_buffer(f"keys_{layer}"), self.get_buffer(f"values_{layer}")
        keys.index_copy_(2, self.position, key)
        values.index_copy_(2, self.position, value)
        return keys, values


class DecodeStep(nn.Module):
    """A token id of each sample [B, 1] -> logits of the next [B, 1, vocabulary]. It writes its K/V cache in place."""

    places: Tensor
    unmasked: Tensor

    def __init__(self, config: GPTJConfig, batch: int, context: int):
        super().__init__()
        self.gptj = GPTJForCausalLM(config)
        self.cache = StaticCache(config, batch, context, context - 1)
        self.register_buffer("places", torch.arange(context), persistent=False)
        self.register_buffer("unmasked", torch.zeros(1, 1, 1, context), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = self.unmasked.masked_fill(self.places > self.cache.position, float("-inf"))
        position = self.cache.position[None]
        hidden = self.gptj.transformer(
            tokens, past_key_values=self.cache, attention_mask=mask, position_ids=position, use_cache=True, return_dict=False
        )[0]
        logits: Tensor = self.gptj.lm_head(hidden)
        return logits


def _checked(key: str, length: int) -> None:
    if length > POSITIONS:
        raise BadModel(f"option {key} of model gptj_6b must be at most {POSITIONS}, not {length}")


@register(lambda size, sequence: (Input((sequence,), VOCABULARY),), is_made_in_place=True)
def gptj_6b(training: bool, *, size: str = "full", sequence: int = 128) -> nn.Module:
    """GPT-J 6B (Wang & Komatsuzaki 2021) over a prompt of `sequence` tokens."""
    _checked("sequence", sequence)
    return Prompt(configured(size), sequence)


@register(lambda size, context: (Input((1,), VOCABULARY),), is_made_in_place=True)
def gptj_6b_decode(training: bool, batch: int, *, size: str = "full", context: int = 512) -> nn.Module:
    """One step of GPT-J 6B: the last token of `context`, of which the cache holds all before it."""
    _checked("context", context)
    return DecodeStep(configured(size), batch, context)
