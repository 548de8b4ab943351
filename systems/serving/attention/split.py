"""One attention call a row, as figure 4.3 draws it: what a CPU runs, and the ablation of the fused kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..batch import Row
from ..layout import Layout


def store(k: Tensor, v: Tensor, cache: Tensor, layout: Layout) -> None:
    """Put keys and values, each [N, heads, head size], into their slots of a layer's cache [2, slots, heads, head size]."""
    slots = layout.slots.long()
    cache[0].index_copy_(0, slots, k)
    cache[1].index_copy_(0, slots, v)


def attend(q: Tensor, cache: Tensor, layout: Layout) -> Tensor:
    """Attention of each row's tokens over its filled places.

    Args:
        q: [N, heads, head size].
        cache: of one layer, [2, slots, heads, head size], in which this iteration's are stored.
        layout: with the batch's rows.
    """
    outputs = []
    begin = 0
    for at, row in enumerate(layout.rows):
        queries = q[begin : begin + len(row.tokens)].transpose(0, 1)  # [heads, L, head size]
        begin += len(row.tokens)
        keys, values = filled(cache, row, layout.blocks[at], layout.block_size).transpose(1, 2)  # each [heads, C, head size]
        if len(keys) < len(queries):  # several heads of queries have one of keys
            keys, values = (x.repeat_interleave(len(queries) // len(x), 0) for x in (keys, values))
        mask = _mask(row, q.device)
        outputs.append(functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask).transpose(0, 1))
    return torch.cat(outputs)


def filled(cache: Tensor, row: Row, blocks: Tensor, block_size: int) -> Tensor:
    """The keys and values of a row, [2, C, heads, head size]."""
    if not block_size:
        first = row.region.blocks[0]
        return cache[:, first : first + row.num_context]
    used = blocks[: -(-row.num_context // block_size)]
    slots = (used[:, None] + torch.arange(block_size, device=cache.device)).flatten()
    return cache[:, slots[: row.num_context]]


def _mask(row: Row, device: torch.device) -> Tensor | None:
    """True where a token attends to a place, [L, C]; None where all attend to all."""
    if len(row.tokens) == 1 and not row.num_padding:
        return None
    tokens = torch.arange(row.begin, row.num_context, device=device)[:, None]
    places = torch.arange(row.num_context, device=device)
    return (places <= tokens) & ((places >= row.num_padding) | (tokens < row.num_padding))
