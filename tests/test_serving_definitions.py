"""Every scheduler beside its definition, which is written down here by other means: which rows go when, and who is answered.

A block is an object that holds what was stored in it, and a free one is nothing but a number. No digest, book or request of
the schedulers is known here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from drawing import examples
from hypothesis import example, given
from hypothesis import strategies as st
from workloads import NUM_POSITIONS, NUM_SLOTS, Asked, run, token_of, workloads

from systems.serving.iteration_level import IterationLevel
from systems.serving.prefix_cache import CachedSlots
from systems.serving.request_level import BATCHINGS, RequestLevel
from systems.serving.scheduler import Scheduler
from systems.serving.slots import ContiguousSlots, PagedSlots

Answer = tuple[int, int]  # a request, and how many of its tokens are delivered


@dataclass(eq=False)
class Block:
    """Slots of keys and values. stream: all tokens up to its end, where others may find it by them."""

    stream: tuple[int, ...] | None = None
    num_users: int = 1


@dataclass(eq=False)
class Served:
    """A request as a definition sees it.

    Args:
        blocks: that it holds; None where it holds none.
        num_fed: tokens of its stream that the model has taken, or will have once its batches return.
        num_sampled: tokens that it has generated.
        num_flights: batches in flight that it is in.
        num_awaited: tokens that those sample.
        num_named: blocks of its stream that others can be found by.
    """

    id: int
    asked: Asked
    blocks: list[Block] | None = None
    num_fed: int = 0
    num_sampled: int = 0
    num_flights: int = 0
    num_awaited: int = 0
    num_named: int = 0

    @property
    def order(self) -> tuple[int, int]:
        return self.asked.turn, self.id

    @property
    def is_complete(self) -> bool:
        return self.num_sampled == self.asked.length

    @property
    def num_tokens(self) -> int:
        return self.asked.prompt + self.num_sampled

    def stream(self, count: int) -> tuple[int, ...]:
        return (*range(self.asked.prompt), *(token_of(self.id, at) for at in range(self.num_sampled)))[:count]


class Part(NamedTuple):
    """A row. begin, count: the place of its first token, and how many it feeds; is_sampled: the stream goes on behind it."""

    request: Served
    begin: int
    count: int
    is_sampled: bool = True


class Definition(ABC):
    """What a scheduler does, in the turns of `run`. num_flights_max: batches in flight at once."""

    num_flights_max: int

    @abstractmethod
    def add(self, request: Served) -> None:
        """A request arrives, the last in the order of arrival."""

    @abstractmethod
    def select(self) -> list[Part]:
        """The next batch; [] where there is none."""

    @abstractmethod
    def back(self, parts: list[Part]) -> list[Answer]:
        """A batch returns."""

    def run(self, workload: Sequence[Asked]) -> tuple[list[list[tuple[int, int, int]]], list[Answer]]:
        """Each batch as (request, begin, count), and what is delivered, in their order."""
        flight: deque[list[Part]] = deque()
        batches, answers = [], []
        for turn in range(500):
            for i, asked in enumerate(workload):
                if asked.turn == turn:
                    self.add(Served(i, asked))
            while len(flight) < self.num_flights_max and (parts := self.select()):
                for part in parts:
                    part.request.num_flights += 1
                flight.append(parts)
                batches.append([(part.request.id, part.begin, part.count) for part in parts])
            if flight:
                parts = flight.popleft()
                for part in parts:
                    part.request.num_flights -= 1
                answers += self.back(parts)
        return batches, answers


@dataclass
class ByIteration(Definition):
    """Algorithm 2, and what goes beyond it.

    Args:
        block_size: 0: a run of slots a request, the first that fits.
        most_tokens: of a batch; 0: no limit.
        is_preempting: blocks are held for the tokens that are there, and the youngest gives up its own to earlier ones.
        is_cached: blocks of equal beginnings are shared, and kept while nobody wants them.
        num_ahead: batches in flight that a row of the next may be in.
    """

    num_slots: int
    block_size: int
    max_batch_size: int
    num_flights_max: int
    most_tokens: int = 0
    is_preempting: bool = False
    is_cached: bool = False
    num_ahead: int = 0

    def __post_init__(self) -> None:
        self.pool: list[Served] = []
        self.known: dict[tuple[int, ...], Block] = {}
        self.idle: list[Block] = []  # the first of them goes first
        self.num_free = self.num_slots // self.block_size if self.block_size else 0  # blocks
        self.free_slots = set(range(self.num_slots))  # of runs
        self.runs: dict[int, set[int]] = {}  # by request

    def add(self, request: Served) -> None:
        request.num_named = (request.asked.prompt - 1) // self.block_size if self.is_cached else 0
        self.pool.append(request)

    def select(self) -> list[Part]:
        self.pool.sort(key=lambda request: request.order)
        holders = [request for request in self.pool if request.blocks is not None]
        had_blocks = set(holders)
        parts: list[Part] = []
        room = self.most_tokens or 10**9
        for request in self.pool:
            if len(parts) == self.max_batch_size or room == 0:
                break
            if request.blocks is None and (request.num_flights or request in had_blocks):
                break  # it has given up its own: nobody overtakes it
            if request.num_flights and not self._goes_ahead(request):
                continue
            if request.blocks is None and not self._begin(request):
                break
            count = min(request.num_tokens + request.num_awaited - request.num_fed, room)
            if self.is_preempting and not self._grow(request, request.num_fed + count, holders):
                break
            request.num_fed += count
            is_sampled = request.num_fed == request.num_tokens + request.num_awaited
            request.num_awaited += is_sampled
            parts.append(Part(request, request.num_fed - count, count, is_sampled))
            room -= count
        return parts

    def _goes_ahead(self, request: Served) -> bool:
        is_last = request.num_sampled + request.num_awaited == request.asked.new
        return request.num_flights <= self.num_ahead and not is_last and not request.is_complete

    def _begin(self, request: Served) -> bool:
        """Hold what it needs, or nothing."""
        whole = request.asked.prompt + request.asked.new
        if not self.block_size:
            runs = (set(range(first, first + whole)) for first in range(self.num_slots - whole + 1))
            if (run := next((run for run in runs if run <= self.free_slots), None)) is None:
                return False
            self.free_slots -= run
            self.runs[request.id], request.blocks = run, []
            return True
        shared: list[Block] = []
        while len(shared) < request.num_named:
            block = self.known.get(request.stream((len(shared) + 1) * self.block_size))
            if block is None:
                break
            shared.append(block)
        idle = [block for block in self.idle if block not in shared]
        num_new = -(-(request.num_tokens if self.is_preempting else whole) // self.block_size) - len(shared)
        if num_new > self.num_free + len(idle):
            return False
        self.idle = idle
        for block in shared:
            block.num_users += 1
        request.blocks = shared + self._taken(num_new)
        request.num_fed = len(shared) * self.block_size
        return True

    def _grow(self, request: Served, count: int, holders: list[Served]) -> bool:
        """Hold blocks for so many tokens; False where it is the youngest and gives up its own."""
        assert request.blocks is not None
        num_new = -(-count // self.block_size) - len(request.blocks)
        while num_new > self.num_free + len(self.idle):
            loser = holders.pop()
            self._give_back(loser)
            loser.num_fed = 0
            if loser is request:
                return False
        request.blocks += self._taken(max(num_new, 0))
        return True

    def _taken(self, count: int) -> list[Block]:
        """Blocks that hold nothing, or else those that went idle first."""
        num_lost = max(count - self.num_free, 0)
        for block in self.idle[:num_lost]:
            assert block.stream is not None
            del self.known[block.stream]
        self.idle = self.idle[num_lost:]
        self.num_free -= count - num_lost
        return [Block() for _ in range(count)]

    def _give_back(self, request: Served) -> None:
        self.free_slots |= self.runs.pop(request.id, set())
        for block in reversed(request.blocks or []):
            block.num_users -= 1
            if not block.num_users:
                self.idle += [block] if block.stream else []
                self.num_free += not block.stream
        request.blocks = None

    def back(self, parts: list[Part]) -> list[Answer]:
        answers = []
        for request, begin, count, is_sampled in parts:
            request.num_awaited -= is_sampled
            if is_sampled and not request.is_complete:
                request.num_sampled += 1
                answers.append((request.id, 1))
            if self.is_cached and request.blocks is not None:
                self._name(request, begin, begin + count)
            if request.is_complete and not request.num_flights:
                self._give_back(request)
                self.pool.remove(request)
        return answers

    def _name(self, request: Served, begin: int, end: int) -> None:
        """Others may find the blocks that have been filled, the first of several that are alike."""
        assert request.blocks is not None
        for at in range(begin // self.block_size, end // self.block_size):
            block, stream = request.blocks[at], request.stream((at + 1) * self.block_size)
            if block.stream is None and stream not in self.known and len(stream) == (at + 1) * self.block_size:
                block.stream, self.known[stream] = stream, block
        request.num_named = max(request.num_named, min(end, request.num_tokens) // self.block_size)


@dataclass
class ByRequest(Definition):
    """Static batches. microbatch_size: 0: all of a batch."""

    num_slots: int
    num_positions: int
    max_batch_size: int
    batching: str
    is_early: bool
    num_flights_max: int
    microbatch_size: int

    def __post_init__(self) -> None:
        self.queue: list[Served] = []
        self.batch: list[Served] = []
        self.microbatches: list[list[Served]] = []
        self.num_iterations: list[int] = []
        self.num_told: dict[int, int] = {}  # tokens by request

    def add(self, request: Served) -> None:
        self.queue.append(request)

    def _fits(self, count: int) -> bool:
        prompts, news = zip(*((request.asked.prompt, request.asked.new) for request in self.queue[:count]), strict=True)
        padded = count * (max(prompts) + max(news))
        reserved = {"shortest_prompt": count * self.num_positions, "padded": padded, "ragged": sum(prompts) + sum(news)}
        return reserved[self.batching] <= self.num_slots

    def select(self) -> list[Part]:
        if not self.batch and self.queue:
            self.queue.sort(key=lambda request: request.order)
            count = max(n for n in range(1, min(self.max_batch_size, len(self.queue)) + 1) if self._fits(n))
            self.batch, self.queue = self.queue[:count], self.queue[count:]
            size = self.microbatch_size or count
            self.microbatches = [self.batch[at : at + size] for at in range(0, count, size)]
            self.num_iterations = [0] * len(self.microbatches)
        if all(request.is_complete for request in self.batch):
            return []
        most = max(request.asked.new for request in self.batch)  # iterations, which are known beforehand
        if self.batching == "shortest_prompt":
            most = max(r.asked.prompt + r.asked.new for r in self.batch) - min(r.asked.prompt for r in self.batch)
        for at in sorted(range(len(self.microbatches)), key=lambda at: self.num_iterations[at]):
            is_idle = not any(request.num_flights for request in self.microbatches[at])
            if is_idle and self.num_iterations[at] < most and (parts := self._parts(at)):
                self.num_iterations[at] += 1
                return parts
        return []

    def _parts(self, at: int) -> list[Part]:
        prompts = [request.asked.prompt for request in self.batch]
        first = {"shortest_prompt": min(prompts), "padded": max(prompts)}
        parts = []
        for request in self.microbatches[at]:
            if self.batching == "ragged" and request.is_complete:
                continue
            count = 1 if self.num_iterations[at] else first.get(self.batching, request.asked.prompt)
            parts.append(Part(request, request.num_fed, count))
            request.num_fed += count
        return parts

    def back(self, parts: list[Part]) -> list[Answer]:
        for request, begin, count, _ in parts:
            num_padding = max(r.asked.prompt for r in self.batch) - request.asked.prompt if self.batching == "padded" else 0
            request.num_sampled += begin + count - num_padding == request.num_tokens and not request.is_complete
        is_over = all(request.is_complete and not request.num_flights for request in self.batch)
        answers = []
        for request in self.batch if self.is_early or is_over else ():
            num_new = request.num_sampled - self.num_told.get(request.id, 0)
            self.num_told[request.id] = request.num_sampled
            answers += [(request.id, num_new)] if num_new else []
        if is_over:
            self.batch = []
        return answers


def compare(scheduler: Scheduler, definition: Definition, workload: list[Asked]) -> None:
    done = run(scheduler, workload)
    batches = [[(row.request_id, row.begin, len(row.tokens)) for row in batch.rows] for batch in done.batches]
    answers = [(delivery.request_id, len(delivery.tokens)) for delivery in done.deliveries]
    assert (batches, answers) == definition.run(workload)
    assert done.tokens == {i: [token_of(i, at) for at in range(asked.length)] for i, asked in enumerate(workload)}


BOOKS = {"runs": ContiguousSlots, "blocks": PagedSlots, "shared blocks": CachedSlots}


@pytest.mark.parametrize("book", BOOKS)
@examples(200)
@example(  # the youngest gives up its slots in flight, and another waits behind it
    [Asked(1, 1, 17), Asked(1, 2, 15), Asked(3, 3, 13), Asked(5, 1, 16), Asked(5, 4, 12)], 1, 19, 2, 2, 3, True, "prefetch"
)
@given(
    workloads(), st.integers(1, 4), st.integers(12, NUM_SLOTS), st.integers(1, 4), st.integers(1, 3),
    st.sampled_from([0, 1, 3, 7]), st.booleans(), st.sampled_from(["", "prefetch", "async"]),
)  # fmt: skip
def test_iterations_are_those_of_their_definition(
    book: str,
    workload: list[Asked],
    block_size: int,
    num_slots: int,
    max_batch_size: int,
    num_workers: int,
    chunk: int,
    is_preempting: bool,
    ahead: str,
) -> None:
    num_slots += -num_slots % block_size  # else the largest request might never fit
    size = [block_size] if book != "runs" else []
    is_preempting, num_workers = is_preempting and bool(size), 1 if ahead == "async" else num_workers
    options = chunk, is_preempting
    slots = BOOKS[book].all_free(num_slots, *size)
    scheduler = IterationLevel(slots, max_batch_size, num_workers, ahead == "prefetch", *options, ahead == "async")
    sizes = num_slots, sum(size), max_batch_size, num_workers + bool(ahead)
    compare(scheduler, ByIteration(*sizes, *options, book == "shared blocks", int(ahead == "async")), workload)


@pytest.mark.parametrize("batching", BATCHINGS)
@examples(150)
@given(workloads(), st.booleans(), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2))
def test_static_batches_are_those_of_their_definition(
    batching: str, workload: list[Asked], is_early: bool, max_batch_size: int, num_workers: int, microbatch_size: int
) -> None:
    options = NUM_SLOTS, NUM_POSITIONS, max_batch_size, batching, is_early, num_workers, microbatch_size
    compare(RequestLevel(*options), ByRequest(*options), workload)
