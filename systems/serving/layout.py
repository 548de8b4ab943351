"""Where the tokens of a batch lie: the one thing that attention knows of requests.

All tokens of a batch stand side by side, rows one after another: [N] tokens of [R] rows. Everything but attention runs on
them as they are (selective batching, section 4.2).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import Batch, Row
from .request import Sampling
from .slots import Region

TILE = 64  # tokens of one row that a thread block of the fused attention has
NUM_TICKETS = 4096  # rows, each of a K/V head, that several thread blocks may share in one launch


@dataclass(frozen=True)
class Layout:
    """One iteration's tensors, all int32 on the device, and what the host knows of them.

    Args:
        tokens, places: ids, and places in their own requests, [N].
        slots: where each token's keys and values go, [N].
        row_begins: first token of each row, [R + 1].
        num_contexts: places of each row's region that are filled after this iteration, [R].
        num_paddings: places at the front of each region that only padding attends to, [R].
        blocks: first slots of each row's blocks, [R, M].
        tile_rows, tile_begins: of each tile of at most TILE tokens its row, and its first token within it, [T].
        lasts: each row's last token, [R].
        tickets: zeros, [NUM_TICKETS]: how many of the blocks that share a row have ended. Each launch leaves zeros.
        block_size: slots of a block; 0 where every region is one run.
        rows: as the batch has them; none in a layout that a CUDA graph was captured on.
    """

    tokens: Tensor
    places: Tensor
    slots: Tensor
    row_begins: Tensor
    num_contexts: Tensor
    num_paddings: Tensor
    blocks: Tensor
    tile_rows: Tensor
    tile_begins: Tensor
    lasts: Tensor
    tickets: Tensor
    block_size: int
    rows: tuple[Row, ...] = ()


class LayoutBuffer:
    """Packs layouts into one buffer, so that one copy brings a batch to the device.

    Args:
        device: of the engine.
        num_slots: of the K/V cache; the slot after the last takes what no request reads.
        max_blocks: blocks of the longest region.
        block_size: 0 where every region is one run.
    """

    def __init__(self, device: torch.device, num_slots: int, max_blocks: int, block_size: int):
        self.device = device
        self.dead_row = Row(-1, Region((num_slots,), 1, 1), 0, (0,), 0, 0, 0, Sampling())
        self.max_blocks, self.block_size = max_blocks, block_size
        self.tickets = torch.zeros(NUM_TICKETS, dtype=torch.int32, device=device)

    def packed(self, batch: Batch, num_rows: int) -> tuple[array[int], tuple[int, ...]]:
        """The numbers of a layout, and how many each of its tensors takes.

        num_rows: with rows to fill up, which compute one token each for nobody.
        """
        rows = batch.rows + (self.dead_row,) * (num_rows - len(batch.rows))
        tokens, places, slots, begins, tile_rows, tile_begins = ([] for _ in range(6))  # type: ignore[var-annotated]
        blocks: list[int] = []
        for at, row in enumerate(rows):
            begins.append(len(tokens))
            tokens += row.tokens
            first, end = row.begin - row.num_padding, row.num_context - row.num_padding
            places += range(first, end) if first >= 0 else [max(place, 0) for place in range(first, end)]
            slots += row.region.slots(row.begin, row.num_context)
            starts = range(0, len(row.tokens), TILE)
            tile_rows += [at] * len(starts)
            tile_begins += starts
            used = row.region.blocks[: self.max_blocks]
            blocks += used
            blocks += [0] * (self.max_blocks - len(used))
        parts = (
            *(tokens, places, slots, [*begins, len(tokens)], [row.num_context for row in rows]),
            *([row.num_padding for row in rows], blocks, tile_rows, tile_begins),
            [end - 1 for end in [*begins[1:], len(tokens)]],
        )
        numbers = array("i")
        for part in parts:
            numbers.extend(part)
        return numbers, tuple(map(len, parts))

    def layout(self, buffer: Tensor, sizes: tuple[int, ...], rows: tuple[Row, ...] = ()) -> Layout:
        """The tensors within a buffer that holds what `packed` gave."""
        tokens, places, slots, begins, contexts, paddings, blocks, tile_rows, tile_begins, lasts = buffer.split(sizes)
        blocks = blocks.view(-1, self.max_blocks)
        return Layout(
            *(tokens, places, slots, begins, contexts, paddings, blocks, tile_rows, tile_begins, lasts, self.tickets),
            block_size=self.block_size,
            rows=rows,
        )

    def of(self, batch: Batch) -> Layout:
        """A batch's layout on the device."""
        numbers, sizes = self.packed(batch, len(batch.rows))
        host = torch.frombuffer(numbers, dtype=torch.int32)
        if self.device.type == "cuda":
            return self.layout(host.pin_memory().to(self.device, non_blocking=True), sizes, batch.rows)
        return self.layout(host.clone(), sizes, batch.rows)
