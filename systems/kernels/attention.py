"""Scaled dot-product attention of few queries and keys, as models have it at small batches, in one kernel.

A block has some queries of one head, and goes through the keys with a running softmax. In fp32 its products are on tensor
cores, where a library's take none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dense import PRECISIONS
from .kernel import Kernel, Launch
from .tile import let_consumers_launch, power_of_two, rounded, strides_of, wait_for_producers

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) is exp2(LOG2_E * x), which is one instruction
LARGEST_HEAD = 256  # numbers of a head: a block holds a sum of each


@dataclass(frozen=True)
class AttentionTile:
    """How the scores [queries, keys] of a head are cut.

    Args:
        queries: of a block.
        keys: that it reads at a time; both powers of two, 16 at least.
        warps: of a block.
    """

    queries: int
    keys: int
    warps: int

    def __str__(self) -> str:
        return f"{self.queries} queries, {self.keys} keys, {self.warps} warps"


TILES = (
    AttentionTile(16, 32, 2),
    AttentionTile(16, 64, 2),
    AttentionTile(16, 64, 4),
    AttentionTile(16, 128, 4),
    AttentionTile(32, 64, 4),
    AttentionTile(64, 64, 4),
    AttentionTile(128, 64, 8),
)
MOST_BLOCKS = 16  # of a core


@dataclass(frozen=True)
class Attention(Kernel):
    """out = softmax(scale * query @ key.T + mask) @ value, of each head.

    Args:
        scale: of the scores.
        is_causal: query i sees keys 0 to i alone.
        precision: of the products of fp32 tensors, one of PRECISIONS. Raises ValueError for another.
        is_token_major: the heads of a token lie beside each other in the output; else the tokens of a head do.
        tile: how the scores are cut.
        is_moved: the output, which is token-major, is returned as [N, queries, heads, E].
    """

    scale: float
    is_causal: bool
    precision: str
    is_token_major: bool
    tile: AttentionTile
    is_moved: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"there is no precision {self.precision}")

    def __str__(self) -> str:
        words = ["causal"] * self.is_causal + ["token-major"] * self.is_token_major + ["moved"] * self.is_moved
        return ", ".join([f"scale {self.scale:.9g}", *words, self.precision, str(self.tile)])

    def launch(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, out: Tensor | None = None
    ) -> Launch:
        """Args:
        query: [N, heads, queries, D], whose last stride is 1, as those of all but the mask.
        key: [N, K/V heads, keys, D], whose heads have as many query heads each.
        value: [N, K/V heads, keys, E]; D and E are LARGEST_HEAD at most.
        mask: broadcast to [N, heads, queries, keys]; what is added to scores, or a bool that says which count. A query of
            which none counts has zeros.
        out: where it writes, of the shape that it returns; a new tensor where there is none.
        """
        n, heads, num_queries, size = query.shape
        num_keys, value_size = value.shape[2:]
        if out is None:
            sizes = (n, num_queries, heads, value_size) if self.is_token_major else (n, heads, num_queries, value_size)
            out = torch.empty(sizes, dtype=query.dtype, device=query.device)
            out = out.transpose(1, 2) if self.is_token_major and not self.is_moved else out
        heads_first = out.transpose(1, 2) if self.is_moved else out
        seen = None if mask is None else mask.expand(n, heads, num_queries, num_keys)
        tile = self.tile
        arguments = (
            query, key, value, mask, heads_first, heads, num_queries, num_keys, self.scale,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *strides_of(seen), *heads_first.stride()[:3],
            heads // key.shape[1], size, value_size, power_of_two(size), power_of_two(value_size),
            mask is not None and mask.dtype is torch.bool, self.is_causal, self.precision,
            tile.queries, tile.keys, self.is_early,
        )  # fmt: skip
        grid = (triton.cdiv(num_queries, tile.queries), n * heads)
        return Launch(
            _attention, grid, arguments, {"num_warps": tile.warps, "num_stages": 2, "launch_pdl": self.is_early}, out
        )


def tiles(num_queries: int, num_keys: int, num_heads: int, num_cores: int) -> list[AttentionTile]:
    """The tiles worth a trial; none of so few queries that blocks are many more than there are cores.

    Args:
        num_heads: of queries, of all samples.
        num_cores: multiprocessors of the GPU.
    """
    widest = power_of_two(num_queries), power_of_two(num_keys)
    candidates = []
    for tile in TILES:
        num_blocks = -(-num_queries // tile.queries) * num_heads
        if tile.queries <= widest[0] and tile.keys <= widest[1] and num_blocks <= MOST_BLOCKS * num_cores:
            candidates.append(tile)
    return candidates or [AttentionTile(min(64, widest[0]), min(64, widest[1]), 4)]


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    """a @ b in fp32."""
    if PRECISION == "tf32" and a.dtype == tl.float32:
        a, b = rounded(a), rounded(b)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit(do_not_specialize=["HEADS", "NUM_QUERIES", "NUM_KEYS"])
def _attention(
    query_ptr, key_ptr, value_ptr, mask_ptr, out_ptr, HEADS, NUM_QUERIES, NUM_KEYS, scale,
    QN, QH, QS, KN, KH, KS, VN, VH, VS, MN, MH, MQ, MK, ON, OH, OS,
    GROUP: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
    IS_BOOL: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_producers(IS_EARLY)
    first = tl.program_id(0) * QUERIES
    sample, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    i, d, e = first + tl.arange(0, QUERIES), tl.arange(0, PADDED), tl.arange(0, VALUE_PADDED)
    is_query, is_d, is_e = i < NUM_QUERIES, d < SIZE, e < VALUE_SIZE
    query_ptr += sample * QN + head * QH
    key_ptr += sample * KN + head // GROUP * KH
    value_ptr += sample * VN + head // GROUP * VH
    queries = tl.load(query_ptr + i[:, None] * QS + d[None, :], mask=is_query[:, None] & is_d[None, :], other=0.0)
    highest = tl.full((QUERIES,), float("-inf"), tl.float32)
    totals = tl.full((QUERIES,), 0.0, tl.float32)
    sums = tl.full((QUERIES, VALUE_PADDED), 0.0, tl.float32)
    end = tl.minimum(first + QUERIES, NUM_KEYS) if IS_CAUSAL else NUM_KEYS
    for begin in range(0, end, KEYS):
        j = begin + tl.arange(0, KEYS)
        is_key = j < NUM_KEYS
        keys = tl.load(key_ptr + j[None, :] * KS + d[:, None], mask=is_key[None, :] & is_d[:, None], other=0.0)
        values = tl.load(value_ptr + j[:, None] * VS + e[None, :], mask=is_key[:, None] & is_e[None, :], other=0.0)
        scores = _product(queries, keys, PRECISION) * (scale * LOG2_E)
        is_seen = is_query[:, None] & is_key[None, :]
        if mask_ptr is not None:
            place = sample * MN + head * MH + i[:, None] * MQ + j[None, :] * MK
            mask = tl.load(mask_ptr + place, mask=is_seen, other=0)
            if IS_BOOL:
                is_seen &= mask != 0
            else:
                scores += mask.to(tl.float32) * LOG2_E
        if IS_CAUSAL:
            is_seen &= j[None, :] <= i[:, None]
        scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        sums = sums * shrink[:, None] + _product(shares.to(values.dtype), values, PRECISION)
        totals = totals * shrink + tl.sum(shares, axis=1)
        highest = higher
    let_consumers_launch(IS_EARLY)
    sums = sums / tl.where(totals == 0.0, 1.0, totals)[:, None]
    place = sample * ON + head * OH + i[:, None] * OS + e[None, :]
    tl.store(out_ptr + place, sums.to(out_ptr.dtype.element_ty), mask=is_query[:, None] & is_e[None, :])
