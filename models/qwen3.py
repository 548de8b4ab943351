"""Qwen3 (Yang et al. 2025), a decoder of today: RMSNorm, rotary positions, fewer heads of keys than of queries, and SwiGLU.

Its operators, all but attention, take tokens of any requests side by side, as GPT's do.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.gpt import Attention
from models.registry import BadModel


@dataclass(frozen=True)
class Qwen3Shape:
    """The size of a Qwen3.

    Args:
        layers, hidden: of the decoder.
        heads, kv_heads: of queries, and of keys and values; a multiple of the latter.
        head_size: of each.
        inner: width between the products of a block's second half.
        positions: the longest sequence.
        vocabulary: token ids are below it.
        rope_base: of the rotary positions' frequencies.
        epsilon: of the norms.
        is_tied: the embedding of tokens is also the last product's weight.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    positions: int
    vocabulary: int
    rope_base: float = 1e6
    epsilon: float = 1e-6
    is_tied: bool = True

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise BadModel(f"option heads of model qwen3 must be a multiple of kv_heads ({self.kv_heads}), not {self.heads}")
        if self.head_size % 2:
            raise BadModel(f"option head_size of model qwen3 must be even, not {self.head_size}")


class Qwen3Block(nn.Module):
    """A decoder block, norms first: [..., hidden] -> [..., hidden]."""

    def __init__(self, shape: Qwen3Shape):
        super().__init__()
        hidden, size, epsilon = shape.hidden, shape.head_size, shape.epsilon
        self.size = size
        self.norm_attention, self.norm_mlp = nn.RMSNorm(hidden, epsilon), nn.RMSNorm(hidden, epsilon)
        self.norm_q, self.norm_k = nn.RMSNorm(size, epsilon), nn.RMSNorm(size, epsilon)
        self.q = nn.Linear(hidden, shape.heads * size, bias=False)
        self.k, self.v = (nn.Linear(hidden, shape.kv_heads * size, bias=False) for _ in range(2))
        self.out = nn.Linear(shape.heads * size, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, hidden, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], layer: int, attention: Attention) -> Tensor:
        """turn: cosines and sines of each token's place, each [..., 1, head size]."""
        normed = self.norm_attention(x)
        q, k, v = (product(normed).unflatten(-1, (-1, self.size)) for product in (self.q, self.k, self.v))
        q, k = turned(self.norm_q(q), turn), turned(self.norm_k(k), turn)
        x = x + self.out(attention(layer, q, k, v).flatten(-2))
        normed = self.norm_mlp(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Qwen3(nn.Module):
    """Token ids [B, S] -> logits [B, S, vocabulary]."""

    start_token = None  # a stream begins with its prompt

    def __init__(self, shape: Qwen3Shape):
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Qwen3Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.epsilon)
        self.head = None if shape.is_tied else nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    @property
    def device(self) -> torch.device:
        return self.tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.tokens.weight.dtype

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.hidden(tokens, torch.arange(tokens.shape[-1], device=tokens.device), grouped_causal))

    def hidden(self, tokens: Tensor, places: Tensor, attention: Attention) -> Tensor:
        """The last hidden state, [..., hidden]. Arguments as GPT's."""
        x = self.tokens(tokens)
        turn = self._turn(places, x.dtype)
        for layer, block in enumerate(self.blocks):
            x = block(x, turn, layer, attention)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocabulary]."""
        return functional.linear(hidden, self.tokens.weight if self.head is None else self.head.weight)

    def forward_in(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits [S, vocabulary] of ids [S] in another precision, a block at a time: a wider copy need not fit."""
        x = self.tokens.weight[tokens].to(dtype)[None]
        turn = self._turn(torch.arange(len(tokens), device=tokens.device), dtype)
        for layer, block in enumerate(self.blocks):
            x = deepcopy(block).to(dtype)(x, turn, layer, grouped_causal)
        weight = self.tokens.weight if self.head is None else self.head.weight
        return functional.linear(deepcopy(self.norm).to(dtype)(x[0]), weight.to(dtype))

    def _turn(self, places: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of places [...], each [..., 1, head size]."""
        size = self.shape.head_size
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        exponents = torch.arange(0, size, 2, device=places.device, dtype=wide) / size
        angles = places[..., None].to(wide) * self.shape.rope_base**-exponents
        angles = torch.cat((angles, angles), dim=-1)[..., None, :]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions (Su et al. 2021) of x, [..., heads, head size]: its halves are the parts of complex numbers."""
    cosine, sine = turn
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def grouped_causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over whole sequences [B, S, heads, head size], each token to those before it and itself."""
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(-2, -3)
