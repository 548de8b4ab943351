"""One trace through a server: the load generator is started, its requests come in, and its report is waited for."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from results.serving import Iterations, ServedRequests
from runners.machine.installation import module_name
from systems.serving.loop import Course, Inbox, RealClock
from systems.serving.peer import PeerServer
from systems.serving.request import Delivery, Request, refusal
from systems.serving.system import Server

from .wire import Closed, Frames, Kind, Plan, Report, numbers, send, send_json, tokens_body
from .workload import Arrival

WAIT_S = 0.1  # for a request, where the engine is idle
TELL_S = 5.0  # between what is told of how far a trace is
END_S = 10.0  # for the load generator's process to end


class GeneratorEnded(RuntimeError):
    """The load generator ended before its trace."""


class SocketInbox(Inbox):
    """Requests from the load generator. report: what it saw, once it has finished."""

    def __init__(self, connection: socket.socket, server: Server | PeerServer):
        self.connection, self.server = connection, server
        self.frames = Frames(connection)
        self.report: bytes | None = None

    @property
    def is_closed(self) -> bool:
        return self.report is not None

    def arrived(self, now_s: float) -> Sequence[Request]:
        if self.is_closed:
            return ()
        requests = []
        self._receive()
        for kind, body in self.frames.whole():
            if kind == Kind.REPORT:
                self.report = body
            else:
                number, max_new_tokens, *prompt = numbers(body)
                request = Request(number, tuple(prompt), max_new_tokens, perf_counter())
                if reason := refusal(request, *self.server.bounds):
                    raise ValueError(f"request {number}: {reason}")
                requests.append(request)
        return requests

    def _receive(self) -> None:
        try:
            self.frames.receive()
        except Closed:
            raise GeneratorEnded("the load generator ended before its trace did") from None

    def next_s(self) -> float | None:
        return None

    def wait(self) -> None:
        select.select([self.connection], [], [], WAIT_S)


@dataclass(frozen=True)
class Seen:
    """What came of one trace.

    Args:
        requests: as their client saw them.
        iterations: none where a peer served, which does not say what they are.
        queued_s: from when a request was sent to when its first iteration began, a number each where that is known.
    """

    requests: ServedRequests
    iterations: Iterations
    queued_s: tuple[float, ...]


def run(
    server: Server | PeerServer,
    trace: Sequence[Arrival],
    seed: str,
    concurrency: int,
    shared_tokens: int = 0,
    tell: Callable[[int], None] = lambda finished: None,
) -> Seen:
    """Serve one trace.

    Args:
        server: with nothing to do.
        trace: the requests.
        seed: of the prompts: two traces of one seed have the same, which a server may know by then.
        concurrency: requests that are unfinished at a time; 0 sends each when it is due.
        shared_tokens: at the beginning of each prompt, the same in all.
        tell: takes how many requests are finished, at the beginning and every TELL_S seconds.

    Raises:
        GeneratorEnded: its process ended before.
    """
    ours, theirs = socket.socketpair()
    generator = subprocess.Popen(
        [sys.executable, "-P", "-m", module_name("runners.serving.client"), str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    try:
        rows = [(a.due_s, a.prompt_tokens, a.max_new_tokens) for a in trace]
        send_json(ours, Kind.PLAN, Plan(rows, seed, server.bounds[-1], concurrency, shared_tokens))
        inbox = SocketInbox(ours, server)
        try:
            inbox.frames.next()
        except Closed:
            raise GeneratorEnded("the load generator ended before its trace began") from None
        ours.setblocking(False)
        send(ours, Kind.GO)

        num_finished, told_s = 0, perf_counter()
        tell(0)

        def deliver(deliveries: Sequence[Delivery], now_s: float) -> None:
            nonlocal num_finished, told_s
            num_finished += sum(delivery.is_last for delivery in deliveries)
            if now_s - told_s >= TELL_S:
                told_s = now_s
                tell(num_finished)
            ours.setblocking(True)
            send(ours, Kind.TOKENS, tokens_body(deliveries))
            ours.setblocking(False)

        course = server.serve(inbox, deliver, RealClock())
        generator.wait(END_S)
    finally:
        generator.kill()
        generator.wait()
        ours.close()
    assert inbox.report is not None, "the loop ends with the report"
    return _seen(Report(**json.loads(inbox.report)), trace, course)


def _seen(report: Report, trace: Sequence[Arrival], course: Course) -> Seen:
    requests = ServedRequests(
        due_s=_rounded(report.due_s),
        sent_s=_rounded(report.sent_s),
        prompt_tokens=tuple(a.prompt_tokens for a in trace),
        max_new_tokens=tuple(a.max_new_tokens for a in trace),
        token_s=tuple(map(_rounded, report.token_s)),
    )
    begin = report.begin
    served = course.iterations
    first: dict[int, float] = {}
    for iteration in served:
        for row in iteration.batch.rows:
            first.setdefault(row.request_id, iteration.begin_s - begin)
    iterations = Iterations(
        begin_s=_rounded([i.begin_s - begin for i in served]),
        end_s=_rounded([i.end_s - begin for i in served]),
        rows=tuple(i.num_rows for i in served),
        tokens=tuple(i.num_tokens for i in served),
        useful_tokens=tuple(i.num_useful for i in served),
        reserved_slots=tuple(i.num_reserved for i in served),
    )
    queued_s = tuple(first[number] - sent for number, sent in enumerate(requests.sent_s) if number in first)
    return Seen(requests, iterations, queued_s)


def _rounded(seconds: Sequence[float]) -> tuple[float, ...]:
    """To microseconds."""
    return tuple(round(value, 6) for value in seconds)
