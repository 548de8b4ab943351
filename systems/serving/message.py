"""The control message of an iteration: what a worker has to know of a batch, in a few kilobytes (section 4.3.1).

Invariant: `from_bytes(to_bytes(batch, flag)) == (batch, flag)`, but for what of a region only the scheduler knows.
"""

from __future__ import annotations

import struct
from array import array

from .batch import Batch, Row
from .request import Sampling
from .slots import Region

HEAD = struct.Struct("<qqq")  # the batch's id, its rows, the flag
NUM_NUMBERS = 11  # of a row, before its blocks and tokens
SAMPLING = struct.Struct("<dd")  # temperature and top_p of a row


def to_bytes(batch: Batch, keeps_logits: bool = False) -> bytes:
    """keeps_logits: whoever answers sends the logits too."""
    numbers, shares = array("q"), []
    for row in batch.rows:
        region, sampling = row.region, row.sampling
        numbers.extend((row.request_id, row.begin, row.num_padding, row.num_useful, row.draw, sampling.seed, row.num_source))
        numbers.extend((region.block_size, region.num_slots, len(region.blocks), len(row.tokens)))
        numbers.extend(region.blocks)
        numbers.extend(row.tokens)
        shares.append(SAMPLING.pack(sampling.temperature, sampling.top_p))
    return b"".join((HEAD.pack(batch.id, len(batch.rows), keeps_logits), *shares, numbers.tobytes()))


def from_bytes(message: bytes) -> tuple[Batch, bool]:
    batch_id, num_rows, keeps_logits = HEAD.unpack_from(message)
    numbers = array("q")
    numbers.frombytes(message[HEAD.size + num_rows * SAMPLING.size :])
    rows, at = [], 0
    for i in range(num_rows):
        request_id, begin, num_padding, num_useful, draw, seed, num_source = numbers[at : at + 7]
        block_size, num_slots, num_blocks, num_tokens = numbers[at + 7 : at + NUM_NUMBERS]
        at += NUM_NUMBERS
        region = Region(tuple(numbers[at : at + num_blocks]), block_size, num_slots)
        at += num_blocks
        tokens = tuple(numbers[at : at + num_tokens])
        at += num_tokens
        temperature, top_p = SAMPLING.unpack_from(message, HEAD.size + i * SAMPLING.size)
        sampling = Sampling(temperature, top_p, seed)
        rows.append(Row(request_id, region, begin, tokens, num_padding, num_useful, draw, sampling, num_source))
    return Batch(batch_id, tuple(rows)), bool(keeps_logits)
