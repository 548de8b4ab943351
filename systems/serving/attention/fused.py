"""Attention of all rows in one launch: thread blocks of prompts, chunks and increments side by side (section 4.4).

A prompt's thread block has one head of one tile: up to TILE tokens of one row. An increment waits for memory: its thread
block has all query heads of one K/V head, and a row's places may be shared by several blocks (split-K/V, as Flash-Decoding).
The block that ends last merges their parts. Either reads the row's blocks of slots, so keys and values may lie anywhere.

Invariant: what a row's output is depends on its own keys and values, and on how many blocks share them. That number depends
on the sizes of the launch, and on no other row's values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import NUM_TICKETS, TILE, Layout
from .softmax import accumulated, empty

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Cut:
    """How an increment's places are cut.

    Args:
        keys: places that a block reads at a time, keys and values; a power of two, 16 at least.
        splits: blocks that may share a row's places.
        warps: of a block.
        stages: of the software pipeline: reads in flight.
        is_by_products: on tensor cores, which take 16 query heads at least; else in sums over one query head.
        least_part: places of each of those blocks, at least: a smaller part takes less time than its merging.
    """

    keys: int
    splits: int
    warps: int
    stages: int
    is_by_products: bool
    least_part: int = 256

    def __str__(self) -> str:
        how = "products" if self.is_by_products else "sums"
        return f"{self.keys} keys, {self.splits} splits, {self.warps} warps, {self.stages} stages, {how}"


# By K/V heads of all rows, up to so many: what fills a GPU needs no splits. Measured on an H200 (benchmark_serving.py).
CUTS = ((64, Cut(64, 4, 4, 3, True)),)
FULL = Cut(64, 1, 4, 3, True)  # beyond the table
PROMPT = Cut(64, 1, 4, 3, True)  # of the launches that have prompts


def cut_of(num_blocks: int, has_prompts: bool) -> Cut:
    """The cut of a launch. num_blocks: K/V heads of all tiles."""
    if has_prompts:
        return PROMPT
    return next((cut for most, cut in CUTS if num_blocks <= most), FULL)


@triton.jit
def slots_of(blocks, at, max_blocks, place, is_filled, BLOCK_SIZE: tl.constexpr):
    """The slots of places of a row."""
    if BLOCK_SIZE == 0:
        return (tl.load(blocks + at * max_blocks) + place).to(tl.int64)
    first = tl.load(blocks + at * max_blocks + place // BLOCK_SIZE, mask=is_filled, other=0)
    return (first + place % BLOCK_SIZE).to(tl.int64)


@triton.jit
def _store_kernel(
    k, v, cache, slots, k_token, v_token, slot_stride, kind_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    SIZE: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # within a token a head's values lie HEAD apart, in the cache SIZE
    source = (column // SIZE) * HEAD + column % SIZE
    is_there = column < WIDTH
    vector = tl.load(k + token * k_token + source, mask=is_there)
    tl.store(cache + slot * slot_stride + column, vector, mask=is_there)
    vector = tl.load(v + token * v_token + source, mask=is_there)
    tl.store(cache + kind_stride + slot * slot_stride + column, vector, mask=is_there)


@triton.jit
def _attend_kernel(
    q, cache, out, parts, tickets, row_begins, num_contexts, num_paddings, blocks, tile_rows, tile_begins,
    max_blocks, scale, q_token, q_head, slot_stride, kind_stride, out_token,
    SIZE: tl.constexpr, PADDED: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr,
    QUERIES: tl.constexpr, NUM_KEYS: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, STAGES: tl.constexpr,
    BY_PRODUCTS: tl.constexpr, HAS_PROMPTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = tl.load(tile_rows + tile)
    begin = tl.load(row_begins + at)
    count = tl.load(row_begins + at + 1) - begin  # tokens of the row
    num_context = tl.load(num_contexts + at)
    num_padding = tl.load(num_paddings + at)
    offset = num_context - count  # place of the row's first token
    column = tl.arange(0, PADDED)
    is_column = column < SIZE
    if HAS_PROMPTS and count > 1:
        if split == 0:
            first = tl.load(tile_begins + tile)
            keys = cache + head // GROUP * SIZE
            place = tl.arange(0, NUM_KEYS)
            token = first + tl.arange(0, QUERIES)
            is_token = token < count
            wheres = (begin + token).to(tl.int64)[:, None]
            shown = is_token[:, None] & is_column[None, :]
            queries = tl.load(q + wheres * q_token + head * q_head + column[None, :], mask=shown, other=0.0)
            token_place = offset + token
            mosts, totals, sums = empty(QUERIES, PADDED)
            end = tl.minimum(num_context, offset + first + QUERIES)  # later places are after every token of the tile
            for start in tl.range(0, end, NUM_KEYS, num_stages=STAGES):
                is_filled = start + place < end
                slot = slots_of(blocks, at, max_blocks, start + place, is_filled, BLOCK_SIZE)
                where = keys + slot[:, None] * slot_stride + column[None, :]
                filled = is_filled[:, None] & is_column[None, :]
                key = tl.load(where, mask=filled, other=0.0)
                value = tl.load(where + kind_stride, mask=filled, other=0.0)
                scores = tl.dot(queries, tl.trans(key), input_precision=PRECISION) * scale
                is_seen = is_filled[None, :] & (start + place[None, :] <= token_place[:, None])
                is_seen &= (start + place[None, :] >= num_padding) | (token_place[:, None] < num_padding)
                scores = tl.where(is_seen, scores, float("-inf"))
                mosts, totals, sums = accumulated(mosts, totals, sums, scores, value, True, PRECISION)
            results = sums / tl.where(totals == 0.0, 1.0, totals)[:, None]
            target = out + wheres * out_token + head * SIZE + column[None, :]
            tl.store(target, results.to(out.dtype.element_ty), mask=shown)
    elif head < KV_HEADS:  # an increment: a block has all query heads of one K/V head
        length = tl.maximum(tl.cdiv(tl.cdiv(num_context, SPLITS), NUM_KEYS) * NUM_KEYS, LEAST)  # places of a part
        num_parts = tl.cdiv(num_context, length)
        if split < num_parts:
            keys = cache + head * SIZE
            place = tl.arange(0, NUM_KEYS)
            lowest = tl.where(offset < num_padding, 0, num_padding)  # only padding attends to padding
            begin_place = split * length
            end_place = tl.minimum(begin_place + length, num_context)
            member = tl.arange(0, MEMBERS)
            is_member = member < GROUP
            shown = is_member[:, None] & is_column[None, :]
            query_where = (head * GROUP + member)[:, None] * q_head + column[None, :]
            queries = tl.load(q + begin.to(tl.int64) * q_token + query_where, mask=shown, other=0.0)
            mosts, totals, sums = empty(MEMBERS, PADDED)
            for start in tl.range(begin_place, end_place, NUM_KEYS, num_stages=STAGES):
                is_filled = start + place < end_place
                slot = slots_of(blocks, at, max_blocks, start + place, is_filled, BLOCK_SIZE)
                where = keys + slot[:, None] * slot_stride + column[None, :]
                filled = is_filled[:, None] & is_column[None, :]
                key = tl.load(where, mask=filled, other=0.0)
                value = tl.load(where + kind_stride, mask=filled, other=0.0)
                if BY_PRODUCTS:
                    scores = tl.dot(queries, tl.trans(key), input_precision=PRECISION) * scale
                else:  # MEMBERS is 1
                    scores = tl.sum(key.to(tl.float32) * queries.to(tl.float32), axis=1)[None, :] * scale
                is_seen = is_filled & (start + place >= lowest)
                scores = tl.where(is_seen[None, :], scores, float("-inf"))
                mosts, totals, sums = accumulated(mosts, totals, sums, scores, value, BY_PRODUCTS, PRECISION)
            is_last = True
            if SPLITS > 1:  # noqa: SIM102
                if num_parts > 1:
                    block = tile * KV_HEADS + head
                    part = parts + (block * SPLITS).to(tl.int64) * (MEMBERS * (PADDED + 2))
                    inner = member[:, None] * PADDED + column[None, :]
                    mine = part + split * (MEMBERS * (PADDED + 2))
                    tl.store(mine + inner, sums)
                    tl.store(mine + MEMBERS * PADDED + member, mosts)
                    tl.store(mine + MEMBERS * (PADDED + 1) + member, totals)
                    tl.debug_barrier()  # all threads have written before one of them says so
                    is_last = tl.atomic_add(tickets + block, 1, sem="acq_rel") == num_parts - 1
                    if is_last:
                        tl.store(tickets + block, 0)
                        mosts, totals, sums = empty(MEMBERS, PADDED)
                        for other in range(num_parts):
                            theirs = part + other * (MEMBERS * (PADDED + 2))
                            most = tl.load(theirs + MEMBERS * PADDED + member, volatile=True)
                            highers = tl.maximum(mosts, most)
                            bases = tl.where(highers == float("-inf"), 0.0, highers)
                            shrinks, grows = tl.exp2(mosts - bases), tl.exp2(most - bases)
                            sums = sums * shrinks[:, None] + tl.load(theirs + inner, volatile=True) * grows[:, None]
                            total = tl.load(theirs + MEMBERS * (PADDED + 1) + member, volatile=True)
                            totals = totals * shrinks + total * grows
                            mosts = highers
            if is_last:
                results = sums / totals[:, None]
                target = out + begin.to(tl.int64) * out_token + (head * GROUP + member)[:, None] * SIZE + column[None, :]
                tl.store(target, results.to(out.dtype.element_ty), mask=shown)


def store(k: Tensor, v: Tensor, cache: Tensor, layout: Layout) -> None:
    """As `split.store`."""
    store_at(k, v, cache, layout.slots)


def store_at(k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Put keys and values, each [N, heads, head size], into slots [N] of a layer's cache [2, slots, heads, head size]."""
    num_tokens, heads, size = k.shape
    width, columns = heads * size, min(1024, triton.next_power_of_2(heads * size))
    _store_kernel[(num_tokens, triton.cdiv(width, columns))](
        k, v, cache, slots, k.stride(0), v.stride(0), cache.stride(1), cache.stride(0),
        WIDTH=width, COLUMNS=columns, SIZE=size, HEAD=k.stride(1),
    )  # fmt: skip


def attend(q: Tensor, cache: Tensor, layout: Layout, cut: Cut | None = None) -> Tensor:
    """As `split.attend`, in one launch. A K/V head is that of as many query heads as there are for each.

    cut: that of the table by default.
    """
    num_tokens, heads, size = q.shape
    num_tiles, kv_heads, has_prompts = len(layout.tile_rows), cache.shape[2], layout.has_prompts
    cut = cut or cut_of(num_tiles * kv_heads, has_prompts)
    group, padded = heads // kv_heads, max(16, triton.next_power_of_2(size))
    is_by_products = cut.is_by_products or group > 1
    members = max(16, triton.next_power_of_2(group)) if is_by_products else 1
    splits = cut.splits if num_tiles * kv_heads <= NUM_TICKETS else 1
    out = torch.empty(num_tokens, heads, size, device=q.device, dtype=q.dtype)
    parts = None
    if splits > 1:
        part_size = members * (padded + 2)
        parts = torch.empty(num_tiles * kv_heads * splits * part_size, device=q.device, dtype=torch.float32)
    _attend_kernel[(heads if has_prompts else kv_heads, num_tiles, splits)](
        q, cache, out, parts, layout.tickets, layout.row_begins, layout.num_contexts, layout.num_paddings, layout.blocks,
        layout.tile_rows, layout.tile_begins, layout.blocks.shape[1], LOG2_E / math.sqrt(size),
        q.stride(0), q.stride(1), cache.stride(1), cache.stride(0), out.stride(0),
        SIZE=size, PADDED=padded, KV_HEADS=kv_heads, GROUP=group, MEMBERS=members, QUERIES=TILE, NUM_KEYS=cut.keys,
        SPLITS=splits, LEAST=cut.least_part, STAGES=cut.stages, BY_PRODUCTS=is_by_products, HAS_PROMPTS=has_prompts,
        BLOCK_SIZE=layout.block_size, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return out
