"""Iteration-level scheduling: Algorithm 2 of the dissertation (section 4.3.2), which is Orca's.

Invariants:
- A batch has at most `max_batch_size` requests, and each request is in at most one batch in flight.
- A request that has started holds `max_tokens` slots until it finishes. So no started request waits for slots, and there
  is no deadlock.
- Iteration-level FCFS: of two requests the earlier has run at least as many iterations, while both are unfinished.

With preemption a request holds slots for the tokens that it has. Where an earlier one needs more, the youngest gives up
all of its own, and is computed anew when there is room. The earliest is never preempted, so no request starves. A batch
in flight may still write to slots that were given up; batches run in their order, so whoever has them next writes later.

Scheduled asynchronously, a batch goes while the one before it runs. Its rows feed tokens that are still on the device.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from .batch import Batch, Row, row_of
from .prefix_cache import CachedSlots, extend_digests
from .request import Delivery, Request, take_out
from .scheduler import Scheduler
from .slots import BlockSlots, Region, Slots


class Part(NamedTuple):
    """A request's part of a batch.

    Args:
        request: whose it is.
        region: its slots, reserved now or before.
        num_tokens: to feed.
    """

    request: Request
    region: Region
    num_tokens: int


@dataclass(frozen=True)
class Selection:
    """What `select` chose.

    Args:
        parts: by arrival.
        slots: the book after their reservations.
        is_short: a request finds no slots, or gives up its own.
        preempted: requests that give up their slots.
    """

    parts: tuple[Part, ...]
    slots: Slots
    is_short: bool
    preempted: tuple[Request, ...] = ()


by_arrival = attrgetter("arrival_s", "id")


def select(
    pool: Collection[Request],
    slots: Slots,
    max_batch_size: int,
    max_num_batched_tokens: int = 0,
    is_preempting: bool = False,
    num_ahead: int = 0,
) -> Selection:
    """Algorithm 2, lines 17 to 28. It changes nothing.

    Args:
        pool: every unfinished request.
        slots: the K/V manager's book; with preemption one of blocks.
        max_batch_size: the chapter's max_bs.
        max_num_batched_tokens: of an iteration; a longer prompt goes in chunks (Sarathi-Serve, OSDI 2024). 0: no limit.
            With one batch in flight no increment waits for a prompt: whoever has started came before it.
        is_preempting: slots are reserved as tokens come, and the youngest requests give up theirs to earlier ones (vLLM's
            recomputation, SOSP 2023).
        num_ahead: batches in flight that a selected request may be in; 0 is the algorithm's.
    """
    parts: list[Part] = []
    budget = max_num_batched_tokens or float("inf")
    holders = sorted((request for request in pool if request.region is not None), key=by_arrival) if is_preempting else []
    preempted: list[Request] = []
    for request in sorted(pool, key=by_arrival):
        if len(parts) == max_batch_size or budget <= 0:
            break
        if request in preempted or (request.region is None and request.num_in_flight):
            break  # it gives up its slots, or gave them up in flight: nobody overtakes it
        if not request.may_run(num_ahead):
            continue
        region, num_left = request.region, request.num_left
        if region is None:  # the initiation phase: reserve, or let nobody overtake
            num_needed = request.num_tokens if is_preempting else request.max_tokens
            if (reservation := slots.reserved(num_needed, request.digests)) is None:
                return Selection(tuple(parts), slots, True, tuple(preempted))
            slots, region = reservation
            num_left -= region.num_cached
        num_tokens = num_left if num_left <= budget else int(budget)
        if is_preempting and request.region is not None:
            assert isinstance(slots, BlockSlots), "with preemption regions grow"
            while (extension := slots.extended(region, request.num_fed + num_tokens)) is None:
                victim = holders.pop()
                assert victim.region is not None
                slots = slots.released(victim.region)
                preempted.append(victim)
                if victim is request:
                    return Selection(tuple(parts), slots, True, tuple(preempted))
            slots, region = extension
        budget -= num_tokens
        parts.append(Part(request, region, num_tokens))
    return Selection(tuple(parts), slots, bool(preempted), tuple(preempted))


class IterationLevel(Scheduler):
    """Algorithm 2, lines 1 to 15: the loop's state between two events.

    Args:
        slots: the K/V manager's book, all free. CachedSlots share blocks of equal beginnings.
        max_batch_size: requests of a batch, at most.
        num_workers: stages of the engine's pipeline, each of which has a batch.
        is_prefetching: one batch more than workers is in flight, which hides the scheduler's time (section 4.4).
        max_num_batched_tokens, is_preempting: as `select` takes them.
        is_asynchronous: the next batch of the same requests goes while a batch runs. It takes one worker.
    """

    def __init__(
        self,
        slots: Slots,
        max_batch_size: int,
        num_workers: int = 1,
        is_prefetching: bool = False,
        max_num_batched_tokens: int = 0,
        is_preempting: bool = False,
        is_asynchronous: bool = False,
    ):
        super().__init__()
        assert not is_asynchronous or num_workers == 1, "a token comes from the batch before, which no other worker has"
        self.slots, self.max_batch_size = slots, max_batch_size
        self.reads_prompts = isinstance(slots, CachedSlots)
        self.num_in_flight_max = num_workers + (is_prefetching or is_asynchronous)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.is_preempting, self.num_ahead = is_preempting, int(is_asynchronous)
        self.started: dict[int, Request] = {}
        self.waiting: list[Request] = []  # that have never been scheduled, by arrival
        self.num_batches = 0
        self.rows_before: dict[int, int] = {}  # in the batch submitted last, by request

    @property
    def num_reserved(self) -> int:
        return self.slots.num_reserved

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_unfinished(self) -> int:
        return len(self.started) + len(self.waiting)

    def add(self, request: Request) -> None:
        self._digest(request, request.prompt[:-1])  # its last token is computed, whoever has had it before
        insort(self.waiting, request, key=by_arrival)

    def cancel(self, request_id: int) -> list[Delivery]:
        if (request := self.started.get(request_id)) is None:
            take_out(self.waiting, request_id)
        else:
            request.is_cancelled = True
            if not request.num_in_flight:
                self._remove(request)
        return []

    def next_batch(self) -> Batch | None:
        if self.is_full:
            return None
        pool = (*self.started.values(), *self.waiting[: self.max_batch_size])  # more of the waiting have no place in it
        selection = select(
            pool, self.slots, self.max_batch_size, self.max_num_batched_tokens, self.is_preempting, self.num_ahead
        )
        self.num_short += selection.is_short
        self.slots = selection.slots
        for victim in selection.preempted:
            victim.region, victim.num_fed = None, 0
        self.num_preempted += len(selection.preempted)
        if not selection.parts:
            return None
        begun = {part.request.id: part.request for part in selection.parts if part.request.id not in self.started}
        self.started |= begun
        self.waiting = self.waiting[len(begun) :]  # nobody overtakes: they are the first
        rows = []
        for request, region, num_tokens in selection.parts:
            if request.region is None:
                request.num_fed = region.num_cached
            row = row_of(request, region, num_tokens, 0, self.rows_before.get(request.id, 0))
            rows.append(row)
            request.region = region
            request.num_fed += num_tokens
            request.num_in_flight += 1
            request.num_pending += _is_sampled(row, request)
        if self.num_ahead:
            self.rows_before = {row.request_id: at for at, row in enumerate(rows)}
        self.num_in_flight += 1
        self.num_batches += 1
        return Batch(self.num_batches - 1, tuple(rows))

    def take_back(self, batch: Batch, tokens: Sequence[int]) -> list[Delivery]:
        self.num_in_flight -= 1
        deliveries = []
        for row, token in zip(batch.rows, tokens, strict=True):
            request = self.started[row.request_id]
            request.num_in_flight -= 1
            request.num_pending -= _is_sampled(row, request)
            is_accepted = request.accept(token, row.num_stream)
            self._share(request, row)
            is_complete = request.is_complete
            if is_accepted:
                deliveries.append(Delivery(request.id, (token,), is_complete))
            if is_complete and not request.num_in_flight:
                self._remove(request)
        return deliveries

    def _digest(self, request: Request, tokens: Sequence[int]) -> None:
        if isinstance(self.slots, CachedSlots):
            extend_digests(request.digests, tokens, self.slots.block_size)

    def _share(self, request: Request, row: Row) -> None:
        """Others may begin with the blocks that a row has filled."""
        if isinstance(self.slots, CachedSlots) and request.region is not None:
            size = self.slots.block_size
            num_whole = row.num_context // size
            if num_whole > len(request.digests):
                self._digest(request, (*request.prompt, *request.generated)[: num_whole * size])
            # A cancelled request refuses the token that its next row has fed already: that row's last block has no digest.
            filled = slice(row.begin // size, min(num_whole, len(request.digests)))
            self.slots = self.slots.filled(request.region.blocks[filled], request.digests[filled])

    def _remove(self, request: Request) -> None:
        """It finishes: its slots are free."""
        if request.region is not None:
            self.slots = self.slots.released(request.region)
        request.region = None
        del self.started[request.id]


def _is_sampled(row: Row, request: Request) -> bool:
    """Is what follows the row the next token of the stream? A chunk that ends within the prompt has none."""
    return row.num_stream == len(request.prompt) + row.draw
