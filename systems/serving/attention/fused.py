"""Attention of all rows in one launch: thread blocks of prompts, chunks and increments side by side (section 4.4).

A thread block has one head of one tile: up to TILE tokens of one row. It reads the row's blocks of slots, so keys and values
may lie anywhere. A row of one token needs no tile of queries, and multiplies without tensor cores: it waits for memory.

Invariant: what a row's output is does not depend on the other rows of the batch.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import TILE, Layout

KEYS = 64  # places that a thread block reads at a time
LOG2_E = 1.4426950408889634


@triton.jit
def _slots_of(blocks, at, max_blocks, place, is_filled, BLOCK_SIZE: tl.constexpr):
    """The slots of places of a row."""
    if BLOCK_SIZE == 0:
        return tl.load(blocks + at * max_blocks) + place
    first = tl.load(blocks + at * max_blocks + place // BLOCK_SIZE, mask=is_filled, other=0)
    return first + place % BLOCK_SIZE


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
    q, cache, out, row_begins, num_contexts, num_paddings, blocks, tile_rows, tile_begins,
    max_blocks, scale, q_token, q_head, slot_stride, kind_stride, out_token,
    SIZE: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, NUM_KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    at = tl.load(tile_rows + tile)
    first = tl.load(tile_begins + tile)
    begin = tl.load(row_begins + at)
    count = tl.load(row_begins + at + 1) - begin  # tokens of the row
    num_context = tl.load(num_contexts + at)
    num_padding = tl.load(num_paddings + at)
    offset = num_context - count  # place of the row's first token
    keys = cache + head * SIZE
    values = cache + kind_stride + head * SIZE
    column = tl.arange(0, PADDED)
    is_column = column < SIZE
    place = tl.arange(0, NUM_KEYS)
    if count == 1:
        query = tl.load(q + begin.to(tl.int64) * q_token + head * q_head + column, mask=is_column, other=0.0)
        query = query.to(tl.float32) * scale
        most = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        summed = tl.zeros([PADDED], tl.float32)
        for start in range(0, num_context, NUM_KEYS):
            is_filled = start + place < num_context
            slot = _slots_of(blocks, at, max_blocks, start + place, is_filled, BLOCK_SIZE).to(tl.int64)
            there = is_filled[:, None] & is_column[None, :]
            where = slot[:, None] * slot_stride + column[None, :]
            key = tl.load(keys + where, mask=there, other=0.0).to(tl.float32)
            score = tl.sum(key * query[None, :], axis=1)
            score = tl.where(is_filled & ((start + place >= num_padding) | (offset < num_padding)), score, float("-inf"))
            higher = tl.maximum(most, tl.max(score, axis=0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            share = tl.exp2(score - base)
            shrink = tl.exp2(most - base)
            value = tl.load(values + where, mask=there, other=0.0).to(tl.float32)
            summed = summed * shrink + tl.sum(share[:, None] * value, axis=0)
            total = total * shrink + tl.sum(share, axis=0)
            most = higher
        result = summed / total
        target = out + begin.to(tl.int64) * out_token + head * SIZE + column
        tl.store(target, result.to(out.dtype.element_ty), mask=is_column)
    else:
        token = first + tl.arange(0, QUERIES)
        is_token = token < count
        wheres = (begin + token).to(tl.int64)[:, None]
        shown = is_token[:, None] & is_column[None, :]
        queries = tl.load(q + wheres * q_token + head * q_head + column[None, :], mask=shown, other=0.0)
        token_place = offset + token
        mosts = tl.full([QUERIES], float("-inf"), tl.float32)
        totals = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, PADDED], tl.float32)
        end = tl.minimum(num_context, offset + first + QUERIES)  # later places are after every token of the tile
        for start in range(0, end, NUM_KEYS):
            is_filled = start + place < end
            slot = _slots_of(blocks, at, max_blocks, start + place, is_filled, BLOCK_SIZE).to(tl.int64)
            key = tl.load(
                keys + slot[None, :] * slot_stride + column[:, None], mask=is_filled[None, :] & is_column[:, None], other=0.0
            )
            scores = tl.dot(queries, key, input_precision=PRECISION) * scale
            is_seen = is_filled[None, :] & (start + place[None, :] <= token_place[:, None])
            is_seen &= (start + place[None, :] >= num_padding) | (token_place[:, None] < num_padding)
            scores = tl.where(is_seen, scores, float("-inf"))
            highers = tl.maximum(mosts, tl.max(scores, axis=1))
            bases = tl.where(highers == float("-inf"), 0.0, highers)
            shares = tl.exp2(scores - bases[:, None])
            shrinks = tl.exp2(mosts - bases)
            value = tl.load(
                values + slot[:, None] * slot_stride + column[None, :],
                mask=is_filled[:, None] & is_column[None, :],
                other=0.0,
            )
            sums = sums * shrinks[:, None] + tl.dot(shares.to(value.dtype), value, input_precision=PRECISION)
            totals = totals * shrinks + tl.sum(shares, axis=1)
            mosts = highers
        results = sums / tl.where(totals == 0.0, 1.0, totals)[:, None]
        tl.store(out + wheres * out_token + head * SIZE + column[None, :], results.to(out.dtype.element_ty), mask=shown)


def store(k: Tensor, v: Tensor, cache: Tensor, layout: Layout) -> None:
    """As `split.store`."""
    num_tokens, heads, size = k.shape
    width, columns = heads * size, min(1024, triton.next_power_of_2(heads * size))
    _store_kernel[(num_tokens, triton.cdiv(width, columns))](
        k, v, cache, layout.slots, k.stride(0), v.stride(0), cache.stride(1), cache.stride(0),
        WIDTH=width, COLUMNS=columns, SIZE=size, HEAD=k.stride(1),
    )  # fmt: skip


def attend(q: Tensor, cache: Tensor, layout: Layout) -> Tensor:
    """As `split.attend`, in one launch."""
    num_tokens, heads, size = q.shape
    out = torch.empty(num_tokens, heads, size, device=q.device, dtype=q.dtype)
    _attend_kernel[(len(layout.tile_rows), heads)](
        q, cache, out, layout.row_begins, layout.num_contexts, layout.num_paddings, layout.blocks,
        layout.tile_rows, layout.tile_begins, layout.blocks.shape[1], LOG2_E / math.sqrt(size),
        q.stride(0), q.stride(1), cache.stride(1), cache.stride(0), out.stride(0),
        SIZE=size, PADDED=max(16, triton.next_power_of_2(size)), QUERIES=TILE, NUM_KEYS=KEYS, BLOCK_SIZE=layout.block_size,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
