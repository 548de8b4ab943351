"""A trace under a virtual clock: the same scheduler, and iterations that cost what a table says."""

from __future__ import annotations

from collections.abc import Sequence

from results.serving import Iterations, ServedRequests
from systems.serving.loop import Listed, serve
from systems.serving.request import Delivery, Request
from systems.serving.scheduler import Scheduler
from systems.serving.simulated import Costs, SimulatedEngine, VirtualClock

from .client import prompt_of
from .traffic import Seen
from .wire import Plan
from .workload import Arrival

VOCABULARY = 1 << 20  # of prompts that nobody computes


def simulated(
    scheduler: Scheduler,
    costs: Costs,
    trace: Sequence[Arrival],
    num_workers: int = 1,
    seed: str = "0",
    shared_tokens: int = 0,
) -> Seen:
    """What a client would see. No token is computed.

    Args:
        scheduler: with no request.
        costs: of its iterations.
        trace: each request is sent when it is due.
        num_workers: stages of the pipeline.
        seed: of the prompts, as `traffic.run` has it.
        shared_tokens: at the beginning of each prompt, the same in all.
    """
    clock = VirtualClock()
    token_s: list[list[float]] = [[] for _ in trace]

    def deliver(deliveries: Sequence[Delivery], now_s: float) -> None:
        for delivery in deliveries:
            token_s[delivery.request_id] += [now_s] * len(delivery.tokens)

    prompts = [(i,) * a.prompt_tokens for i, a in enumerate(trace)]  # real ones take longer to draw
    if scheduler.reads_prompts:
        rows = [(a.due_s, a.prompt_tokens, a.max_new_tokens) for a in trace]
        plan = Plan(rows, seed, VOCABULARY, 0, shared_tokens)
        prompts = [tuple(prompt_of(plan, i)) for i in range(len(trace))]
    requests = [Request(i, prompts[i], a.max_new_tokens, a.due_s) for i, a in enumerate(trace)]
    engine = SimulatedEngine(clock, costs, num_workers)
    served = serve(scheduler, engine, Listed(requests), deliver, clock).iterations
    first: dict[int, float] = {}
    for iteration in served:
        for row in iteration.batch.rows:
            first.setdefault(row.request_id, iteration.begin_s)
    due_s = tuple(a.due_s for a in trace)
    lengths = tuple(a.prompt_tokens for a in trace), tuple(a.max_new_tokens for a in trace)
    iterations = Iterations(
        begin_s=tuple(i.begin_s for i in served),
        end_s=tuple(i.end_s for i in served),
        rows=tuple(i.num_rows for i in served),
        tokens=tuple(i.num_tokens for i in served),
        useful_tokens=tuple(i.num_useful for i in served),
        reserved_slots=tuple(i.num_reserved for i in served),
    )
    queued_s = tuple(first[i] - due for i, due in enumerate(due_s))
    return Seen(ServedRequests(due_s, due_s, *lengths, tuple(map(tuple, token_s))), iterations, queued_s)
