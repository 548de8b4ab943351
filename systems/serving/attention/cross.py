"""Attention of an encoder-decoder: of each prompt among its own tokens, and of all decoders' tokens to theirs and across.

The first places of a row's region hold keys and values of its prompt, for attention across; the others its decoder's own.
Decoders have a token each, but for one that begins anew, so all rows are in one call, filled up to the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..batch import Row
from ..layout import Layout

Bias = Callable[[Tensor], Tensor]  # of relative places [L, C], [heads, L, C]


@dataclass(frozen=True)
class Shares:
    """Which tokens of a batch are an encoder's, and which a decoder's.

    Args:
        sources, targets: which of all tokens are of prompts and of decoders, [S] and [D].
        prompts: tokens of each prompt that is encoded.
        counts: of each row's decoder, [R].
    """

    sources: list[int]
    targets: list[int]
    prompts: list[int]
    counts: list[int]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Shares:
        shares = cls([], [], [], [])
        begin = 0
        for row in rows:
            num_sources, end = row.num_source if row.begin == 0 else 0, begin + len(row.tokens)
            shares.sources.extend(range(begin, begin + num_sources))
            shares.targets.extend(range(begin + num_sources, end))
            shares.prompts.extend([num_sources] * (num_sources > 0))
            shares.counts.append(end - begin - num_sources)
            begin = end
        return shares


class CrossAttention:
    """Of one iteration.

    Args:
        cache: of all layers, [layers, 2, slots, heads, head size].
        layout: with the batch's rows, none of which holds a part of a prompt.
    """

    def __init__(self, cache: Tensor, layout: Layout):
        self.cache, self.layout = cache, layout
        shares = Shares.of(layout.rows)
        self.prompts, counts = shares.prompts, shares.counts
        device = layout.tokens.device

        def numbers(values: list[int]) -> Tensor:
            return torch.tensor(values, device=device, dtype=torch.long)

        self.sources, self.targets, self.slots = numbers(shares.sources), numbers(shares.targets), layout.slots.long()
        longest = max(counts)
        self.shape = len(counts), longest  # of queries, filled up
        self.at = numbers([row * longest + i for row, count in enumerate(counts) for i in range(count)])  # of each query
        num_prompt = [row.num_source for row in layout.rows]
        num_own = [row.num_context - row.num_source for row in layout.rows]
        begin, of_prompt, of_own, of_row = map(numbers, ([0] * len(counts), num_prompt, num_own, counts))
        self.prompt, self.own = self._slots(begin, of_prompt, max(num_prompt)), self._slots(of_prompt, of_own, max(num_own))
        self.is_prompt = (torch.arange(max(num_prompt), device=device) < of_prompt[:, None])[:, None, None]  # [R, 1, 1, C]
        query = (of_own - of_row)[:, None] + torch.arange(longest, device=device)  # its place, [R, longest]
        self.relative = torch.arange(max(num_own), device=device) - query[..., None]  # [R, longest, C]
        self.scores: Tensor | None = None  # that places add, of every layer

    def encode(self, q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor:
        outputs = []
        for queries, keys, values in zip(*(x.split(self.prompts) for x in (q, k, v)), strict=True):
            places = torch.arange(len(queries), device=q.device)
            queries, keys, values = (x.transpose(0, 1) for x in (queries, keys, values))
            outputs.append(_attend(queries, keys, values, bias(places[None] - places[:, None])).transpose(0, 1))
        return torch.cat(outputs)

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._store(layer, k, v, self.slots[self.sources])

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> Tensor:
        self._store(layer, k, v, self.slots[self.targets])
        if self.scores is None:
            added = bias(self.relative.flatten(0, 1)).unflatten(1, self.shape).movedim(0, 1)  # [R, heads, longest, C]
            self.scores = added.masked_fill(self.relative[:, None] > 0, float("-inf"))
        return self._attended(q, self.cache[layer][:, self.own], self.scores)

    def across(self, layer: int, q: Tensor) -> Tensor:
        return self._attended(q, self.cache[layer][:, self.prompt], self.is_prompt)

    def _slots(self, begin: Tensor, count: Tensor, most: int) -> Tensor:
        """Of `count` places of each row's region from `begin` on, [R, most]; a row that has fewer has its last one again."""
        place = begin[:, None] + torch.minimum(torch.arange(most, device=begin.device), count[:, None] - 1)
        blocks, size = self.layout.blocks.long(), self.layout.block_size
        return blocks.gather(1, place // size) + place % size if size else blocks[:, :1] + place

    def _store(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        self.cache[layer, 0].index_copy_(0, slots, k)
        self.cache[layer, 1].index_copy_(0, slots, v)

    def _attended(self, q: Tensor, filled: Tensor, mask: Tensor) -> Tensor:
        """Of queries [N, heads, head size], over keys and values [2, R, C, heads, head size] of all rows."""
        rows = q.new_zeros(self.shape[0] * self.shape[1], *q.shape[1:]).index_copy(0, self.at, q).unflatten(0, self.shape)
        keys, values = filled.transpose(2, 3)
        return _attend(rows.transpose(1, 2), keys, values, mask).transpose(1, 2).flatten(0, 1)[self.at]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """[..., heads, L, head size] over [..., heads, C, head size], scores not scaled."""
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
