"""T5 (Raffel et al. 2020) as a server runs it: an encoder over a request's prompt, and a decoder that generates.

The decoder attends to its own tokens and, across, to the encoder's output. Keys and values of both are of one size, so a
request holds a slot for each token of its prompt (across) and for each of its decoder's (its own).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.registry import BadModel

# Places of keys minus those of queries [L, C] -> what is added to the scores, [heads, L, C]
Bias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class T5Shape:
    """The size of a T5.

    Args:
        layers: of the encoder, and of the decoder.
        hidden: width.
        heads, head_size: of attention; their product need not be the width.
        inner: width between the products of a feed-forward part.
        positions: the most tokens of a prompt and its answer.
        vocabulary: token ids are below it.
        buckets, distance: of relative positions, and from where on all are in the last.
        epsilon: of the norms.
        is_gated: the feed-forward part is a gated GELU (T5 1.1), else a ReLU.
        start_token: the decoder's first.
    """

    layers: int
    hidden: int
    heads: int
    head_size: int
    inner: int
    positions: int
    vocabulary: int
    buckets: int = 32
    distance: int = 128
    epsilon: float = 1e-6
    is_gated: bool = False
    start_token: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.start_token < self.vocabulary:
            raise BadModel(f"option start_token of model t5_generation is not below vocabulary ({self.vocabulary})")

    @property
    def kv_heads(self) -> int:
        return self.heads


class Mixed(Protocol):
    """What knows which tokens belong together: tokens of prompts and of decoders, of any requests, side by side.

    sources, targets: which of all tokens are of prompts and of decoders, [S] and [D].
    """

    sources: Tensor
    targets: Tensor

    def encode(self, q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor:
        """Attention of prompts' tokens [S, heads, head size] to all of their own prompt."""

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep a decoder layer's keys and values of prompts, each [S, heads, head size]."""

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor:
        """Attention of decoders' tokens [D, heads, head size] to those before them, and to themselves."""

    def across(self, layer: int, q: Tensor) -> Tensor:
        """Attention of decoders' tokens [D, heads, head size] to what is kept of their prompts."""


class Heads(nn.Module):
    """The products of an attention."""

    def __init__(self, shape: T5Shape):
        super().__init__()
        width = shape.heads * shape.head_size
        self.q, self.k, self.v = (nn.Linear(shape.hidden, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, shape.hidden, bias=False)
        self.size = shape.head_size

    def split(self, x: Tensor, *products: nn.Linear) -> list[Tensor]:
        """Products of x, each [N, heads, head size]."""
        return [product(x).unflatten(-1, (-1, self.size)) for product in products]


class FeedForward(nn.Module):
    """[N, hidden] -> [N, hidden]."""

    def __init__(self, shape: T5Shape):
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False) if shape.is_gated else None
        self.up, self.down = (
            nn.Linear(shape.hidden, shape.inner, bias=False),
            nn.Linear(shape.inner, shape.hidden, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(functional.relu(self.up(x)))
        return self.down(functional.gelu(self.gate(x), approximate="tanh") * self.up(x))


class T5Block(nn.Module):
    """A block of the encoder."""

    def __init__(self, shape: T5Shape):
        super().__init__()
        self.own, self.mlp = Heads(shape), FeedForward(shape)
        self.norm_own, self.norm_mlp = (nn.RMSNorm(shape.hidden, shape.epsilon) for _ in range(2))


class T5DecoderBlock(T5Block):
    """A block of the decoder, with attention across."""

    def __init__(self, shape: T5Shape):
        super().__init__(shape)
        self.across, self.norm_across = Heads(shape), nn.RMSNorm(shape.hidden, shape.epsilon)


class T5Stack(nn.Module):
    """The blocks of the encoder or the decoder. places: what each bucket of relative positions adds, [buckets, heads]."""

    def __init__(self, shape: T5Shape, is_decoder: bool):
        super().__init__()
        self.places = nn.Embedding(shape.buckets, shape.heads)
        kind = T5DecoderBlock if is_decoder else T5Block
        self.blocks = nn.ModuleList(kind(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.epsilon)
        self.shape, self.is_decoder = shape, is_decoder

    def bias(self, relative: Tensor) -> Tensor:
        """As Bias."""
        at = bucket(relative, not self.is_decoder, self.shape.buckets, self.shape.distance)
        return self.places(at).movedim(-1, 0)


class T5Generation(nn.Module):
    """A stream is a prompt, the start token, and what has been generated."""

    def __init__(self, shape: T5Shape):
        super().__init__()
        self.shape, self.start_token = shape, shape.start_token
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.encoder, self.decoder = T5Stack(shape, False), T5Stack(shape, True)

    @property
    def device(self) -> torch.device:
        return self.tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.tokens.weight.dtype

    def hidden(self, tokens: Tensor, places: Tensor, attention: Mixed) -> Tensor:
        """The last hidden state of decoders' tokens, [N, hidden]; that of prompts' tokens is zero.

        Args:
            tokens: ids, [N].
            places: not looked at: attention knows relative ones.
            attention: all that knows which tokens belong together.
        """
        sources = self.tokens(tokens[attention.sources])
        if len(sources):
            for block in self.encoder.blocks:
                assert isinstance(block, T5Block)
                q, k, v = block.own.split(block.norm_own(sources), block.own.q, block.own.k, block.own.v)
                sources = sources + block.own.out(attention.encode(q, k, v, self.encoder.bias).flatten(-2))
                sources = sources + block.mlp(block.norm_mlp(sources))
            sources = self.encoder.norm(sources)
        x = self.tokens(tokens[attention.targets])
        for layer, block in enumerate(self.decoder.blocks):
            assert isinstance(block, T5DecoderBlock)
            q, k, v = block.own.split(block.norm_own(x), block.own.q, block.own.k, block.own.v)
            x = x + block.own.out(attention.decode(layer, q, k, v, self.decoder.bias).flatten(-2))
            if len(sources):
                attention.keep(layer, *block.across.split(sources, block.across.k, block.across.v))
            (q,) = block.across.split(block.norm_across(x), block.across.q)
            x = x + block.across.out(attention.across(layer, q).flatten(-2))
            x = x + block.mlp(block.norm_mlp(x))
        whole = x.new_zeros(len(tokens), self.shape.hidden)
        return whole.index_copy(0, attention.targets, self.decoder.norm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocabulary], by the embedding of tokens."""
        return functional.linear(hidden * self.shape.hidden**-0.5, self.tokens.weight)

    def continued(self, prompt: Sequence[int], continuation: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        """Logits of each token of a continuation after all before it, without a cache, [continuation, vocabulary].

        dtype: of a wider copy that computes them; None takes the module as it is.
        """
        module = self if dtype is None else deepcopy(self).to(dtype)
        device = module.tokens.weight.device
        stream = torch.tensor([*prompt, self.start_token, *continuation[:-1]], device=device)
        whole = Whole(len(prompt), len(stream), device)
        return module.logits(module.hidden(stream, stream, whole)[len(prompt) :])


class Whole:
    """One stream, as Mixed."""

    def __init__(self, num_sources: int, num_tokens: int, device: torch.device):
        every = torch.arange(num_tokens, device=device)
        self.sources, self.targets = every[:num_sources], every[num_sources:]
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def encode(self, q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor:
        return attend(q, k, v, bias(self.sources[None] - self.sources[:, None]))

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.kept[layer] = k, v

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor:
        relative = self.targets[None] - self.targets[:, None]
        return attend(q, k, v, bias(relative).masked_fill(relative > 0, float("-inf")))

    def across(self, layer: int, q: Tensor) -> Tensor:
        return attend(q, *self.kept[layer], None)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Attention of [L, heads, head size] over [C, heads, head size], whose scores are not scaled; bias: [heads, L, C]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0).transpose(0, 1)


def bucket(relative: Tensor, is_bidirectional: bool, num_buckets: int, distance: int) -> Tensor:
    """The bucket of each relative position: near ones have one of their own, far ones share on a logarithmic scale."""
    first = torch.zeros_like(relative)
    if is_bidirectional:
        num_buckets //= 2
        first = (relative > 0) * num_buckets
        steps = relative.abs()
    else:
        steps = (-relative).clamp(min=0)
    near = num_buckets // 2
    share = torch.log(steps.clamp(min=1).float() / near) / math.log(distance / near)
    far = (near + (share * (num_buckets - near)).long()).clamp(max=num_buckets - 1)
    return first + torch.where(steps < near, steps, far)
