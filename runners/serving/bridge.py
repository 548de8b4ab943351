"""Between the threads of a server: one speaks HTTP, the other runs the engine's loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from systems.serving.loop import Inbox, RealClock, Totals
from systems.serving.request import Delivery, Request, take_out
from systems.serving.system import Server

WAIT_S = 0.1  # for a request, where the engine is idle


class Stopped(RuntimeError):
    """The engine has stopped: nothing more is answered."""


@dataclass
class Mail(Inbox):
    """Requests and cancellations, put in by one thread and taken out by another."""

    requests: list[Request] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)
    is_ending: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, request: Request) -> None:
        with self.changed:
            self.requests.append(request)
            self.changed.notify()

    def give_up(self, request_id: int) -> None:
        """Also of one that the engine has not taken yet: it never does."""
        with self.changed:
            if not take_out(self.requests, request_id):
                self.given_up.append(request_id)
            self.changed.notify()

    def end(self) -> None:
        """Nothing more will come."""
        with self.changed:
            self.is_ending = True
            self.changed.notify()

    @property
    def is_closed(self) -> bool:
        with self.changed:
            return self.is_ending and not self.requests

    def arrived(self, now_s: float) -> Sequence[Request]:
        with self.changed:
            arrived, self.requests = self.requests, []
        return arrived

    def cancelled(self) -> Sequence[int]:
        with self.changed:
            given_up, self.given_up = self.given_up, []
        return given_up

    def next_s(self) -> float | None:
        return None

    def wait(self) -> None:
        with self.changed:
            if not (self.requests or self.given_up or self.is_ending):
                self.changed.wait(WAIT_S)


class Bridge:
    """Requests of an event loop, answered by a thread of the engine's own.

    Args:
        server: with nothing to do; no other thread may use it.
        ended: called in the event loop when the thread ends, with what it raised or None.
    """

    def __init__(self, server: Server, ended: Callable[[BaseException | None], None]):
        self.server, self.ended = server, ended
        self.events = asyncio.get_running_loop()
        self.mail, self.totals = Mail(), Totals()
        self.answers: dict[int, asyncio.Queue[Delivery | Stopped]] = {}
        self.num_requests = 0
        self.stopped: Stopped | None = None  # once the engine has
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    def submit(self, request: Request) -> asyncio.Queue[Delivery | Stopped]:
        """What comes of a request, up to the delivery that is the last. Its id is given here."""
        request.id, request.arrival_s = self.num_requests, time.perf_counter()
        self.num_requests += 1
        queue: asyncio.Queue[Delivery | Stopped] = asyncio.Queue()
        if self.stopped is not None:
            queue.put_nowait(self.stopped)
        else:
            self.answers[request.id] = queue
            self.mail.put(request)
        return queue

    def give_up(self, request_id: int) -> None:
        """Nobody waits for a request any more; one that is finished is passed over."""
        if self.answers.pop(request_id, None) is not None:
            self.mail.give_up(request_id)

    @property
    def num_unanswered(self) -> int:
        """Requests that somebody waits for."""
        return len(self.answers)

    def drain(self) -> None:
        """Answer what has come, and end."""
        self.mail.end()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self.server.serve(self.mail, self._deliver, RealClock(), self.totals)
        except BaseException as raised:  # whatever ends the engine is told to all who wait
            error = raised
        self.events.call_soon_threadsafe(self._end, error)

    def _deliver(self, deliveries: Sequence[Delivery], now_s: float) -> None:
        self.events.call_soon_threadsafe(self._dispatch, deliveries)

    def _dispatch(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if (queue := self.answers.get(delivery.request_id)) is not None:
                queue.put_nowait(delivery)
                if delivery.is_last:
                    del self.answers[delivery.request_id]

    def _end(self, error: BaseException | None) -> None:
        self.stopped = Stopped(f"the engine has stopped: {error or 'it was told to'}")
        for queue in self.answers.values():
            queue.put_nowait(self.stopped)
        self.answers.clear()
        self.ended(error)
