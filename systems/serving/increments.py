"""An iteration of increments as a module of fixed shapes: what a system that executes modules can schedule.

Attention of a layer is one operator of it, which stores keys and values and reads them.

Invariant: no other operator touches a layer's cache. So data dependencies are all the order there is, and the operators may
run on any streams.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from types import ModuleType
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from .attention import split
from .batch import Row
from .layout import Layout, LayoutBuffer
from .request import Sampling
from .slots import Region


class HasHidden(Protocol):
    """A decoder."""

    def hidden(self, tokens: Tensor, places: Tensor, attention: object) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class Caches:
    """What the attention of increments knows beside its arguments.

    Args:
        cache: of all layers, [layers, 2, slots, K/V heads, head size].
        attention: the module of its kernels.
        layouts: that pack its numbers.
        sizes: of the parts of those.
    """

    def __init__(self, cache: Tensor, attention: ModuleType, layouts: LayoutBuffer, sizes: tuple[int, ...]):
        self.cache, self.attention, self.layouts, self.sizes = cache, attention, layouts, sizes
        self.number = next(NUMBERS)
        CACHES[self.number] = self

    def layout(self, numbers: Tensor) -> Layout:
        layout = self.layouts.layout(numbers, self.sizes)
        return layout if numbers.is_cuda else replace(layout, rows=_rows(layout))


NUMBERS = count()
CACHES: WeakValueDictionary[int, Caches] = WeakValueDictionary()  # by number: an operator takes no objects


@torch.library.custom_op("opweave::attend_increments", mutates_args=())
def attend_increments(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, caches: int, layer: int) -> Tensor:
    """Store a token's keys and values of each row, and attend to its filled places.

    Args:
        q: [R, heads, head size].
        k, v: [R, K/V heads, head size].
        numbers: of the layout, int32.
        caches: the number of a Caches, whose part for the layer is changed.
        layer: from 0.

    Returns:
        As q. In another precision than the cache's, as of a reference, the cache stays as it is.
    """
    known = CACHES[caches]
    layout, cache = known.layout(numbers), known.cache[layer]
    if q.dtype != cache.dtype:
        return _in_precision_of(q, k, v, cache, layout)
    known.attention.store(k, v, cache, layout)
    output: Tensor = known.attention.attend(q, cache, layout)
    return output


def _in_precision_of(q: Tensor, k: Tensor, v: Tensor, cache: Tensor, layout: Layout) -> Tensor:
    """The same, over a copy of the places that are filled, one row's after another."""
    rows, begins, filled = [], [0], []
    for at, row in enumerate(_rows(layout)):
        filled.append(split.filled(cache, row, layout.blocks[at], layout.block_size))
        rows.append(row._replace(region=Region((begins[-1],), row.num_context, row.num_context)))
        begins.append(begins[-1] + row.num_context)
    copied = torch.cat(filled, 1).to(q.dtype)
    slots = torch.tensor(begins[1:], device=q.device) - 1  # each row's last place is of its token
    compact = replace(layout, slots=slots, block_size=0, rows=tuple(rows))
    split.store(k, v, copied, compact)
    return split.attend(q, copied, compact)


@attend_increments.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, caches: int, layer: int) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


class Increments(nn.Module):
    """The numbers of a layout of R increments, int32 -> logits [R, vocabulary]."""

    def __init__(self, decoder: HasHidden, caches: Caches):
        super().__init__()
        self.decoder, self.caches = decoder, caches

    def forward(self, numbers: Tensor) -> Tensor:
        layout = self.caches.layouts.layout(numbers, self.caches.sizes)

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend_increments(q, k, v, numbers, self.caches.number, layer)

        return self.decoder.logits(self.decoder.hidden(layout.tokens, layout.places, attention))


def _rows(layout: Layout) -> tuple[Row, ...]:
    """Increments as a batch has them, from their layout on the host."""
    contexts, paddings = layout.num_contexts.tolist(), layout.num_paddings.tolist()
    size = layout.block_size or max(contexts)
    return tuple(
        Row(at, Region(tuple(blocks), size, len(blocks) * size), context - 1, (0,), padding, 1, 0, Sampling())
        for at, (blocks, context, padding) in enumerate(zip(layout.blocks.tolist(), contexts, paddings, strict=True))
    )
