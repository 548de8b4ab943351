"""Iteration-level scheduling: Algorithm 2 of the dissertation (section 4.3.2), which is Orca's.

Invariants:
- A batch has at most `max_batch_size` requests, and each request is in at most one batch in flight.
- A request that has started holds `max_tokens` slots until it finishes. So no started request waits for slots, and there
  is no deadlock.
- Iteration-level FCFS: of two requests the earlier has run at least as many iterations, while both are unfinished.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from .batch import Batch, row_of
from .request import Delivery, Request, State
from .scheduler import Scheduler
from .slots import Region, Slots


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
        is_fragmented: a request waits for slots that are free, but lie in pieces.
    """

    parts: tuple[Part, ...]
    slots: Slots
    is_fragmented: bool


by_arrival = attrgetter("arrival_s", "id")


def select(pool: Iterable[Request], slots: Slots, max_batch_size: int, max_num_batched_tokens: int = 0) -> Selection:
    """Algorithm 2, lines 17 to 28. It changes nothing.

    Args:
        pool: every unfinished request.
        slots: the K/V manager's book.
        max_batch_size: the chapter's max_bs.
        max_num_batched_tokens: of an iteration; a longer prompt goes in chunks (Sarathi-Serve, OSDI 2024). 0: no limit.
            With one batch in flight no increment waits for a prompt: whoever has started came before it.
    """
    parts: list[Part] = []
    budget = max_num_batched_tokens or float("inf")
    idle = sorted((request for request in pool if request.state is not State.RUNNING), key=by_arrival)
    for request in idle:
        if len(parts) == max_batch_size or budget <= 0:
            break
        region = request.region
        if region is None:  # the initiation phase: reserve, or let nobody overtake
            reservation = slots.reserved(request.max_tokens)
            if reservation is None:
                return Selection(tuple(parts), slots, slots.num_free >= request.max_tokens)
            slots, region = reservation
        num_tokens = int(min(request.num_tokens - request.num_fed, budget))
        budget -= num_tokens
        parts.append(Part(request, region, num_tokens))
    return Selection(tuple(parts), slots, False)


class IterationLevel(Scheduler):
    """Algorithm 2, lines 1 to 15: the loop's state between two events.

    Args:
        slots: the K/V manager's book, all free.
        max_batch_size: requests of a batch, at most.
        num_workers: stages of the engine's pipeline, each of which has a batch.
        is_prefetching: one batch more than workers is in flight, which hides the scheduler's time (section 4.4).
        max_num_batched_tokens: as `select` takes it.
    """

    def __init__(
        self,
        slots: Slots,
        max_batch_size: int,
        num_workers: int = 1,
        is_prefetching: bool = False,
        max_num_batched_tokens: int = 0,
    ):
        super().__init__()
        self.slots, self.max_batch_size = slots, max_batch_size
        self.num_in_flight_max = num_workers + is_prefetching
        self.max_num_batched_tokens = max_num_batched_tokens
        self.started: dict[int, Request] = {}
        self.waiting: list[Request] = []  # that have never been scheduled, by arrival
        self.num_batches = 0
        self.num_fragmented = 0  # selections that a request waited in, for slots in one piece

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
        insort(self.waiting, request, key=by_arrival)

    def cancel(self, request_id: int) -> list[Delivery]:
        self.waiting = [request for request in self.waiting if request.id != request_id]
        if (request := self.started.get(request_id)) is not None:
            request.is_cancelled = True
            if request.state is not State.RUNNING:
                self._remove(request)
        return []

    def next_batch(self) -> Batch | None:
        if self.is_full:
            return None
        pool = (*self.started.values(), *self.waiting[: self.max_batch_size])  # more of the waiting have no place in it
        selection = select(pool, self.slots, self.max_batch_size, self.max_num_batched_tokens)
        self.num_fragmented += selection.is_fragmented
        if not selection.parts:
            return None
        self.slots = selection.slots
        rows = tuple(row_of(part.request, part.region, part.num_tokens) for part in selection.parts)
        begun = {part.request.id: part.request for part in selection.parts if part.request.state is State.INITIATION}
        self.started |= begun
        self.waiting = self.waiting[len(begun) :]  # nobody overtakes: they are the first
        for part in selection.parts:
            part.request.region, part.request.state = part.region, State.RUNNING
            part.request.num_fed += part.num_tokens
        self.num_in_flight += 1
        self.num_batches += 1
        return Batch(self.num_batches - 1, rows)

    def take_back(self, batch: Batch, tokens: Sequence[int]) -> list[Delivery]:
        self.num_in_flight -= 1
        deliveries = []
        for row, token in zip(batch.rows, tokens, strict=True):
            request = self.started[row.request_id]
            request.state = State.INCREMENT
            is_accepted = request.accept(token)
            if is_accepted:
                deliveries.append(Delivery(request.id, (token,), request.is_complete))
            if request.is_complete:
                self._remove(request)
        return deliveries

    def _remove(self, request: Request) -> None:
        """It finishes: its slots are free."""
        if request.region is not None:
            self.slots = self.slots.released(request.region)
        request.state, request.region = State.FINISHED, None
        del self.started[request.id]
