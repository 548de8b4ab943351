"""Scaled dot-product attention in one kernel.

A block has some queries of one head, and goes through keys with a running softmax. Of few queries there are few blocks, so
several may share the keys of theirs: the last of them to end joins what each has found. In fp32 products are on tensor
cores, where a library's take none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dense import PRECISIONS
from .kernel import Kernel, Launch
from .tile import let_consumers_launch, power_of_two, rounded, strides_of, wait_for_producers

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) is exp2(LOG2_E * x), which is one instruction
LARGEST_HEAD = 256  # numbers of a head: a block holds a sum of each
FEW_STEPS = 4  # of a block, up to which one loop is compiled and not two
JOINED = 8192  # numbers of all parts that are joined at once


@dataclass(frozen=True)
class AttentionTile:
    """How the scores [queries, keys] of a head are cut.

    Args:
        queries: of a block.
        keys: that it reads at a time; both powers of two, 16 at least.
        warps: of a block.
        stages: of the software pipeline.
        splits: blocks that share the keys of their queries.
    """

    queries: int
    keys: int
    warps: int
    stages: int = 2
    splits: int = 1

    def __str__(self) -> str:
        stages = f", {self.stages} stages" if self.stages != 2 else ""
        splits = f", split by {self.splits}" if self.splits > 1 else ""
        return f"{self.queries} queries, {self.keys} keys, {self.warps} warps{stages}{splits}"

    def num_blocks(self, num_queries: int, num_heads: int) -> int:
        """Of so many queries of each head; those that share keys counted once."""
        return -(-num_queries // self.queries) * num_heads


TILES = (
    AttentionTile(16, 32, 2),
    AttentionTile(16, 64, 2),
    AttentionTile(16, 64, 4),
    AttentionTile(16, 128, 4),
    AttentionTile(32, 64, 4),
    AttentionTile(64, 64, 4),
    AttentionTile(128, 64, 8),
)
LONG = (AttentionTile(64, 64, 4, 3), AttentionTile(128, 64, 4, 3), AttentionTile(128, 64, 8, 3), AttentionTile(128, 128, 8))
SHARED = (AttentionTile(16, 32, 2, 4), AttentionTile(16, 64, 4, 3), AttentionTile(16, 128, 4))
MOST_BLOCKS = 16  # of a core
MANY_KEYS = 512  # from which on LONG are tried
SHARED_KEYS = 128  # from which on blocks share them
MOST_SPLITS = 32  # of a head's keys


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
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        tickets: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Launch:
        """Args:
        query: [N, heads, queries, D], whose last stride is 1, as those of all but the mask.
        key: [N, K/V heads, keys, D], whose heads have as many query heads each.
        value: [N, K/V heads, keys, E]; D and E are LARGEST_HEAD at most.
        mask: broadcast to [N, heads, queries, keys]; what is added to scores, or a bool that says which count. A query of
            which none counts has zeros.
        tickets: [blocks without splits] int32, zeros, of this call alone; None without splits.
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
        tile, padded = self.tile, power_of_two(value_size)
        grid = (triton.cdiv(num_queries, tile.queries), n * heads, tile.splits)
        parts = None
        if tile.splits > 1:  # of each query its sums, its highest score and its total
            parts = torch.empty((*grid, tile.queries * (padded + 2)), dtype=torch.float32, device=query.device)
        splits, rows = triton.next_power_of_2(tile.splits), min(tile.queries, triton.next_power_of_2(num_queries))
        chunk = min(padded, max(16, JOINED // (splits * rows)))
        strides = [stride for each in (query, key, value, heads_first) for stride in each.stride()[:3]]
        unit = gcd(16 // query.element_size(), *strides)  # as in `split_by_unit`: a compiler that knows it reads 16 bytes
        arguments = (
            query, key, value, mask, heads_first, parts, tickets, heads, num_queries, num_keys, self.scale,
            *(stride // unit for stride in strides), *strides_of(seen),
            unit, heads // key.shape[1], size, value_size, power_of_two(size), padded,
            mask is None and self.scale > 0, mask is not None and mask.dtype is torch.bool, self.is_causal, self.precision,
            self._loop(num_keys), tile.queries, tile.keys, tile.splits, splits, rows, chunk, self.is_early,
        )  # fmt: skip
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": self.is_early}
        return Launch(_attention, grid, arguments, options, out)

    def _loop(self, num_keys: int) -> str:
        """Which steps check whether a key is seen: "checked" for all, "plain" for none, "both" for the last."""
        if num_keys % self.tile.keys == 0 and not self.is_causal:
            return "plain"
        return "checked" if num_keys <= FEW_STEPS * self.tile.keys * self.tile.splits else "both"


def tiles(num_queries: int, num_keys: int, num_heads: int, num_cores: int) -> list[AttentionTile]:
    """The tiles worth a trial; none of so few queries that blocks are many more than there are cores.

    Args:
        num_heads: of queries, of all samples.
        num_cores: multiprocessors of the GPU.
    """
    widest = power_of_two(num_queries), power_of_two(num_keys)
    candidates = []
    for tile in (*TILES, *LONG) if num_keys >= MANY_KEYS else TILES:
        num_blocks = tile.num_blocks(num_queries, num_heads)
        if tile.queries <= widest[0] and tile.keys <= widest[1] and num_blocks <= MOST_BLOCKS * num_cores:
            candidates.append(tile)
    for tile in SHARED if num_keys >= SHARED_KEYS else ():
        num_blocks, steps = tile.num_blocks(num_queries, num_heads), -(-num_keys // tile.keys)
        numbers = (min(blocks // num_blocks, steps, MOST_SPLITS) for blocks in (num_cores, 2 * num_cores))
        candidates += [replace(tile, splits=splits) for splits in numbers if splits > 1]
    unique = list(dict.fromkeys(candidates))
    return unique or [AttentionTile(min(64, widest[0]), min(64, widest[1]), 4)]


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    """a @ b in fp32."""
    if PRECISION == "tf32" and a.dtype == tl.float32:
        a, b = rounded(a), rounded(b)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _attend(
    begin, end, queries, sums, highest, totals, key_ptr, value_ptr, mask_ptr, i, scale,
    NUM_QUERIES, NUM_KEYS, KS, VS, MQ, MK,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr, IS_SCALED: tl.constexpr,
    IS_BOOL: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr, IS_CHECKED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """What the queries have found, and find of keys begin to end. In checked steps a query may not see a key."""
    d, e = tl.arange(0, PADDED), tl.arange(0, VALUE_PADDED)
    is_d, is_e = (SIZE == PADDED) | (d < SIZE), (VALUE_SIZE == VALUE_PADDED) | (e < VALUE_SIZE)
    for first in range(begin, end, KEYS):
        j = first + tl.arange(0, KEYS)
        is_key = (not IS_CHECKED) | (j < NUM_KEYS)
        keys = tl.load(key_ptr + j[None, :] * KS + d[:, None], mask=is_key[None, :] & is_d[:, None], other=0.0)
        values = tl.load(value_ptr + j[:, None] * VS + e[None, :], mask=is_key[:, None] & is_e[None, :], other=0.0)
        scores = _product(queries, keys, PRECISION)
        if not IS_SCALED:
            scores *= scale
        if mask_ptr is not None:
            place = mask_ptr + i[:, None] * MQ + j[None, :] * MK
            mask = tl.load(place, mask=(i < NUM_QUERIES)[:, None] & is_key[None, :], other=0)
            if IS_BOOL:
                scores = tl.where(mask != 0, scores, float("-inf"))
            else:
                scores += mask.to(tl.float32) * LOG2_E
        if IS_CHECKED:
            is_seen = is_key[None, :]
            if IS_CAUSAL:
                is_seen &= j[None, :] <= i[:, None]
            scores = tl.where(is_seen, scores, float("-inf"))
        # A positive scale keeps the order of scores. So it is multiplied where one instruction subtracts as well.
        factor = scale if IS_SCALED else 1.0
        higher = tl.maximum(highest, tl.max(scores, axis=1) * factor)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(highest - base)
        sums = sums * shrink[:, None] + _product(shares.to(values.dtype), values, PRECISION)
        totals = totals * shrink + tl.sum(shares, axis=1)
        highest = higher
    return sums, highest, totals


@triton.jit
def _store_joined(
    sums, highest, totals, parts_ptr, tickets_ptr, out_ptr, i, first, NUM_QUERIES, OS, VALUE_SIZE: tl.constexpr,
    SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr, QUERIES: tl.constexpr, NUMBERS: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Keep what this block has found; the last of the blocks that share keys joins the parts, in their order, and stores.

    Blocks that share keys differ in program_id(2).

    Args:
        sums: [QUERIES, NUMBERS], this block's.
        parts_ptr: [blocks, SPLITS, QUERIES * (NUMBERS + 2)] fp32, for what each block has found.
        tickets_ptr: [blocks] int32, zeros; left so.
        ROWS: of a block that are queries, at most.
        CHUNK: of NUMBERS that are joined at once.
    """
    block = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    row, number = tl.arange(0, QUERIES), tl.arange(0, NUMBERS)
    size = QUERIES * (NUMBERS + 2)
    first_ptr = parts_ptr + block * SPLITS * size
    own_ptr = first_ptr + tl.program_id(2) * size
    is_query = i < NUM_QUERIES
    tl.store(own_ptr + row[:, None] * NUMBERS + number[None, :], sums, mask=is_query[:, None])
    tl.store(own_ptr + QUERIES * NUMBERS + row, highest, mask=is_query)
    tl.store(own_ptr + QUERIES * (NUMBERS + 1) + row, totals, mask=is_query)
    tl.debug_barrier()  # all threads have written before one of them says so
    if tl.atomic_add(tickets_ptr + block, 1, sem="acq_rel") == SPLITS - 1:
        s, r = tl.arange(0, SPLITS_PADDED), tl.arange(0, ROWS)
        is_part = (s < SPLITS)[:, None] & (first + r < NUM_QUERIES)[None, :]
        part_ptr = first_ptr + s[:, None] * size + r[None, :]
        # Another multiprocessor has written them: they are read where it left them, in the cache that all share.
        highests = tl.load(part_ptr + QUERIES * NUMBERS, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        parts_totals = tl.load(part_ptr + QUERIES * (NUMBERS + 1), mask=is_part, other=0.0, cache_modifier=".cg")
        higher = tl.max(highests, axis=0)
        shares = tl.exp2(highests - tl.where(higher == float("-inf"), 0.0, higher)[None, :])
        total = tl.sum(parts_totals * shares, axis=0)
        shares = shares / tl.where(total == 0.0, 1.0, total)[None, :]
        for chunk in tl.static_range(0, NUMBERS, CHUNK):
            e = chunk + tl.arange(0, CHUNK)
            place = first_ptr + s[:, None, None] * size + r[None, :, None] * NUMBERS + e[None, None, :]
            parts = tl.load(place, mask=is_part[:, :, None], other=0.0, cache_modifier=".cg")
            joined = tl.sum(parts * shares[:, :, None], axis=0).to(out_ptr.dtype.element_ty)
            mask = (first + r < NUM_QUERIES)[:, None] & (e < VALUE_SIZE)[None, :]
            tl.store(out_ptr + (first + r)[:, None] * OS + e[None, :], joined, mask=mask)
        tl.store(tickets_ptr + block, 0)


@triton.jit(do_not_specialize=["HEADS", "NUM_QUERIES", "NUM_KEYS"])
def _attention(
    query_ptr, key_ptr, value_ptr, mask_ptr, out_ptr, parts_ptr, tickets_ptr, HEADS, NUM_QUERIES, NUM_KEYS, scale,
    QN, QH, QS, KN, KH, KS, VN, VH, VS, ON, OH, OS, MN, MH, MQ, MK, UNIT: tl.constexpr,
    GROUP: tl.constexpr, SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
    IS_SCALED: tl.constexpr, IS_BOOL: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr, LOOP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_producers(IS_EARLY)
    first = tl.program_id(0) * QUERIES
    sample, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    i, d, e = first + tl.arange(0, QUERIES), tl.arange(0, PADDED), tl.arange(0, VALUE_PADDED)
    is_query = i < NUM_QUERIES
    query_ptr += (sample * QN + head * QH) * UNIT
    key_ptr += (sample * KN + head // GROUP * KH) * UNIT
    value_ptr += (sample * VN + head // GROUP * VH) * UNIT
    out_ptr += (sample * ON + head * OH) * UNIT
    QS, KS, VS, OS = QS * UNIT, KS * UNIT, VS * UNIT, OS * UNIT
    if mask_ptr is not None:
        mask_ptr += sample * MN + head * MH
    queries = tl.load(query_ptr + i[:, None] * QS + d[None, :], mask=is_query[:, None] & (d < SIZE)[None, :], other=0.0)
    scale *= LOG2_E
    highest = tl.full((QUERIES,), float("-inf"), tl.float32)
    totals = tl.full((QUERIES,), 0.0, tl.float32)
    sums = tl.full((QUERIES, VALUE_PADDED), 0.0, tl.float32)
    begin, end = 0, NUM_KEYS
    if IS_CAUSAL:
        end = tl.minimum(first + QUERIES, NUM_KEYS)
    if SPLITS > 1:
        steps = ((end + KEYS - 1) // KEYS + SPLITS - 1) // SPLITS
        begin = tl.program_id(2) * steps * KEYS
        end = tl.minimum(begin + steps * KEYS, end)
    if LOOP != "checked":
        seen = end
        if LOOP == "both":  # the end of the steps of which all queries see all keys
            if IS_CAUSAL:
                seen = tl.minimum(end, first + 1)
            seen = tl.maximum(begin, begin + (seen - begin) // KEYS * KEYS)
        sums, highest, totals = _attend(
            begin, seen, queries, sums, highest, totals, key_ptr, value_ptr, mask_ptr, i, scale,
            NUM_QUERIES, NUM_KEYS, KS, VS, MQ, MK, SIZE, VALUE_SIZE, PADDED, VALUE_PADDED,
            IS_SCALED, IS_BOOL, IS_CAUSAL, PRECISION, False, KEYS,
        )  # fmt: skip
        begin = seen
    if LOOP != "plain":
        sums, highest, totals = _attend(
            begin, end, queries, sums, highest, totals, key_ptr, value_ptr, mask_ptr, i, scale,
            NUM_QUERIES, NUM_KEYS, KS, VS, MQ, MK, SIZE, VALUE_SIZE, PADDED, VALUE_PADDED,
            IS_SCALED, IS_BOOL, IS_CAUSAL, PRECISION, True, KEYS,
        )  # fmt: skip
    let_consumers_launch(IS_EARLY)
    if SPLITS > 1:
        _store_joined(
            sums, highest, totals, parts_ptr, tickets_ptr, out_ptr, i, first, NUM_QUERIES, OS,
            VALUE_SIZE, SPLITS, SPLITS_PADDED, QUERIES, VALUE_PADDED, ROWS, CHUNK,
        )  # fmt: skip
    else:
        sums = sums / tl.where(totals == 0.0, 1.0, totals)[:, None]
        mask = is_query[:, None] & (e < VALUE_SIZE)[None, :]
        tl.store(out_ptr + i[:, None] * OS + e[None, :], sums.to(out_ptr.dtype.element_ty), mask=mask)
