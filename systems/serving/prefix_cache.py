"""Blocks of keys and values that several requests share: those of streams that begin with the same tokens.

A whole block is known by a digest of all tokens up to its end. A request that comes takes the blocks of its beginning that
are there already, and computes the rest. At least its last token is computed, since a token is sampled from it.

Invariant: a block is free, idle or of `uses[block]` regions, and of one kind alone. An idle block is of no region, and is
kept for whoever begins with its tokens until a block is wanted and none is free; the one that went idle first goes first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from typing import Self

from .persistent_map import PersistentMap
from .slots import BlockSlots, Region

DIGEST_BYTES = 16


def extend_digests(digests: list[bytes], tokens: Sequence[int], block_size: int) -> None:
    """Append the digests of the whole blocks of a stream that have none yet.

    Args:
        digests: of its first blocks.
        tokens: the stream.
        block_size: tokens of a block.
    """
    for begin in range(len(digests) * block_size, len(tokens) - block_size + 1, block_size):
        before = digests[-1] if digests else b""
        block = array("i", tokens[begin : begin + block_size]).tobytes()
        digests.append(blake2b(before + block, digest_size=DIGEST_BYTES).digest())


@dataclass(frozen=True)
class CachedSlots(BlockSlots):
    """Blocks of equal size, which regions may share.

    Args:
        block_size: slots of a block.
        free: first slots of the blocks that hold nothing of use.
        idle: of those that hold tokens and are of no region, by when they went idle.
        uses: regions of each block that is of any.
        by_digest, digests: a block by what it holds, and what a block holds.
    """

    num_slots: int
    block_size: int
    free: tuple[int, ...]
    idle: PersistentMap[int, None] = field(default_factory=PersistentMap)
    uses: PersistentMap[int, int] = field(default_factory=PersistentMap)
    by_digest: PersistentMap[bytes, int] = field(default_factory=PersistentMap)
    digests: PersistentMap[int, bytes] = field(default_factory=PersistentMap)

    @classmethod
    def all_free(cls, num_slots: int, block_size: int) -> Self:
        """Of as many whole blocks as there is room for."""
        whole = num_slots // block_size * block_size
        return cls(whole, block_size, tuple(range(0, whole, block_size)))

    @property
    def num_free(self) -> int:
        return (len(self.free) + len(self.idle)) * self.block_size

    def reserved(self, count: int, digests: Sequence[bytes] = ()) -> tuple[Self, Region] | None:
        shared: list[int] = []
        for digest in digests:
            if (block := self.by_digest.get(digest)) is None:
                break
            shared.append(block)
        uses = self.uses.updated({block: self.uses.get(block, 0) + 1 for block in shared})
        num_new = max(-(-count // self.block_size) - len(shared), 0)
        if (taken := replace(self, idle=self.idle.without(shared), uses=uses)._taken(num_new)) is None:
            return None
        book, new = taken
        blocks = (*shared, *new)
        return book, Region(blocks, self.block_size, len(blocks) * self.block_size, len(shared) * self.block_size)

    def extended(self, region: Region, count: int) -> tuple[Self, Region] | None:
        if (missing := count - region.num_slots) <= 0:
            return self, region
        if (taken := self._taken(-(-missing // self.block_size))) is None:
            return None
        book, new = taken
        blocks = (*region.blocks, *new)
        return book, replace(region, blocks=blocks, num_slots=len(blocks) * self.block_size)

    def released(self, region: Region) -> Self:
        # A beginning is of more use than what follows it, so it goes idle last.
        counts = {block: self.uses[block] - 1 for block in reversed(region.blocks)}
        unused = [block for block, count in counts.items() if not count]
        idle = {block: None for block in unused if block in self.digests}
        free = [block for block in unused if block not in idle]
        return replace(
            self, free=(*free, *self.free), idle=self.idle.updated(idle), uses=self.uses.updated(counts).without(unused)
        )

    def filled(self, blocks: Sequence[int], digests: Sequence[bytes]) -> Self:
        """The book after blocks of a region hold the tokens of these digests. Of two blocks alike the first counts."""
        pairs = zip(digests, blocks, strict=True)
        new = {d: b for d, b in pairs if d not in self.by_digest and b not in self.digests}
        if not new:
            return self
        digest_by_block = {block: digest for digest, block in new.items()}
        return replace(self, by_digest=self.by_digest.updated(new), digests=self.digests.updated(digest_by_block))

    def _taken(self, count: int) -> tuple[Self, tuple[int, ...]] | None:
        """The book after some blocks have got a region, free ones first; None where there are not so many."""
        num_evicted = max(count - len(self.free), 0)
        if num_evicted > len(self.idle):
            return None
        evicted = tuple(islice(self.idle, num_evicted))
        blocks = (*self.free[:count], *evicted)
        book = replace(
            self,
            free=self.free[count:],
            idle=self.idle.without(evicted),
            uses=self.uses.updated(dict.fromkeys(blocks, 1)),
            by_digest=self.by_digest.without([self.digests[block] for block in evicted]),
            digests=self.digests.without(evicted),
        )
        return book, blocks
