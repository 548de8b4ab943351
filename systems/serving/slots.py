"""The K/V manager's book: which slots are free. A slot holds the keys and values of one token in all layers.

Both kinds are values: reserving and releasing give a new book and leave the old one. So `select` can try a reservation and
change nothing.

Invariant: a slot is free or of exactly one region. `num_reserved` is the sum over regions, and 0 once all are released.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np


@dataclass(frozen=True)
class Region:
    """Where the keys and values of one request lie.

    Args:
        blocks: the first slot of each block.
        block_size: slots of a block.
        num_slots: reserved ones, which may be fewer than the blocks hold.
        num_cached: places at its beginning that another request has filled (prefix caching).
    """

    blocks: tuple[int, ...]
    block_size: int
    num_slots: int
    num_cached: int = 0

    @cached_property
    def table(self) -> np.ndarray:
        """The blocks, int32."""
        return np.array(self.blocks, dtype=np.int32)


class Slots(ABC):
    """A book of free slots."""

    num_slots: int

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Slots of no region."""

    @property
    def num_reserved(self) -> int:
        return self.num_slots - self.num_free

    @abstractmethod
    def reserved(self, count: int, digests: Sequence[bytes] = ()) -> tuple[Self, Region] | None:
        """The book after reserving slots, and where they lie; None where they do not fit.

        Args:
            count: slots.
            digests: of the first whole blocks of the stream, for a book that knows blocks by them.
        """

    @abstractmethod
    def released(self, region: Region) -> Self:
        """The book after giving a region back."""


class BlockSlots(Slots):
    """A book of blocks, in which a region can grow."""

    block_size: int

    @abstractmethod
    def extended(self, region: Region, count: int) -> tuple[Self, Region] | None:
        """The book after a region has come to hold `count` slots at least, and the region; None where they do not fit."""


@dataclass(frozen=True)
class ContiguousSlots(Slots):
    """One run of slots a request, the first that fits: what the chapter reserves (section 4.3.2).

    Free slots may lie in pieces of which none is large enough. A request waits then, though the sum would do.

    Args:
        free: runs of free slots as (begin, end), ascending, no two adjacent.
    """

    num_slots: int
    free: tuple[tuple[int, int], ...]

    @classmethod
    def all_free(cls, num_slots: int) -> Self:
        return cls(num_slots, ((0, num_slots),))

    @property
    def num_free(self) -> int:
        return sum(end - begin for begin, end in self.free)

    def reserved(self, count: int, digests: Sequence[bytes] = ()) -> tuple[Self, Region] | None:
        for i, (begin, end) in enumerate(self.free):
            if end - begin >= count:
                rest = ((begin + count, end),) if end - begin > count else ()
                free = (*self.free[:i], *rest, *self.free[i + 1 :])
                return replace(self, free=free), Region((begin,), max(count, 1), count)
        return None

    def released(self, region: Region) -> Self:
        begin, end = region.blocks[0], region.blocks[0] + region.num_slots
        before = [run for run in self.free if run[1] < begin]
        after = [run for run in self.free if run[0] > end]
        for run in self.free:
            if run[1] == begin:
                begin = run[0]
            elif run[0] == end:
                end = run[1]
        return replace(self, free=(*before, (begin, end), *after))


@dataclass(frozen=True)
class PagedSlots(BlockSlots):
    """Blocks of equal size, anywhere (PagedAttention, SOSP 2023). Nothing is lost but the rest of a request's last block.

    Args:
        block_size: slots of a block.
        free: the first slots of the free blocks.
    """

    num_slots: int
    block_size: int
    free: tuple[int, ...]

    @classmethod
    def all_free(cls, num_slots: int, block_size: int) -> Self:
        """Of as many whole blocks as there is room for."""
        num_blocks = num_slots // block_size
        return cls(num_blocks * block_size, block_size, tuple(range(0, num_blocks * block_size, block_size)))

    @property
    def num_free(self) -> int:
        return len(self.free) * self.block_size

    def reserved(self, count: int, digests: Sequence[bytes] = ()) -> tuple[Self, Region] | None:
        num_blocks = -(-count // self.block_size)
        if num_blocks > len(self.free):
            return None
        taken, rest = self.free[:num_blocks], self.free[num_blocks:]
        return replace(self, free=rest), Region(taken, self.block_size, num_blocks * self.block_size)

    def released(self, region: Region) -> Self:
        return replace(self, free=(*region.blocks, *self.free))

    def extended(self, region: Region, count: int) -> tuple[Self, Region] | None:
        missing = count - region.num_slots
        if missing <= 0:
            return self, region
        if (reservation := self.reserved(missing)) is None:
            return None
        book, more = reservation
        return book, replace(region, blocks=region.blocks + more.blocks, num_slots=region.num_slots + more.num_slots)
