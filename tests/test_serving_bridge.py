"""Many requests through the threads of a server: each is answered whole, given up, or told that the engine has ended."""

from __future__ import annotations

import asyncio
import random
from collections import deque

import pytest

from runners.serving.bridge import Bridge, Mail, Stopped
from systems.serving.batch import Batch
from systems.serving.engine import Engine, Returned
from systems.serving.iteration_level import IterationLevel
from systems.serving.prefix_cache import CachedSlots
from systems.serving.request import Delivery, Request
from systems.serving.request_level import RequestLevel
from systems.serving.scheduler import Scheduler
from systems.serving.slots import ContiguousSlots, PagedSlots
from systems.serving.system import Server

NUM_SLOTS, NUM_REQUESTS = 200, 1000


class Counting(Engine):
    """Stands for a real engine: each token is the place in its answer. It ends with an error after so many batches."""

    def __init__(self, most_batches: float = float("inf")):
        self.flights: deque[Batch] = deque()
        self.remaining = most_batches

    @property
    def num_in_flight(self) -> int:
        return len(self.flights)

    def submit(self, batch: Batch) -> None:
        self.remaining -= 1
        if self.remaining < 0:
            raise RuntimeError("a worker was killed")
        self.flights.append(batch)

    def has_returned(self) -> bool:
        return bool(self.flights)

    def collect(self) -> Returned:
        batch = self.flights.popleft()
        return Returned(batch, [row.draw for row in batch.rows])


SCHEDULERS = {
    "contiguous": lambda: IterationLevel(ContiguousSlots.all_free(NUM_SLOTS), 8),
    "paged, chunked": lambda: IterationLevel(PagedSlots.all_free(NUM_SLOTS, 4), 8, 1, True, 16),
    "shared, preempting": lambda: IterationLevel(CachedSlots.all_free(NUM_SLOTS, 4), 8, is_preempting=True),
    "ahead": lambda: IterationLevel(PagedSlots.all_free(NUM_SLOTS, 4), 8, is_asynchronous=True),
    "ragged": lambda: RequestLevel(NUM_SLOTS, 64, 8, "ragged"),
    "padded, early": lambda: RequestLevel(NUM_SLOTS, 64, 8, "padded", True),
}


async def served(scheduler: Scheduler, engine: Engine) -> tuple[dict[int, list[int]], set[int], set[int], list[object]]:
    """What 1,000 requests came to: tokens by request, those given up, those told of an end, and how the engine ended."""
    chance = random.Random(0)
    ends: list[object] = []
    has_ended = asyncio.Event()

    def end(error: BaseException | None) -> None:
        ends.append(error)
        has_ended.set()

    bridge = Bridge(Server(scheduler, engine, (NUM_SLOTS, 64, 100)), end)
    tokens: dict[int, list[int]] = {}
    given_up: set[int] = set()
    stopped_ids: set[int] = set()

    async def ask(new: int, patience: int | None) -> None:
        request = Request(-1, (1,) * chance.randint(1, 30), new)
        queue = bridge.submit(request)
        got = tokens.setdefault(request.id, [])
        while True:
            if patience is not None and len(got) >= patience:
                bridge.give_up(request.id)
                given_up.add(request.id)
                return
            answer = await queue.get()
            if isinstance(answer, Stopped):
                stopped_ids.add(request.id)
                return
            assert isinstance(answer, Delivery)
            got += answer.tokens
            if answer.is_last:
                assert got == list(range(new))
                return

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for _ in range(NUM_REQUESTS):
            group.create_task(ask(chance.randint(1, 20), chance.choice([None, None, 0, 3])))
            if chance.random() < 0.1:
                await asyncio.sleep(0.001)
    bridge.drain()
    async with asyncio.timeout(10):
        await has_ended.wait()
    assert not bridge.answers
    return tokens, given_up, stopped_ids, ends


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_thousand_requests_with_random_cancels_lose_nothing(name: str) -> None:
    scheduler = SCHEDULERS[name]()
    tokens, given_up, stopped_ids, ends = asyncio.run(served(scheduler, Counting()))
    assert len(tokens) == NUM_REQUESTS and 100 < len(given_up) < 900 and not stopped_ids and ends == [None]
    assert scheduler.num_reserved == scheduler.num_unfinished == scheduler.num_in_flight == 0


def test_an_engine_that_ends_tells_everybody() -> None:
    tokens, given_up, stopped_ids, ends = asyncio.run(served(SCHEDULERS["contiguous"](), Counting(most_batches=200)))
    assert isinstance(ends[0], RuntimeError) and len(stopped_ids) > 100 and not stopped_ids & given_up
    answered = NUM_REQUESTS - len(stopped_ids) - len(given_up)
    assert answered > 0 and len(tokens) == NUM_REQUESTS


def test_what_is_given_up_before_it_is_taken_is_never_taken() -> None:
    """The engine's thread has looked for requests, and not yet for cancellations, when one is put and given up."""
    mail = Mail()
    assert mail.arrived(0.0) == []
    mail.put(Request(7, (1,), 3))
    mail.put(Request(8, (1,), 3))
    mail.give_up(7)
    assert mail.cancelled() == [] and [request.id for request in mail.arrived(0.0)] == [8]
    mail.give_up(8)
    assert mail.cancelled() == [8] and not mail.is_closed


@pytest.mark.parametrize("kind", ["iteration level", "request level", "mail"])
def test_many_that_wait_are_given_up_in_their_order_at_little_cost(kind: str) -> None:
    """As those of one body, whose client goes away."""

    class Looked(Request):
        num_looks = 0

        def __getattribute__(self, name: str) -> object:
            Looked.num_looks += name == "id"
            return super().__getattribute__(name)

    requests = [Looked(i, (1,), 1) for i in range(300)]
    scheduler = (
        RequestLevel(5, 5, 2, "ragged") if kind == "request level" else IterationLevel(ContiguousSlots.all_free(5), 2)
    )
    mail = Mail()
    for request in requests:
        mail.put(request) if kind == "mail" else scheduler.add(request)
    Looked.num_looks = 0
    for number in range(300):
        mail.give_up(number) if kind == "mail" else scheduler.cancel(number)
    assert scheduler.num_unfinished == 0 and not mail.requests and not mail.given_up
    assert Looked.num_looks <= 600


def test_a_static_batch_may_end_while_another_thread_asks_for_numbers() -> None:
    """The thread that speaks HTTP does, for /metrics."""

    class Ending(RequestLevel):
        is_ending = False

        def __getattribute__(self, name: str) -> object:
            value = super().__getattribute__(name)
            if name == "batch" and super().__getattribute__("is_ending"):
                self.batch, self.is_ending = None, False
            return value

    for name, number in (("num_reserved", 5), ("num_unfinished", 1)):
        scheduler = Ending(5, 5, 2, "ragged")
        scheduler.add(Request(0, (1, 2), 3))
        scheduler.next_batch()
        scheduler.is_ending = True
        assert getattr(scheduler, name) == number and getattr(scheduler, name) == 0
