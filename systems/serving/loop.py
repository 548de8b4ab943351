"""The server's loop: requests in, an iteration at a time, tokens out. It runs under a real clock or a virtual one.

Invariant: while the engine is idle and something can be selected, it is submitted at once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from .batch import Batch
from .engine import Engine, Returned
from .request import Delivery, Request
from .scheduler import Scheduler

POLL_S = 50e-6  # between two looks, where a batch may return and a request may arrive


class Inbox(ABC):
    """What comes from clients."""

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Will nothing more come?"""

    @abstractmethod
    def arrived(self, now_s: float) -> Sequence[Request]:
        """Requests that have arrived since the last look, each of which can be served."""

    def cancelled(self) -> Sequence[int]:
        """Ids of requests that their clients have given up since the last look."""
        return ()

    @abstractmethod
    def next_s(self) -> float | None:
        """When the next request arrives; None where nobody knows."""

    @abstractmethod
    def wait(self) -> None:
        """Until something may have come, or a short time has passed."""


class Clock(ABC):
    """What time it is, and how to wait."""

    @abstractmethod
    def now(self) -> float:
        """Seconds."""

    @abstractmethod
    def wait(self, engine: Engine, inbox: Inbox) -> None:
        """Until a batch may have returned or a request may have arrived."""


class RealClock(Clock):
    """That of the machine, the same in all its processes."""

    def now(self) -> float:
        return time.perf_counter()

    def wait(self, engine: Engine, inbox: Inbox) -> None:
        if engine.num_in_flight:
            time.sleep(POLL_S)
        else:
            inbox.wait()


@dataclass(frozen=True)
class Iteration:
    """One iteration that has returned.

    Args:
        begin_s, end_s: when it was submitted, and when its tokens were there.
        num_rows, num_tokens: of its batch.
        num_useful: tokens that a request needed.
        num_reserved: slots that requests held while it ran.
        batch: what was computed.
    """

    begin_s: float
    end_s: float
    num_rows: int
    num_tokens: int
    num_useful: int
    num_reserved: int
    batch: Batch


@dataclass
class Course:
    """What a loop did. iterations: in the order of their return."""

    iterations: list[Iteration] = field(default_factory=list)

    def add(self, iteration: Iteration) -> None:
        """Note one that has returned."""
        self.iterations.append(iteration)


@dataclass
class Totals(Course):
    """What a loop without an end did, in sums that do not grow with it.

    Args:
        num_iterations: that have returned.
        num_tokens, num_useful: that they computed, and that a request needed.
    """

    num_iterations: int = 0
    num_tokens: int = 0
    num_useful: int = 0

    def add(self, iteration: Iteration) -> None:
        self.num_iterations += 1
        self.num_tokens += iteration.num_tokens
        self.num_useful += iteration.num_useful


def serve(
    scheduler: Scheduler,
    engine: Engine,
    inbox: Inbox,
    deliver: Callable[[Sequence[Delivery], float], None],
    clock: Clock,
    course: Course | None = None,
) -> Course:
    """Serve until the inbox is closed and every request is finished.

    Args:
        scheduler: with no request.
        engine: with nothing in flight.
        inbox: what comes from clients.
        deliver: takes what goes to clients, and the time.
        clock: the loop's.
        course: that iterations are noted in; a new one by default.
    """
    course = course or Course()
    submitted: deque[tuple[float, int]] = deque()
    returned_s = 0.0  # when the last iteration returned
    undelivered: Sequence[Delivery] = ()  # what it has for clients, who get it once the device has its next batch

    def deliver_rest() -> None:
        nonlocal undelivered
        if undelivered:
            deliver(undelivered, returned_s)
        undelivered = ()

    while True:
        for request in inbox.arrived(clock.now()):
            scheduler.add(request)
        for request_id in inbox.cancelled():
            if deliveries := scheduler.cancel(request_id):
                deliver_rest()
                deliver(deliveries, clock.now())
        batch = scheduler.next_batch()
        try:
            if batch is not None:
                submitted.append((clock.now(), scheduler.num_reserved))
                engine.submit(batch)
        finally:  # tokens that are there go out even where the engine has failed
            deliver_rest()
        if batch is not None:
            continue
        if engine.num_in_flight and (scheduler.is_full or engine.has_returned()):
            returned = engine.collect()
            begin_s, num_reserved = submitted.popleft()
            undelivered, returned_s = scheduler.take_back(returned.batch, returned.tokens), clock.now()
            course.add(_iteration(returned, begin_s, returned_s, num_reserved))
        elif engine.num_in_flight or not inbox.is_closed:
            clock.wait(engine, inbox)
        else:
            assert scheduler.num_unfinished == 0, "an idle engine has nothing to select, and requests are unfinished"
            return course


def discard(deliveries: Sequence[Delivery], now_s: float) -> None:
    """Deliver to nobody."""


def _iteration(returned: Returned, begin_s: float, end_s: float, num_reserved: int) -> Iteration:
    batch = returned.batch
    return Iteration(begin_s, end_s, len(batch.rows), batch.num_tokens, batch.num_useful, num_reserved, batch)


class Listed(Inbox):
    """Requests that are known beforehand, each with its time of arrival."""

    def __init__(self, requests: Sequence[Request]):
        self.waiting = deque(sorted(requests, key=lambda request: (request.arrival_s, request.id)))

    @property
    def is_closed(self) -> bool:
        return not self.waiting

    def arrived(self, now_s: float) -> Sequence[Request]:
        arrived = []
        while self.waiting and self.waiting[0].arrival_s <= now_s:
            arrived.append(self.waiting.popleft())
        return arrived

    def next_s(self) -> float | None:
        return self.waiting[0].arrival_s if self.waiting else None

    def wait(self) -> None:
        time.sleep(POLL_S)

    def later(self, seconds: float) -> Listed:
        """The same, every arrival so much later."""
        return Listed([replace(request, arrival_s=request.arrival_s + seconds) for request in self.waiting])


class Encoded(Inbox):
    """What comes for an encoder-decoder: an encoder takes the prompt, and the decoder begins with a token of its own.

    Args:
        inbox: where requests come.
        start_token: the decoder's first.
    """

    def __init__(self, inbox: Inbox, start_token: int):
        self.inbox, self.start_token = inbox, start_token

    @property
    def is_closed(self) -> bool:
        return self.inbox.is_closed

    def arrived(self, now_s: float) -> Sequence[Request]:
        return [
            replace(request, prompt=(*request.prompt, self.start_token), num_source=len(request.prompt))
            for request in self.inbox.arrived(now_s)
        ]

    def cancelled(self) -> Sequence[int]:
        return self.inbox.cancelled()

    def next_s(self) -> float | None:
        return self.inbox.next_s()

    def wait(self) -> None:
        self.inbox.wait()
