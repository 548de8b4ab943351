"""Attention of an encoder-decoder, one call a row: prompts among themselves, decoders' tokens to theirs and across.

The first places of a row's region hold keys and values of its prompt, for attention across; the others its decoder's own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ..layout import Layout
from . import split


class CrossAttention:
    """Of one iteration.

    Args:
        cache: of all layers, [layers, 2, slots, heads, head size].
        layout: with the batch's rows, none of which holds a part of a prompt.
    """

    def __init__(self, cache: Tensor, layout: Layout):
        self.cache, self.layout = cache, layout
        sources: list[int] = []
        targets: list[int] = []
        self.counts: list[tuple[int, int]] = []  # of each row: tokens of its prompt, and of its decoder
        at = 0
        for row in layout.rows:
            num_sources = row.num_source if row.begin == 0 else 0
            end = at + len(row.tokens)
            sources += range(at, at + num_sources)
            targets += range(at + num_sources, end)
            self.counts.append((num_sources, end - at - num_sources))
            at = end
        device = layout.tokens.device
        self.sources = torch.tensor(sources, device=device, dtype=torch.long)
        self.targets = torch.tensor(targets, device=device, dtype=torch.long)
        self.slots = layout.slots.long()

    def encode(self, q: Tensor, k: Tensor, v: Tensor, bias: Callable[[Tensor], Tensor]) -> Tensor:
        outputs, at = [], 0
        for count, _ in self.counts:
            if count:
                places = torch.arange(count, device=q.device)
                part = slice(at, at + count)
                outputs.append(_attend(q[part], k[part], v[part], bias(places[None] - places[:, None])))
                at += count
        return torch.cat(outputs)

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._store(layer, k, v, self.slots[self.sources])

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Callable[[Tensor], Tensor]) -> Tensor:
        self._store(layer, k, v, self.slots[self.targets])
        outputs, at = [], 0
        for number, (row, (_, count)) in enumerate(zip(self.layout.rows, self.counts, strict=True)):
            keys, values = self._filled(layer, number)[:, row.num_source :]
            places = torch.arange(len(keys), device=q.device)
            relative = places[None] - places[-count:, None]
            scores = bias(relative).masked_fill(relative > 0, float("-inf"))
            outputs.append(_attend(q[at : at + count], keys, values, scores))
            at += count
        return torch.cat(outputs)

    def across(self, layer: int, q: Tensor) -> Tensor:
        outputs, at = [], 0
        for number, (row, (_, count)) in enumerate(zip(self.layout.rows, self.counts, strict=True)):
            keys, values = self._filled(layer, number)[:, : row.num_source]
            outputs.append(_attend(q[at : at + count], keys, values, None))
            at += count
        return torch.cat(outputs)

    def _store(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        self.cache[layer, 0].index_copy_(0, slots, k)
        self.cache[layer, 1].index_copy_(0, slots, v)

    def _filled(self, layer: int, number: int) -> Tensor:
        """[2, C, heads, head size] of a row."""
        layout = self.layout
        return split.filled(self.cache[layer], layout.rows[number], layout.blocks[number], layout.block_size)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """[L, heads, head size] over [C, heads, head size], scores not scaled."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0).transpose(0, 1)
