"""The same scheduler and the same loop under a virtual clock, with an engine that only says how long an iteration takes.

Invariant: with the costs of a real engine's iterations the batches are that engine's, request by request.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from .batch import Batch
from .engine import Engine, Returned
from .loop import Clock, Inbox


class Costs(Protocol):
    """What iterations cost."""

    def __call__(self, batch: Batch) -> float:
        """Seconds that a batch takes a stage."""

    def delay(self, batch: Batch) -> float:
        """Seconds from a batch's end in the last stage to its return, while which that stage may have the next."""


@dataclass(frozen=True)
class LinearCost:
    """Seconds of an iteration: a part that any has, one for each token, and one for each place that tokens attend to.

    delay_s: of every return.
    """

    fixed_s: float
    token_s: float = 0.0
    context_s: float = 0.0
    delay_s: float = 0.0

    def __call__(self, batch: Batch) -> float:
        num_places = sum(row.num_context for row in batch.rows)
        return self.fixed_s + self.token_s * batch.num_tokens + self.context_s * num_places

    def delay(self, batch: Batch) -> float:
        return self.delay_s


class VirtualClock(Clock):
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def advance(self, to_s: float) -> None:
        self.now_s = max(self.now_s, to_s)

    def wait(self, engine: Engine, inbox: Inbox) -> None:
        assert isinstance(engine, SimulatedEngine), "a virtual clock goes with a simulated engine"
        moments = [moment for moment in (engine.next_s(), inbox.next_s()) if moment is not None]
        self.advance(min(moments))


class SimulatedEngine(Engine):
    """A pipeline of stages, each of which has one batch at a time.

    Args:
        clock: that of the loop.
        costs: of its batches.
        num_workers: stages.
        tokens: an engine that computes the tokens; without one every token is 0.
    """

    def __init__(self, clock: VirtualClock, costs: Costs, num_workers: int = 1, tokens: Engine | None = None):
        self.clock, self.costs, self.num_workers, self.tokens = clock, costs, num_workers, tokens
        self.returned_s = 0.0  # when the last batch returns
        self.free_s = [0.0] * num_workers  # when each stage has nothing more to do
        self.flights: deque[tuple[float, Returned]] = deque()

    @property
    def num_in_flight(self) -> int:
        return len(self.flights)

    def submit(self, batch: Batch) -> None:
        cost_s, moment = self.costs(batch), self.clock.now()
        for stage, free_s in enumerate(self.free_s):
            moment = self.free_s[stage] = max(moment, free_s) + cost_s
        self.returned_s = max(moment + self.costs.delay(batch), self.returned_s)  # in the order of submission
        returned = Returned(batch, [0] * len(batch.rows))
        if self.tokens is not None:
            self.tokens.submit(batch)
            returned = self.tokens.collect()
        self.flights.append((self.returned_s, returned))

    def next_s(self) -> float | None:
        """When the next batch returns."""
        return self.flights[0][0] if self.flights else None

    def has_returned(self) -> bool:
        return bool(self.flights) and self.flights[0][0] <= self.clock.now()

    def collect(self) -> Returned:
        moment, returned = self.flights.popleft()
        self.clock.advance(moment)
        return returned
