"""Where the tokens of a batch lie: the one thing that attention knows of requests.

All tokens of a batch stand side by side, rows one after another: [N] tokens of [R] rows. Everything but attention runs on
them as they are (selective batching, section 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from .batch import Batch, Row
from .request import Sampling
from .slots import Region

TILE = 64  # tokens of one row that a thread block of the fused attention has
ALIGNED = 4  # numbers that each tensor of a layout begins at a multiple of: a GPU reads 16 bytes at a time
NO_END = 1 << 31  # places of a model that has no last one
NUM_TICKETS = 4096  # rows, each of a K/V head, that several thread blocks may share in one launch


@dataclass(frozen=True)
class Room:
    """What a layout has place for, where batches of several sizes are filled up to one.

    Args:
        tokens: of all rows.
        rows: one more than a batch may have: the rows after the last have no token.
        tiles: of any so many rows with so many tokens, at most.
    """

    tokens: int
    rows: int
    tiles: int

    @classmethod
    def of(cls, num_tokens: int, most_rows: int) -> Room:
        """For batches of so many tokens and rows, at most."""
        rows = min(num_tokens, most_rows)
        return cls(num_tokens, rows + 1, (num_tokens + (TILE - 1) * rows) // TILE)  # the last tile of each may have one

    def takes(self, batch: Batch) -> bool:
        return batch.num_tokens <= self.tokens and len(batch.rows) < self.rows


@dataclass(frozen=True)
class Layout:
    """One iteration's tensors, all int32 on the device, and what the host knows of them.

    Args:
        tokens, places: ids, and places in their own requests, [N].
        slots: where each token's keys and values go, [N].
        row_begins: first token of each row, [R + 1].
        num_contexts: places of each row's region that are filled after this iteration, [R].
        num_paddings: places at the front of each region that only padding attends to, [R].
        num_sources: places at the front of each region that are of an encoder's prompt, [R].
        blocks: first slots of each row's blocks, [R, M].
        tile_rows, tile_begins: of each tile of at most TILE tokens its row, and its first token within it, [T].
        lasts: each row's last token, [R].
        tickets: zeros, [NUM_TICKETS]: how many of the blocks that share a row have ended. Each launch leaves zeros.
        block_size: slots of a block; 0 where every region is one run.
        has_prompts: a row may have more than one token.
        rows: as the batch has them; none in a layout that a CUDA graph was captured on.
    """

    tokens: Tensor
    places: Tensor
    slots: Tensor
    row_begins: Tensor
    num_contexts: Tensor
    num_paddings: Tensor
    num_sources: Tensor
    blocks: Tensor
    tile_rows: Tensor
    tile_begins: Tensor
    lasts: Tensor
    tickets: Tensor
    block_size: int
    has_prompts: bool
    rows: tuple[Row, ...] = ()


class LayoutBuffer:
    """Packs layouts into one buffer, so that one copy brings a batch to the device.

    Every tensor begins at a multiple of 16 bytes, whatever the batch: Triton compiles a kernel anew for each mixture of
    pointers that are so aligned and pointers that are not, which takes a second while requests wait.

    Args:
        device: of the engine.
        num_slots: of the K/V cache; the slot after the last takes what no request reads.
        max_blocks: blocks of the longest region.
        block_size: 0 where every region is one run.
        num_positions: that the model has. A padded batch computes rows that have ended on to the end of its longest, which
            may be beyond: nobody reads them, and they stay at the last place.
    """

    def __init__(self, device: torch.device, num_slots: int, max_blocks: int, block_size: int, num_positions: int = NO_END):
        self.device, self.last_place = device, num_positions - 1
        self.dead_row = Row(-1, Region((num_slots,), 1, 1), 0, (0,), 0, 0, 0, Sampling())
        self.max_blocks, self.block_size = max_blocks, block_size
        self.tickets = torch.zeros(NUM_TICKETS, dtype=torch.int32, device=device)

    def packed(self, batch: Batch, num_rows: int) -> tuple[np.ndarray, tuple[int, ...]]:
        """The numbers of a layout, int32, and how many each of its tensors has.

        num_rows: with rows to fill up, which compute one token each for nobody.
        """
        return joined(self._parts(batch.rows + (self.dead_row,) * (num_rows - len(batch.rows))))

    def filled_up(self, batch: Batch, room: Room) -> tuple[np.ndarray, tuple[int, ...]]:
        """As `packed`, for a room that takes the batch: its other tokens are of no row, and its other rows of no token."""
        parts, num_rows = self._parts(batch.rows), len(batch.rows)
        dead_slot = self.dead_row.region.blocks[0]
        tokens, rows, tiles = room.tokens, room.rows, room.tiles
        fillings = (
            *((tokens, 0), (tokens, 0), (tokens, dead_slot), (rows + 1, batch.num_tokens), (rows, 0), (rows, 0), (rows, 0)),
            *((rows * self.max_blocks, dead_slot), (tiles, num_rows), (tiles, 0), (rows, 0)),
        )
        return joined(
            tuple(
                np.concatenate([part, np.full(count - len(part), filler)])
                for part, (count, filler) in zip(parts, fillings, strict=True)
            )
        )

    def _parts(self, rows: tuple[Row, ...]) -> tuple[Sequence[int] | np.ndarray, ...]:
        """The numbers of each tensor of a layout."""
        counts = np.array([len(row.tokens) for row in rows])
        begins = np.array([row.begin for row in rows])
        paddings = np.array([row.num_padding for row in rows])
        ends = np.cumsum(counts)
        blocks = self._blocks(rows)
        of_token = np.repeat(np.arange(len(rows)), counts)  # the row of each token, [N]
        places = np.arange(ends[-1]) - (ends - counts - begins)[of_token]  # in its region
        if self.block_size:
            slots = blocks[of_token, places // self.block_size] + places % self.block_size
        else:
            slots = blocks[of_token, 0] + places
        num_tiles = -(-counts // TILE)
        tile_rows = np.repeat(np.arange(len(rows)), num_tiles)
        tile_begins = (np.arange(len(tile_rows)) - (np.cumsum(num_tiles) - num_tiles)[tile_rows]) * TILE
        tokens = [token for row in rows for token in row.tokens]
        return (
            *(tokens, self._clipped(places - paddings[of_token]), slots, (0, *ends), begins + counts, paddings),
            *([row.num_source for row in rows], blocks.ravel(), tile_rows, tile_begins, ends - 1),
        )

    def _clipped(self, places: np.ndarray) -> np.ndarray:
        """Of padding the first place, and of what is computed beyond the end the last."""
        return np.clip(places, 0, self.last_place)

    def refill(self, layout: Layout, batch: Batch) -> None:
        """Put increments into a layout that has others: what differs between `packed` of the two, and no more.

        layout: on the host, of increments, and of as many rows at least.
        """
        rows, count = batch.rows, len(batch.rows)
        begins = np.array([row.begin for row in rows])
        paddings = np.array([row.num_padding for row in rows])
        blocks, places = self._blocks(rows), self._clipped(begins - paddings)
        slots = blocks[:, 0] + begins
        if self.block_size:
            slots = blocks[np.arange(count), begins // self.block_size] + begins % self.block_size
        dead_slot = self.dead_row.region.blocks[0]
        for tensor, values, filler in (
            *((layout.tokens, [row.tokens[0] for row in rows], 0), (layout.places, places, 0)),
            *((layout.slots, slots, dead_slot), (layout.num_contexts, begins + 1, 1), (layout.num_paddings, paddings, 0)),
            (layout.num_sources, [row.num_source for row in rows], 0),
        ):
            numbers = tensor.numpy()
            numbers[:count], numbers[count:] = values, filler
        numbers = layout.blocks.numpy()
        numbers[:count], numbers[count:, 0], numbers[count:, 1:] = blocks, dead_slot, 0

    def _blocks(self, rows: tuple[Row, ...]) -> np.ndarray:
        """First slots of each row's blocks, [R, M] int32."""
        if self.max_blocks == 1:
            return np.array([row.region.blocks[0] for row in rows], dtype=np.int32)[:, None]
        blocks = np.zeros((len(rows), self.max_blocks), dtype=np.int32)
        for at, row in enumerate(rows):
            table = row.region.table
            blocks[at, : len(table)] = table[: self.max_blocks]
        return blocks

    def layout(
        self, buffer: Tensor, sizes: tuple[int, ...], has_prompts: bool = False, rows: tuple[Row, ...] = ()
    ) -> Layout:
        """The tensors within a buffer that holds what `packed` or `filled_up` gave."""
        parts = parted(buffer, sizes)
        tokens, places, slots, begins, contexts, paddings, sources, blocks, tile_rows, tile_begins, lasts = parts
        return Layout(
            *(tokens, places, slots, begins, contexts, paddings, sources, blocks.view(-1, self.max_blocks)),
            *(tile_rows, tile_begins, lasts, self.tickets),
            block_size=self.block_size,
            has_prompts=has_prompts,
            rows=rows,
        )

    def of(self, batch: Batch) -> Layout:
        """A batch's layout on the device."""
        numbers, sizes = self.packed(batch, len(batch.rows))
        host = torch.from_numpy(numbers)
        if self.device.type == "cuda":
            host = host.pin_memory().to(self.device, non_blocking=True)
        return self.layout(host, sizes, batch.num_tokens > len(batch.rows), batch.rows)


def joined(parts: tuple[Sequence[int] | np.ndarray, ...]) -> tuple[np.ndarray, tuple[int, ...]]:
    """One tensor's numbers after another's, each aligned; and how many each has."""
    sizes = tuple(map(len, parts))
    numbers = np.zeros(sum(map(_aligned, sizes)), dtype=np.int32)
    begin = 0
    for size, part in zip(sizes, parts, strict=True):
        numbers[begin : begin + size] = part
        begin += _aligned(size)
    return numbers, sizes


def parted(buffer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The tensors within a buffer of what `joined` gave."""
    ends = [0, *accumulate(map(_aligned, sizes))]
    return [buffer[begin : begin + size] for begin, size in zip(ends[:-1], sizes, strict=True)]


def _aligned(size: int) -> int:
    """Numbers that a tensor takes, with those up to where the next begins."""
    return -(-size // ALIGNED) * ALIGNED
