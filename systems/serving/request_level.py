"""Request-level scheduling: a batch is fixed until all its requests are finished, as Triton and FasterTransformer do.

When the engine is idle, at most `max_batch_size` of the queue become the batch, by arrival. `batching` says what is computed
of it:

- `shortest_prompt`: the first iteration feeds every prompt up to the length of the shortest. The rest of each prompt goes
  one token an iteration. Every row is computed until the last request is finished. Each holds all of the model's
  positions. This is what section 4.1 and 4.5 say of FasterTransformer.
- `padded`: prompts are padded on the left to the longest; every row is computed to the end; each holds the longest prompt
  and the most new tokens.
- `ragged`: prompts are packed, rows of finished requests are dropped, and each holds its own `max_tokens`.

Invariants: no request joins or leaves a batch before its end. Rows times their slots are at most `num_slots`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from .batch import Batch, row_of
from .request import Delivery, Request, take_out
from .scheduler import Scheduler
from .slots import Region

BATCHINGS = ("shortest_prompt", "padded", "ragged")


def slots_of(requests: Sequence[Request], batching: str, num_positions: int) -> list[int]:
    """Slots that each request of a batch holds."""
    if batching == "shortest_prompt":
        return [num_positions] * len(requests)
    if batching == "padded":
        longest = max(len(r.prompt) for r in requests) + max(r.max_new_tokens for r in requests)
        return [longest] * len(requests)
    return [request.max_tokens for request in requests]


def select_batch(
    queue: Sequence[Request], max_batch_size: int, batching: str, num_slots: int, num_positions: int
) -> list[Request]:
    """The first requests of a queue, as many as fit. It changes nothing.

    Args:
        queue: by arrival.
        max_batch_size: requests at most.
        batching: one of BATCHINGS.
        num_slots: of the K/V manager.
        num_positions: the longest sequence that the model takes.
    """
    count = min(max_batch_size, len(queue))
    while count and sum(slots_of(queue[:count], batching, num_positions)) > num_slots:
        count -= 1
    return list(queue[:count])


@dataclass
class Microbatch:
    """The requests that go through the engine together.

    Args:
        num_iterations: that have been submitted.
        is_in_flight: one of them has not returned.
    """

    requests: list[Request]
    num_iterations: int = 0
    is_in_flight: bool = False


@dataclass
class StaticBatch:
    """A batch that is fixed until its end.

    Args:
        requests: by arrival.
        microbatches: in the order in which they take turns.
        most_iterations: after which the last request is finished.
        num_delivered: tokens of each request that its client has.
    """

    requests: list[Request]
    microbatches: list[Microbatch]
    most_iterations: int
    num_delivered: dict[int, int] = field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        """Are all its requests? Nothing more is computed then, and it ends once nothing is in flight."""
        return all(request.is_complete for request in self.requests)

    @property
    def is_complete(self) -> bool:
        return self.is_finished and not any(microbatch.is_in_flight for microbatch in self.microbatches)


class RequestLevel(Scheduler):
    """Static batches, one after another.

    Args:
        num_slots: of the K/V manager.
        num_positions: the longest sequence that the model takes.
        max_batch_size: requests of a batch.
        batching: one of BATCHINGS.
        is_early_return: each token is answered at once, though rows of finished requests may go on.
        num_workers: stages of the engine's pipeline.
        microbatch_size: requests that go through the pipeline together (GPipe, NeurIPS 2019). 0: all of the batch.
    """

    def __init__(
        self,
        num_slots: int,
        num_positions: int,
        max_batch_size: int,
        batching: str,
        is_early_return: bool = False,
        num_workers: int = 1,
        microbatch_size: int = 0,
    ):
        super().__init__()
        self.num_slots, self.num_positions = num_slots, num_positions
        self.max_batch_size, self.batching, self.is_early_return = max_batch_size, batching, is_early_return
        self.num_in_flight_max, self.microbatch_size = num_workers, microbatch_size
        self.queue: list[Request] = []
        self.batch: StaticBatch | None = None
        self.num_batches = 0

    @property
    def num_reserved(self) -> int:
        regions = [request.region for request in batch.requests] if (batch := self.batch) else []
        return sum(region.num_slots for region in regions if region)

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def num_unfinished(self) -> int:
        return len(self.queue) + (len(batch.requests) if (batch := self.batch) else 0)

    def add(self, request: Request) -> None:
        insort(self.queue, request, key=lambda r: (r.arrival_s, r.id))

    def cancel(self, request_id: int) -> list[Delivery]:
        for request in self.batch.requests if self.batch else ():
            if request.id == request_id:
                request.is_cancelled = True
        take_out(self.queue, request_id)
        return self._deliver()

    def next_batch(self) -> Batch | None:
        if self.is_full or (self.batch is None and not self._begin()):
            return None
        assert self.batch is not None
        if self.batch.is_finished:
            return None
        idle = [m for m in self.batch.microbatches if not m.is_in_flight and m.num_iterations < self.batch.most_iterations]
        for microbatch in sorted(idle, key=lambda m: m.num_iterations):
            if batch := self._rows(self.batch, microbatch):
                microbatch.is_in_flight = True
                microbatch.num_iterations += 1
                self.num_in_flight += 1
                self.num_batches += 1
                return batch
        return None

    def _begin(self) -> bool:
        """Make a batch of the queue; False where it is empty."""
        requests = select_batch(self.queue, self.max_batch_size, self.batching, self.num_slots, self.num_positions)
        self.num_short += len(requests) < min(self.max_batch_size, len(self.queue))
        if not requests:
            return False
        self.queue = self.queue[len(requests) :]
        begin = 0
        for request, count in zip(requests, slots_of(requests, self.batching, self.num_positions), strict=True):
            request.region = Region((begin,), count, count)
            begin += count
        size = self.microbatch_size or len(requests)
        microbatches = [Microbatch(requests[i : i + size]) for i in range(0, len(requests), size)]
        most = max(r.max_new_tokens for r in requests)
        if self.batching == "shortest_prompt":
            most = max(r.max_tokens for r in requests) - min(len(r.prompt) for r in requests)
        self.batch = StaticBatch(requests, microbatches, most)
        return True

    def _rows(self, batch: StaticBatch, microbatch: Microbatch) -> Batch | None:
        """The next iteration of a microbatch; None where no row is left of it."""
        longest, shortest = (f(len(r.prompt) for r in batch.requests) for f in (max, min))
        rows = []
        for request in microbatch.requests:
            if self.batching == "ragged" and request.is_complete:
                continue
            num_padding = longest - len(request.prompt) if self.batching == "padded" else 0
            num_tokens = 1
            if request.num_fed == 0:
                num_tokens = shortest if self.batching == "shortest_prompt" else len(request.prompt)
            assert request.region is not None, "its batch has begun"
            rows.append(row_of(request, request.region, num_tokens, num_padding))
            request.num_fed += num_tokens
        return Batch(self.num_batches, tuple(rows)) if rows else None

    def take_back(self, batch: Batch, tokens: Sequence[int]) -> list[Delivery]:
        assert self.batch is not None, "a batch in flight is of the static batch"
        self.num_in_flight -= 1
        requests = {request.id: request for request in self.batch.requests}
        for row, token in zip(batch.rows, tokens, strict=True):
            requests[row.request_id].accept(token, row.num_stream)
        for microbatch in self.batch.microbatches:
            if requests[batch.rows[0].request_id] in microbatch.requests:
                microbatch.is_in_flight = False
        return self._deliver()

    def _deliver(self) -> list[Delivery]:
        """What clients get now: all at the end, or each token at once. A batch whose requests are all finished goes."""
        batch = self.batch
        if batch is None or not (batch.is_complete or self.is_early_return):
            return []
        deliveries = []
        for request in batch.requests:
            begin = batch.num_delivered.get(request.id, 0)
            if begin < len(request.generated) and not request.is_cancelled:
                batch.num_delivered[request.id] = len(request.generated)
                deliveries.append(Delivery(request.id, tuple(request.generated[begin:]), request.is_complete))
        if batch.is_complete:
            for request in batch.requests:
                request.region = None
            self.batch = None
        return deliveries
