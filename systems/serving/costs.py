"""What an engine's iterations cost, measured: all that a simulated engine knows of it.

Two numbers tell an iteration: how long a stage is taken by it, measured with another waiting behind it, and how much later
the next one may go. What a host does before and after kernels is in the second, and what the loop does between iterations
(selection, tokens taken back), so it is hidden where iterations overlap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import NamedTuple

from .batch import Batch, Row
from .engine import Engine
from .loop import Course, Inbox, Listed, RealClock, discard
from .request import Request, Sampling
from .slots import Region
from .system import Server

LITTLE, MUCH = 16, 512  # places that an increment attends to, for the cost of a token and for that of a place
PROMPT = 256  # tokens of each prompt of an iteration of several, about
# Tokens of an iteration of one prompt or a few. Products take time by tiles, and graphs are of certain sizes: steps of no
# whole tile have some of the samples just above a size, and some just below.
FEW_TOKENS = range(100, 769, 37)
NUMS_PROMPTS = (4, 6, 8, 12, 16)  # of an iteration of more
TILE = 128  # tokens; the largest iterations have half a tile more than whole ones, which is what one has on average
LOOP_TOKENS = 24  # that each request generates, for the time of the loop
SAMPLES, WARM = 7, 2  # iterations of a kind that are timed, and before them
LOAD_S = {"cuda": 5.0, "cpu": 0.0}  # that a device works before anything is timed


@dataclass(frozen=True)
class CostTable:
    """Seconds of an iteration: by its tokens, between measured numbers on a line, and a part for each place attended to.

    Args:
        tokens: of measured iterations, ascending.
        seconds: that each takes a stage, without the part of its places.
        place_s: of each filled place of each row.
        delays: seconds of each from the last stage's end to its tokens; () where there are none.
        loop_s, loop_row_s: between an iteration's return and the next submission, and a part of it for each row.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    place_s: float
    delays: tuple[float, ...] = ()
    loop_s: float = 0.0
    loop_row_s: float = 0.0

    def __call__(self, batch: Batch) -> float:
        """Seconds that an iteration takes a stage."""
        return self._between(self.seconds, batch.num_tokens) + self.place_s * places_of(batch)

    def delay(self, batch: Batch) -> float:
        """Seconds from the last stage's end to where the loop may submit again; one in flight runs meanwhile."""
        delay_s = max(self._between(self.delays, batch.num_tokens), 0.0) if self.delays else 0.0
        return delay_s + self.loop_s + self.loop_row_s * len(batch.rows)

    def delayed_by(self, in_processes: CostTable, in_one: CostTable) -> CostTable:
        """This table with what goes between processes in its delays.

        Its own are of a part that has all its layers, whose graph takes longer to launch. The others' differences are added.

        Args:
            in_processes: of a model of few layers, its parts in processes.
            in_one: of one part of that model by itself.
        """

        def later(count: int) -> float:
            return in_processes._between(in_processes.delays, count) - in_one._between(in_one.delays, count)

        delays = tuple(delay + later(count) for count, delay in zip(self.tokens, self.delays, strict=True))
        loop_s = self.loop_s + in_processes.loop_s - in_one.loop_s
        loop_row_s = self.loop_row_s + in_processes.loop_row_s - in_one.loop_row_s
        return replace(self, delays=delays, loop_s=max(loop_s, 0.0), loop_row_s=max(loop_row_s, 0.0))

    def samples(self) -> dict[str, tuple[float, ...]]:
        """The numbers by name, as a record holds them: milliseconds by tokens; microseconds of a place and of the loop."""
        return {
            "cost_tokens": tuple(map(float, self.tokens)),
            "cost_ms": tuple(seconds * 1e3 for seconds in self.seconds),
            "cost_delay_ms": tuple(seconds * 1e3 for seconds in self.delays),
            "cost_place_us": (self.place_s * 1e6,),
            "cost_loop_us": (self.loop_s * 1e6, self.loop_row_s * 1e6),
        }

    def _between(self, values: Sequence[float], count: int) -> float:
        """On the line through the two measured values beside a number of tokens; beyond the last on the last two's."""
        if len(self.tokens) == 1:
            return values[0]
        at = min(max(bisect_right(self.tokens, count), 1), len(self.tokens) - 1)
        (low, begin), (high, end) = ((self.tokens[i], values[i]) for i in (at - 1, at))
        return begin + (end - begin) * (count - low) / (high - low)


def places_of(batch: Batch) -> int:
    """Filled places of all rows."""
    return sum(row.num_context for row in batch.rows)


def measured(
    engine: Engine, num_slots: int, num_positions: int, max_batch_size: int, block_size: int = 0, load_s: float = 0.0
) -> CostTable:
    """The costs of an engine that has nothing to do. Its keys and values are overwritten.

    Args:
        engine: with as many stages as it has; each is taken to cost what the slowest does.
        num_slots: of its cache.
        num_positions: the longest sequence.
        max_batch_size: rows of the largest iteration of increments.
        block_size: of its K/V manager.
        load_s: seconds of the largest iterations, before anything is timed: a GPU at its power limit lowers its clocks.
    """
    rows = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size < max_batch_size] + [max_batch_size]
    longest = min(MUCH, num_positions, num_slots)
    mixes = [[(LITTLE - 1, 1)] * count for count in rows]
    totals = [longest, *FEW_TOKENS, *(count * PROMPT + TILE // 2 for count in NUMS_PROMPTS)]
    prompts = [_prompts(total, longest, max_batch_size) for total in totals if total <= longest * max_batch_size]
    kinds = {sum(count for _, count in mix): mix for mix in (*prompts, *mixes) if _slots_of(mix, block_size) <= num_slots}
    # The largest first: what a GPU's clocks are under load, they are for all.
    batches = {num_tokens: _batch(kinds[num_tokens], block_size) for num_tokens in sorted(kinds, reverse=True)}
    _load(engine, batches[max(batches)], load_s)
    seconds = {num_tokens: seconds_of(engine, batch) for num_tokens, batch in batches.items()}
    count = max((n for n in rows if n * (longest + block_size) <= num_slots), default=1)
    long, short = (_batch([(length - 1, 1)] * count, block_size) for length in (longest, min(LITTLE, longest)))
    slope = (seconds_of(engine, long).stage - seconds_of(engine, short).stage) / max(places_of(long) - places_of(short), 1)
    place_s = max(slope, 0.0)
    tokens = tuple(sorted(kinds))
    stages = [max(seconds[n].stage - place_s * places_of(batches[n]), 0.0) for n in tokens]
    return CostTable(tokens, _ascending(stages), place_s, _smoothed([seconds[n].delay for n in tokens]))


def of_server(server: Server, most_requests: int, block_size: int = 0, load_s: float = 0.0) -> CostTable:
    """The costs of a server that has nothing to do: its engine's iterations, and what its loop takes between them.

    Args:
        most_requests: of a batch.
        block_size: of its K/V manager.
        load_s: as `measured` takes it.
    """
    num_slots, num_positions, _ = server.bounds
    table = measured(server.engine, num_slots, num_positions, most_requests, block_size, load_s)

    def serve(inbox: Inbox) -> Course:
        return server.serve(inbox, discard, RealClock())

    return looped(table, serve, most_requests, min(num_slots, num_positions))


def looped(table: CostTable, serve: Callable[[Inbox], Course], most_requests: int, longest: int) -> CostTable:
    """The table with what the loop takes between iterations, measured with one request and with as many as may run.

    Args:
        table: of the engine.
        serve: requests through a server of it that has nothing to do. Keys and values are overwritten.
        most_requests: at once.
        longest: tokens of a request, at most.
    """

    def between_s(num_requests: int) -> float:
        """From the return of an iteration to the next submission, the median; 0 where that comes before."""
        prompt = min(LITTLE, longest // 2)
        requests = [Request(i, (0,) * prompt, min(LOOP_TOKENS, longest - prompt)) for i in range(num_requests)]
        gaps_s = [after.begin_s - before.end_s for before, after in pairwise(serve(Listed(requests)).iterations)]
        return max(median(gaps_s or [0.0]), 0.0)

    one_s, most_s = between_s(1), between_s(most_requests)
    row_s = max(most_s - one_s, 0.0) / max(most_requests - 1, 1)
    return replace(table, loop_s=max(one_s - row_s, 0.0), loop_row_s=row_s)


class Seconds(NamedTuple):
    """Of an iteration.

    Args:
        stage: that it takes a stage.
        delay: from the last stage's end to its tokens. Where other stages take less than the slowest, it is less by as much.
    """

    stage: float
    delay: float


def seconds_of(engine: Engine, batch: Batch) -> Seconds:
    """Medians of one iteration alone, and of one that has another behind it at every stage."""
    alone_s = median(_alone(engine, batch) for _ in range(WARM + SAMPLES))
    for _ in range(engine.num_workers):
        engine.submit(batch)
    returns_s = []
    for _ in range(1 + WARM + SAMPLES):
        engine.submit(batch)
        engine.collect()
        returns_s.append(perf_counter())
    for _ in range(engine.num_workers):
        engine.collect()
    stage_s = min(median(after - before for before, after in pairwise(returns_s[WARM:])), alone_s)
    return Seconds(stage_s, alone_s - engine.num_workers * stage_s)


def _load(engine: Engine, batch: Batch, load_s: float) -> None:
    """Iterations behind each other, for as many seconds."""
    end_s = perf_counter() + load_s
    while perf_counter() < end_s:
        while engine.num_in_flight <= engine.num_workers:
            engine.submit(batch)
        engine.collect()
    while engine.num_in_flight:
        engine.collect()


def _alone(engine: Engine, batch: Batch) -> float:
    """Seconds from the submission of an iteration to its tokens."""
    begin = perf_counter()
    engine.submit(batch)
    engine.collect()
    return perf_counter() - begin


def _ascending(values: Sequence[float]) -> tuple[float, ...]:
    """The nearest values of which none is below one before it: more tokens take no less (isotonic regression)."""
    pools: list[tuple[float, int]] = []  # a mean, and how many values have it
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, num_before = pools.pop()
            mean, count = (before * num_before + mean * count) / (num_before + count), num_before + count
        pools.append((mean, count))
    return tuple(mean for mean, count in pools for _ in range(count))


def _smoothed(values: Sequence[float]) -> tuple[float, ...]:
    """Each with its neighbours' median in its place; the first and the last stay."""
    inner = [median(values[at - 1 : at + 2]) for at in range(1, len(values) - 1)]
    return (values[0], *inner, values[-1]) if inner else tuple(values)


def _prompts(num_tokens: int, longest: int, most_rows: int) -> list[tuple[int, int]]:
    """Rows of nearly as many tokens each: about PROMPT, where that is no more than the longest and takes no more rows."""
    count = max(min(round(num_tokens / PROMPT), most_rows), -(-num_tokens // longest))
    return [(0, num_tokens // count + (number < num_tokens % count)) for number in range(count)]


def _slots_of(mix: Sequence[tuple[int, int]], block_size: int) -> int:
    """Slots that rows of (places filled before, tokens now) take at most."""
    return sum(before + now + block_size for before, now in mix)


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
