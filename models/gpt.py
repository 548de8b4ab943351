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
from models.shapes import allocated, on_no_device

STD = 0.02  # of weights (GPT-2)
PADDED_TO = 64  # rows of the embedding: products with an odd number of columns are slow
NUM_DRAWS = 8  # parts that each weight is drawn in, so that a part of it can be made alone

# (layer, queries, keys, values), each [..., heads, head size] -> the attention's output, the same shape
Attention: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# (a summand, what is added to it once or None): the sum over the parts of a block takes the summand's place
Sum: TypeAlias = Callable[[Tensor, Tensor | None], None]


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
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


class Operators:
    """What a block computes beside attention, by PyTorch's operators. A serving engine may have kernels of its own for it.

    The residual stream goes between them in two parts, x and what is yet to be added to it, or None.
    """

    def enter(
        self, x: Tensor, addend: Tensor | None, norm: nn.LayerNorm, linear: nn.Linear, is_gelu: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The stream with its addend, and linear(norm(stream)), with the tanh form of GELU after it if `is_gelu`."""
        x, normed = self.norm(x, addend, norm)
        output = linear(normed)
        return x, functional.gelu(output, approximate="tanh") if is_gelu else output

    def leave(self, x: Tensor, linear: nn.Linear, y: Tensor, sum_parts: Sum | None = None) -> tuple[Tensor, Tensor | None]:
        """The stream, and linear(y), summed over the parts of a block that has several, which is yet to be added to it."""
        output = linear(y)
        if sum_parts is not None:
            sum_parts(output, None)
        return x, output

    def norm(self, x: Tensor, addend: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        """The stream with its addend, and its norm."""
        x = x if addend is None else x + addend
        return x, norm(x)


PLAIN = Operators()


class Block(nn.Module):
    """A decoder block, norms first: the residual stream [..., hidden] in two parts, before and after.

    degree: parts that its heads and its inner width are split into, of which it has one. The outputs of `out` and `down` are
        then summands of the block's own (Megatron-LM).
    sum_parts: what sums them, where there are several.
    """

    sum_parts: Sum | None = None

    def __init__(self, shape: Shape, degree: int = 1):
        super().__init__()
        hidden, inner = shape.hidden, shape.hidden // degree
        # The rows of qkv are of one head after another, so that a part of the heads is a part of the rows.
        self.heads = (shape.heads // degree, 3, shape.head_size)
        self.norm_attention, self.norm_mlp = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * inner), nn.Linear(inner, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * inner), nn.Linear(4 * inner, hidden)

    def forward(
        self, x: Tensor, addend: Tensor | None, layer: int, attention: Attention, operators: Operators = PLAIN
    ) -> tuple[Tensor, Tensor | None]:
        x, qkv = operators.enter(x, addend, self.norm_attention, self.qkv)
        q, k, v = qkv.unflatten(-1, self.heads).unbind(-2)  # each [..., heads, head size]
        x, addend = operators.leave(x, self.out, attention(layer, q, k, v).flatten(-2), self.sum_parts)
        x, inner = operators.enter(x, addend, self.norm_mlp, self.up, is_gelu=True)
        return operators.leave(x, self.down, inner, self.sum_parts)


class GPT(nn.Module):
    """Token ids [B, S] -> logits [B, S, vocabulary]. The embedding of tokens is also the last product's weight."""

    takes_operators = True
    start_token = None  # a stream begins with its prompt

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        rows = -(-shape.vocabulary // PADDED_TO) * PADDED_TO
        self.tokens, self.places = nn.Embedding(rows, shape.hidden), nn.Embedding(shape.positions, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)

    @property
    def device(self) -> torch.device:
        return self.tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.tokens.weight.dtype

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[-1], device=tokens.device)
        return self.logits(self.hidden(tokens, places, causal))

    def hidden(self, tokens: Tensor, places: Tensor, attention: Attention, operators: Operators = PLAIN) -> Tensor:
        """The last hidden state, [..., hidden].

        Args:
            tokens: ids, [B, S] or [N].
            places: of each token in its own request, from 0; [S] or [N].
            attention: all that knows which tokens belong together.
            operators: for all else.
        """
        x, addend = self.tokens(tokens) + self.places(places), None
        for layer, block in enumerate(self.blocks):
            x, addend = block(x, addend, layer, attention, operators)
        return operators.norm(x, addend, self.norm)[1]

    def forward_in(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits [S, vocabulary] of ids [S] in another precision, a block at a time: a wider copy need not fit."""
        x = self.tokens.weight[tokens].to(dtype) + self.places.weight[: len(tokens)].to(dtype)
        x, addend = x[None], None
        for layer, block in enumerate(self.blocks):
            x, addend = deepcopy(block).to(dtype)(x, addend, layer, causal)
        x = PLAIN.norm(x, addend, deepcopy(self.norm).to(dtype))[1][0]
        return functional.linear(x, self.tokens.weight.to(dtype))[:, : self.shape.vocabulary]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocabulary]."""
        return functional.linear(hidden, self.tokens.weight)[..., : self.shape.vocabulary]

    def draw(self, seed: int = 0) -> GPT:
        """Fill with random weights on the device that they are on, the same for a seed. The caller's random state stays."""
        draw(self, self.shape, seed)
        return self


@torch.no_grad()
def draw(module: nn.Module, shape: Shape, seed: int, rank: int = 0, degree: int = 1) -> None:
    """Fill a GPT, or a part of one, with the random weights of a seed.

    Products into the residual stream are smaller by the root of their number, as GPT-2's.

    Args:
        module: whose parameters have a GPT's names.
        shape: of the whole.
        rank, degree: which part it is of how many that each block is split into; a divisor of NUM_DRAWS.
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(float("norm" in name and name.endswith("weight")))
            continue
        is_residual = name.endswith(("out.weight", "down.weight"))
        std = STD / math.sqrt(2 * shape.layers) if is_residual else STD
        num_draws = NUM_DRAWS // degree if name.startswith("blocks.") else NUM_DRAWS
        first = rank * num_draws if name.startswith("blocks.") else 0
        for i, part in enumerate(parameter.chunk(num_draws, dim=int(is_residual)), first):
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed}/{name}/{i}".encode()))
            part.copy_(torch.randn(part.shape, generator=generator, device=part.device, dtype=part.dtype) * std)


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over whole sequences [B, S, heads, head size], each token to those before it and itself."""
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))  # [B, heads, S, head size]
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3)


def made(shape: Shape, device: str | torch.device, dtype: torch.dtype, seed: int = 0) -> GPT:
    """A GPT on random weights, never on the host if it is for a GPU: 13 B parameters take 24 GiB there in fp16."""
    with on_no_device():
        module = GPT(shape)
    return allocated(module, device, dtype).draw(seed).eval()


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
        raise BadModel(
            f"option sequence of model gpt must be at most positions ({positions}), not {sequence}: set model.sequence too"
        )
    module = GPT(Shape(layers, hidden, heads, positions, vocabulary))
    return module if module.norm.weight.is_meta else module.draw()
