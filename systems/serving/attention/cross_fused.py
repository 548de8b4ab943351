"""Attention of an encoder-decoder by two kernels: all prompts are in one launch, all decoders in another.

A decoder's tokens attend twice a layer, to the tokens before them and across to their prompt, each time in one launch.

What relative places add is looked up in a table of each stack, so that no kernel knows how a model makes it. Iterations of
increments need nothing of the host, and may be CUDA graphs.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import TILE, Layout, joined, parted
from .cross import Bias, Shares
from .fused import LOG2_E, slots_of, store_at
from .softmax import accumulated, empty

FEW = 16  # queries of a thread block of decoders', which have one each as a rule; the least that tensor cores take
KEYS = 64  # that a thread block reads at a time


class Tables:
    """What relative places add to scores, by stack.

    num_positions: of the model: keys are less than that from their queries.
    """

    def __init__(self, num_positions: int):
        self.num_positions = num_positions
        self.by_bias: dict[Bias, Tensor] = {}

    def of(self, bias: Bias, device: torch.device) -> Tensor:
        """[heads, 2 * num_positions - 1], from the farthest key before a query to the farthest after it."""
        if bias not in self.by_bias:
            relative = torch.arange(1 - self.num_positions, self.num_positions, device=device)
            self.by_bias[bias] = bias(relative[None])[:, 0].float().contiguous()
        return self.by_bias[bias]


@triton.jit
def _encode_kernel(
    q, k, v, out, table, prompt_begins, tile_prompts, tile_begins, num_positions, q_token, k_token, v_token,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, NUM_KEYS: tl.constexpr,
    LOG2_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tl.program_id(1)
    prompt, first = tl.load(tile_prompts + tile), tl.load(tile_begins + tile)
    begin = tl.load(prompt_begins + prompt)
    count = tl.load(prompt_begins + prompt + 1) - begin
    column = tl.arange(0, PADDED)
    is_column = column < SIZE
    token = first + tl.arange(0, QUERIES)
    shown = (token < count)[:, None] & is_column[None, :]
    where = (begin + token).to(tl.int64)[:, None]
    inner = head * SIZE + column[None, :]
    queries = tl.load(q + where * q_token + inner, mask=shown, other=0.0)
    mosts, totals, sums = empty(QUERIES, PADDED)
    row = table + head * (2 * num_positions - 1) + num_positions - 1
    for start in range(0, count, NUM_KEYS):
        place = start + tl.arange(0, NUM_KEYS)
        is_there = place < count
        filled = is_there[:, None] & is_column[None, :]
        at = (begin + place).to(tl.int64)[:, None]
        key = tl.load(k + at * k_token + inner, mask=filled, other=0.0)
        value = tl.load(v + at * v_token + inner, mask=filled, other=0.0)
        is_seen = (token < count)[:, None] & is_there[None, :]
        added = tl.load(row + place[None, :] - token[:, None], mask=is_seen, other=0.0)
        scores = (tl.dot(queries, tl.trans(key), input_precision=PRECISION) + added) * LOG2_E
        scores = tl.where(is_there[None, :], scores, float("-inf"))
        mosts, totals, sums = accumulated(mosts, totals, sums, scores, value, True, PRECISION)
    results = sums / totals[:, None]
    tl.store(out + where * (HEADS * SIZE) + inner, results.to(out.dtype.element_ty), mask=shown)


@triton.jit
def _decode_kernel(
    q, cache, out, table, row_begins, num_sources, num_contexts, blocks, max_blocks, num_positions, q_token,
    slot_stride, kind_stride, HEADS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr,
    NUM_KEYS: tl.constexpr, IS_OWN: tl.constexpr, BLOCK_SIZE: tl.constexpr, LOG2_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head, at, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(row_begins + at)
    count = tl.load(row_begins + at + 1) - begin
    if tile * QUERIES < count:
        num_source, num_context = tl.load(num_sources + at), tl.load(num_contexts + at)
        if IS_OWN:
            low, high = num_source, num_context
        else:
            low, high = 0, num_source
        column = tl.arange(0, PADDED)
        is_column = column < SIZE
        token = tile * QUERIES + tl.arange(0, QUERIES)
        shown = (token < count)[:, None] & is_column[None, :]
        where = (begin + token).to(tl.int64)[:, None]
        inner = head * SIZE + column[None, :]
        queries = tl.load(q + where * q_token + inner, mask=shown, other=0.0)
        query_place = num_context - count + token
        mosts, totals, sums = empty(QUERIES, PADDED)
        row = table + head * (2 * num_positions - 1) + num_positions - 1
        for start in range(low, high, NUM_KEYS):
            place = start + tl.arange(0, NUM_KEYS)
            is_filled = place < high
            slot = slots_of(blocks, at, max_blocks, place, is_filled, BLOCK_SIZE)
            filled = is_filled[:, None] & is_column[None, :]
            source = cache + slot[:, None] * slot_stride + inner
            key = tl.load(source, mask=filled, other=0.0)
            value = tl.load(source + kind_stride, mask=filled, other=0.0)
            scores = tl.dot(queries, tl.trans(key), input_precision=PRECISION)
            is_seen = is_filled[None, :] & (token < count)[:, None]
            if IS_OWN:
                relative = place[None, :] - query_place[:, None]
                is_seen &= relative <= 0
                scores += tl.load(row + relative, mask=is_seen, other=0.0)
            scores = tl.where(is_seen, scores * LOG2_E, float("-inf"))
            mosts, totals, sums = accumulated(mosts, totals, sums, scores, value, True, PRECISION)
        results = sums / tl.where(totals == 0.0, 1.0, totals)[:, None]  # a row for nobody has no prompt
        tl.store(out + where * (HEADS * SIZE) + inner, results.to(out.dtype.element_ty), mask=shown)


class FusedCrossAttention:
    """As CrossAttention, of one iteration.

    Args:
        cache: of all layers, [layers, 2, slots, heads, head size].
        layout: with the batch's rows, none of which holds a part of a prompt; or one of increments, with rows or without.
        tables: of the model.
    """

    def __init__(self, cache: Tensor, layout: Layout, tables: Tables):
        self.cache, self.layout, self.tables = cache, layout, tables
        device = layout.tokens.device
        if not layout.has_prompts:
            self.sources = torch.empty(0, dtype=torch.long, device=device)
            self.targets = torch.arange(len(layout.tokens), device=device)
            self.row_begins, self.most, self.target_slots = layout.row_begins, 1, layout.slots
            return
        shares = Shares.of(layout.rows)
        self.most = max(shares.counts)
        num_tiles = -(-np.array(shares.prompts, dtype=np.int64) // TILE)
        tile_prompts = np.repeat(np.arange(len(num_tiles)), num_tiles)
        tile_begins = (np.arange(len(tile_prompts)) - (np.cumsum(num_tiles) - num_tiles)[tile_prompts]) * TILE
        ends, prompt_ends = np.cumsum(shares.counts), np.cumsum(shares.prompts)
        parts = (shares.sources, shares.targets, (0, *ends), (0, *prompt_ends), tile_prompts, tile_begins)
        host, sizes = joined(parts)
        numbers = torch.from_numpy(host)
        if device.type == "cuda":
            numbers = numbers.pin_memory().to(device, non_blocking=True)
        sources, targets, self.row_begins, self.prompt_begins, self.tile_prompts, self.tile_begins = parted(numbers, sizes)
        self.sources, self.targets = sources.long(), targets.long()
        self.source_slots, self.target_slots = layout.slots[self.sources], layout.slots[self.targets]

    def encode(self, q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor:
        out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
        _encode_kernel[(q.shape[1], len(self.tile_prompts))](
            q, k, v, out, self.tables.of(bias, q.device), self.prompt_begins, self.tile_prompts, self.tile_begins,
            self.tables.num_positions, q.stride(0), k.stride(0), v.stride(0),
            QUERIES=TILE, **self._sizes(q),
        )  # fmt: skip
        return out

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        store_at(k, v, self.cache[layer], self.source_slots)

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor:
        store_at(k, v, self.cache[layer], self.target_slots)
        return self._attended(q, self.cache[layer], self.tables.of(bias, q.device))

    def across(self, layer: int, q: Tensor) -> Tensor:
        return self._attended(q, self.cache[layer], None)

    def _attended(self, q: Tensor, cache: Tensor, table: Tensor | None) -> Tensor:
        """table: of a decoder's own places; None for those of prompts."""
        layout, heads = self.layout, q.shape[1]
        out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
        _decode_kernel[(heads, len(layout.num_contexts), triton.cdiv(self.most, FEW))](
            q, cache, out, q if table is None else table, self.row_begins, layout.num_sources, layout.num_contexts,
            layout.blocks, layout.blocks.shape[1], self.tables.num_positions, q.stride(0), cache.stride(1), cache.stride(0),
            QUERIES=FEW, IS_OWN=table is not None, BLOCK_SIZE=layout.block_size, **self._sizes(q),
        )  # fmt: skip
        return out

    @staticmethod
    def _sizes(q: Tensor) -> dict[str, int | float | str]:
        """What both kernels are compiled for. A token's heads lie side by side in q."""
        heads, size = q.shape[1:]
        assert q.stride()[1:] == (size, 1)
        padded, precision = max(16, triton.next_power_of_2(size)), "ieee" if q.dtype == torch.float32 else "tf32"
        return {"HEADS": heads, "SIZE": size, "PADDED": padded, "NUM_KEYS": KEYS, "LOG2_E": LOG2_E, "PRECISION": precision}
