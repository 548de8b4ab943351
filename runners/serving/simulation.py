"""A trace under a virtual clock: the same scheduler, and iterations that cost what a table says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from results.record import Iterations, ServedRequests
from systems.serving.batch import Batch
from systems.serving.loop import Listed, serve
from systems.serving.request import Delivery, Request
from systems.serving.scheduler import Scheduler
from systems.serving.simulated import SimulatedEngine, VirtualClock

from .traffic import Seen
from .workload import Asked


def simulated(scheduler: Scheduler, cost: Callable[[Batch], float], asked: Sequence[Asked], num_workers: int = 1) -> Seen:
    """What a client would see. No token is computed.

    Args:
        scheduler: with no request.
        cost: seconds that a stage takes for a batch.
        asked: the trace, each request sent when it is due.
        num_workers: stages of the pipeline.
    """
    clock = VirtualClock()
    token_s: list[list[float]] = [[] for _ in asked]

    def deliver(deliveries: Sequence[Delivery], now_s: float) -> None:
        for delivery in deliveries:
            token_s[delivery.request_id] += [now_s] * len(delivery.tokens)

    requests = [Request(i, (0,) * a.prompt_tokens, a.max_new_tokens, a.due_s) for i, a in enumerate(asked)]
    of = serve(scheduler, SimulatedEngine(clock, cost, num_workers), Listed(requests), deliver, clock).iterations
    first: dict[int, float] = {}
    for iteration in of:
        for row in iteration.batch.rows:
            first.setdefault(row.request_id, iteration.begin_s)
    due_s = tuple(a.due_s for a in asked)
    lengths = tuple(a.prompt_tokens for a in asked), tuple(a.max_new_tokens for a in asked)
    iterations = Iterations(
        begin_s=tuple(i.begin_s for i in of),
        end_s=tuple(i.end_s for i in of),
        rows=tuple(i.num_rows for i in of),
        tokens=tuple(i.num_tokens for i in of),
        useful_tokens=tuple(i.num_useful for i in of),
        reserved_slots=tuple(i.num_reserved for i in of),
    )
    queued_s = tuple(first[i] - due for i, due in enumerate(due_s))
    return Seen(ServedRequests(due_s, due_s, *lengths, tuple(map(tuple, token_s))), iterations, queued_s)
