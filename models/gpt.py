"""GPT, the decoder that chapter 4 of the dissertation serves, at any size; made on the device where it will run.

A block's operators, all but attention, take tokens of any requests side by side. So one module runs a padded batch
[B, S] as the zoo's models do, and flattened tokens [N] of many requests as a serving engine does.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.registry import BadModel, Input, register

STD = 0.02  # of weights (GPT-2)
PADDED_TO = 64  # rows of the embedding: products with an odd number of columns are slow
NUM_DRAWS = 8  # parts that each weight is drawn in, so that a part of it can be made alone

# (layer, queries, keys, values), each [..., heads, head size] -> the attention's output, the same shape
Attention: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """The size of a GPT.

    Args:
        layers, hidden, heads: of the decoder.
        positions: the longest sequence.
        vocabulary: token ids are below it.
    """

    layers: int
    hidden: int
    heads: int
    positions: int
    vocabulary: int

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise BadModel(f"option hidden of model gpt must be a multiple of heads ({self.heads}), not {self.hidden}")

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


class Block(nn.Module):
    """A decoder block, norms first: [..., hidden] -> [..., hidden]."""

    def __init__(self, shape: Shape):
        super().__init__()
        hidden = shape.hidden
        self.heads = (shape.heads, 3, shape.head_size)  # the rows of qkv, so that a part of the heads is a part of the rows
        self.norm_attention, self.norm_mlp = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, layer: int, attention: Attention) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, self.heads).unbind(-2)  # each [..., heads, head size]
        x = x + self.out(attention(layer, q, k, v).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class GPT(nn.Module):
    """Token ids [B, S] -> logits [B, S, vocabulary]. The embedding of tokens is also the last product's weight."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        rows = -(-shape.vocabulary // PADDED_TO) * PADDED_TO
        self.tokens, self.places = nn.Embedding(rows, shape.hidden), nn.Embedding(shape.positions, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[-1], device=tokens.device)
        return self.logits(self.hidden(tokens, places, causal))

    def hidden(self, tokens: Tensor, places: Tensor, attention: Attention) -> Tensor:
        """The last hidden state, [..., hidden].

        Args:
            tokens: ids, [B, S] or [N].
            places: of each token in its own request, from 0; [S] or [N].
            attention: all that knows which tokens belong together.
        """
        x = self.tokens(tokens) + self.places(places)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, attention)
        return self.norm(x)

    def forward_in(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits [S, vocabulary] of ids [S] in another precision, a block at a time: a wider copy need not fit."""
        x = self.tokens.weight[tokens].to(dtype) + self.places.weight[: len(tokens)].to(dtype)
        x = x[None]
        for layer, block in enumerate(self.blocks):
            x = deepcopy(block).to(dtype)(x, layer, causal)
        x = deepcopy(self.norm).to(dtype)(x[0])
        return functional.linear(x, self.tokens.weight.to(dtype))[:, : self.shape.vocabulary]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocabulary]."""
        return functional.linear(hidden, self.tokens.weight)[..., : self.shape.vocabulary]

    @torch.no_grad()
    def draw(self, seed: int = 0) -> GPT:
        """Fill with random weights on the device that they are on, the same for a seed. The caller's random state stays.

        Products into the residual stream are smaller by the root of their number, as GPT-2's.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(float("norm" in name and name.endswith("weight")))
                continue
            is_residual = name.endswith(("out.weight", "down.weight"))
            std = STD / math.sqrt(2 * self.shape.layers) if is_residual else STD
            for i, part in enumerate(parameter.chunk(NUM_DRAWS, dim=int(is_residual))):
                generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed}/{name}/{i}".encode()))
                part.copy_(torch.randn(part.shape, generator=generator, device=part.device, dtype=part.dtype) * std)
        return self


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over whole sequences [B, S, heads, head size], each token to those before it and itself."""
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))  # [B, heads, S, head size]
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3)


def made(shape: Shape, device: str | torch.device, dtype: torch.dtype, seed: int = 0) -> GPT:
    """A GPT on random weights, never on the host if it is for a GPU: 13 B parameters take 24 GiB there in fp16."""
    with torch.device("meta"):
        module = GPT(shape)
    return module.to(dtype).to_empty(device=device).draw(seed).eval()


def _inputs(*, sequence: int = 64, vocabulary: int = 512, **options: int) -> tuple[Input, ...]:
    return (Input((sequence,), vocabulary),)


@register(_inputs)
def gpt(
    training: bool,
    *,
    layers: int = 4,
    hidden: int = 128,
    heads: int = 4,
    positions: int = 2048,
    vocabulary: int = 512,
    sequence: int = 64,
) -> nn.Module:
    """GPT, tokens [B, sequence] -> logits [B, sequence, vocabulary]. By default small enough for any CPU."""
    if sequence > positions:
        raise BadModel(f"option sequence of model gpt must be at most positions ({positions}), not {sequence}")
    module = GPT(Shape(layers, hidden, heads, positions, vocabulary))
    return module if module.norm.weight.is_meta else module.draw()
