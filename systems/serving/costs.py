"""What an engine's iterations cost, measured: all that a simulated engine knows of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter

from .batch import Batch, Row
from .engine import Engine
from .request import Sampling
from .slots import Region

LITTLE, MUCH = 16, 512  # places that an increment attends to, for the cost of a token and for that of a place
PROMPT = 256  # tokens of each prompt of an iteration of prompts
MOST_PROMPTS = 16
SAMPLES, WARM = 7, 2  # iterations of a kind that are timed, and before them


@dataclass(frozen=True)
class CostTable:
    """Seconds of an iteration: by its tokens, between measured numbers on a line, and a part for each place attended to.

    Args:
        tokens: of measured iterations, ascending.
        seconds: of each, without the part of its places.
        place_s: of each filled place of each row.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    place_s: float

    def __call__(self, batch: Batch) -> float:
        return self._of_tokens(batch.num_tokens) + self.place_s * places_of(batch)

    def _of_tokens(self, count: int) -> float:
        """On the line through the two measured numbers beside it; beyond the last on the last two's."""
        if len(self.tokens) == 1:
            return self.seconds[0]
        at = min(max(bisect_right(self.tokens, count), 1), len(self.tokens) - 1)
        (low, begin), (high, end) = ((self.tokens[i], self.seconds[i]) for i in (at - 1, at))
        return begin + (end - begin) * (count - low) / (high - low)


def places_of(batch: Batch) -> int:
    """Filled places of all rows."""
    return sum(row.num_context for row in batch.rows)


def measured(engine: Engine, num_slots: int, num_positions: int, max_batch_size: int, block_size: int = 0) -> CostTable:
    """The costs of an engine that has nothing to do. Its keys and values are overwritten.

    Args:
        engine: a whole one; what a stage of a pipeline costs is not seen.
        num_slots: of its cache.
        num_positions: the longest sequence.
        max_batch_size: rows of the largest iteration of increments.
        block_size: of its K/V manager.
    """
    rows = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size < max_batch_size] + [max_batch_size]
    longest = min(MUCH, num_positions, num_slots)
    mixes = [[(LITTLE - 1, 1)] * count for count in rows]
    prompt = min(PROMPT, longest)
    prompts = [[(0, prompt)] * count for count in (1, 2, 4, 8, MOST_PROMPTS) if count <= max_batch_size]
    kinds = [mix for mix in (*mixes, *prompts) if sum(a + b for a, b in mix) + len(mix) * block_size <= num_slots]
    count = max((n for n in rows if n * (longest + block_size) <= num_slots), default=1)
    long, short = (_batch([(length - 1, 1)] * count, block_size) for length in (longest, min(LITTLE, longest)))
    slope = (seconds_of(engine, long) - seconds_of(engine, short)) / max(places_of(long) - places_of(short), 1)
    place_s = max(slope, 0.0)
    by_tokens: dict[int, float] = {}
    for mix in kinds:
        batch = _batch(mix, block_size)
        by_tokens.setdefault(batch.num_tokens, max(seconds_of(engine, batch) - place_s * places_of(batch), 0.0))
    tokens = tuple(sorted(by_tokens))
    return CostTable(tokens, _ascending([by_tokens[count] for count in tokens]), place_s)


def seconds_of(engine: Engine, batch: Batch) -> float:
    """Median seconds from the submission of an iteration to its tokens."""
    times = []
    for _ in range(WARM + SAMPLES):
        begin = perf_counter()
        engine.submit(batch)
        engine.collect()
        times.append(perf_counter() - begin)
    return median(times[WARM:])


def _ascending(values: Sequence[float]) -> tuple[float, ...]:
    """More tokens cost no less: what was disturbed less than a smaller one gives way."""
    ascending = list(values)
    for at, (before, after) in enumerate(pairwise(values), 1):
        ascending[at] = max(before, after, ascending[at - 1])
    return tuple(ascending)


def _batch(mix: Sequence[tuple[int, int]], block_size: int) -> Batch:
    """Rows of (places filled before, tokens now), one region after another."""
    rows, begin = [], 0
    for number, (before, count) in enumerate(mix):
        size = before + count
        if block_size:
            size = -(-size // block_size) * block_size
        blocks = tuple(range(begin, begin + size, block_size)) if block_size else (begin,)
        region = Region(blocks, block_size or size, size)
        rows.append(Row(number, region, before, (0,) * count, 0, count, 0, Sampling()))
        begin += size
    return Batch(0, tuple(rows))
