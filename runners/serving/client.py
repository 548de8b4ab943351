"""The load generator: a process of its own, so that a busy server delays no arrival and no reading of the clock.

python -m runners.serving.client FD

It sends each request when it is due, whatever the server does (open loop), or a new one for each that is finished (closed
loop), and notes when each token came. How late it sent is part of what it reports.

Invariant: it never waits for the server to read. What the socket does not take yet waits here, while tokens are taken.
"""

from __future__ import annotations

import json
import random
import select
import socket
import sys
from array import array
from time import perf_counter

from runners.serving.wire import Closed, Frames, Kind, Plan, Report, framed, numbers, send, send_json


def prompt_of(plan: Plan, number: int) -> list[int]:
    """The token ids of a request."""
    length = plan.arrivals[number][1]
    num_shared = min(plan.shared_tokens, length)
    draws = (random.Random(f"{plan.seed}/shared"), num_shared), (random.Random(f"{plan.seed}/{number}"), length - num_shared)
    return [draw.randrange(plan.vocabulary) for draw, count in draws for _ in range(count)]


class Client:
    """Sends one trace and watches what comes."""

    def __init__(self, connection: socket.socket, frames: Frames, plan: Plan):
        self.connection, self.frames, self.plan = connection, frames, plan
        self.arrivals = plan.arrivals
        prompts = [prompt_of(plan, i) for i in range(len(self.arrivals))]
        self.bodies = [
            array("i", [i, new, *prompt]).tobytes()
            for i, ((_, _, new), prompt) in enumerate(zip(self.arrivals, prompts, strict=True))
        ]
        self.due_s = [due_s for due_s, _, _ in self.arrivals]
        self.outgoing = bytearray()  # what the socket has not taken yet
        self.sent_s: list[float] = []
        self.token_s: list[list[float]] = [[] for _ in self.arrivals]
        self.num_finished = 0

    def run(self) -> None:
        """Until every request is finished. Raises Closed."""
        self.connection.setblocking(False)
        self.begin = perf_counter()
        while self.num_finished < len(self.arrivals):
            now_s = perf_counter() - self.begin
            while (number := len(self.sent_s)) < len(self.arrivals) and self._is_due(number, now_s):
                self._send(number, now_s)
            self._write()
            writing = [self.connection] if self.outgoing else []
            readable, _, _ = select.select([self.connection], writing, [], self._patience())
            if readable:
                self._take()
        self.connection.setblocking(True)

    def _is_due(self, number: int, now_s: float) -> bool:
        if self.plan.concurrency:
            return number - self.num_finished < self.plan.concurrency
        return self.due_s[number] <= now_s

    def _send(self, number: int, now_s: float) -> None:
        if self.plan.concurrency:
            self.due_s[number] = now_s
        self.sent_s.append(perf_counter() - self.begin)
        self.outgoing += framed(Kind.REQUEST, self.bodies[number])

    def _write(self) -> None:
        """As much as the socket takes."""
        try:
            while self.outgoing:
                del self.outgoing[: self.connection.send(self.outgoing)]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed from error

    def _patience(self) -> float | None:
        """Seconds until the next request is due."""
        number = len(self.sent_s)
        if self.plan.concurrency or number == len(self.arrivals):
            return None
        return max(0.0, self.due_s[number] - (perf_counter() - self.begin))

    def _take(self) -> None:
        self.frames.receive()
        now_s = perf_counter() - self.begin
        for _, body in self.frames.whole():
            values, at = numbers(body), 0
            while at < len(values):
                number, is_last, count = values[at : at + 3]
                self.token_s[number] += [now_s] * count
                self.num_finished += is_last
                at += 3 + count

    def report(self) -> Report:
        """What it saw."""
        return Report(self.begin, self.due_s, self.sent_s, self.token_s)


def main(descriptor: int) -> None:
    """Send one trace."""
    with socket.socket(fileno=descriptor) as connection:
        frames = Frames(connection)
        _, body = frames.next()
        client = Client(connection, frames, Plan(**json.loads(body)))
        send(connection, Kind.READY)
        frames.next()
        client.run()
        send_json(connection, Kind.REPORT, client.report())


if __name__ == "__main__":
    main(int(sys.argv[1]))
