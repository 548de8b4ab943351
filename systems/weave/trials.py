"""Executors that take turns, and how long a call of each takes."""

from collections.abc import Callable
from contextlib import suppress
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from systems.base import Prepared
from systems.scheduling.execution.scheduled import Scheduled
from systems.scheduling.graph.program import Program

ROUNDS, LEAST_CALLS, ROUND_SECONDS = 5, 5, 0.02
HOPELESS = 1.05  # times the best so far in each of the first two rounds, from which on another gets no more of them


class Holder:
    """The executor of the best so far, closed in the end or where another takes its place."""

    def __init__(self, executor: Scheduled):
        self.executor = executor

    def replace(self, executor: Scheduled) -> None:
        self.executor.close()
        self.executor = executor

    def close(self) -> None:
        self.executor.close()


def in_turn(best: Prepared, other: Prepared, inputs: tuple[Tensor, ...], rewind: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds of a call of each, of the round with the median ratio of those in which they take turns."""
    rounds: list[tuple[float, float]] = []
    for i in range(ROUNDS + 1):
        each = milliseconds(best, inputs, rewind), milliseconds(other, inputs, rewind)
        if i > 0:  # the first warms up
            rounds.append(each)
        if len(rounds) == 2 and all(other_ms > HOPELESS * best_ms for best_ms, other_ms in rounds):
            break
    return sorted(rounds, key=lambda each: each[1] / each[0])[len(rounds) // 2]


def fastest_of(make: Callable[[], Scheduled], count: int, program: Program) -> Scheduled:
    """Of `count` executors that it makes, or as many as there is memory for, the fastest; the others are closed."""
    rewind = program.rewinding()
    made, best = [make()], None
    try:
        with suppress(torch.cuda.OutOfMemoryError):
            while len(made) < count:
                made.append(make())
        rounds = [[milliseconds(each, program.examples, rewind) for each in made] for _ in range(ROUNDS + 1)]
        medians = [median(samples) for samples in zip(*rounds[1:], strict=True)]  # the first round warms up
        best = made[medians.index(min(medians))]
        return best
    finally:  # also when it is interrupted
        for each in made:
            if each is not best:
                each.close()


def milliseconds(prepared: Prepared, inputs: tuple[Tensor, ...], rewind: Callable[[], None]) -> float:
    """Of a call, from the host's launch to the end of the device's work: the median over a few.

    rewind: called before and after each, untimed.
    """
    is_cuda = torch.cuda.is_initialized()
    samples: list[float] = []
    rewind()
    begin = perf_counter()
    while len(samples) < LEAST_CALLS or perf_counter() - begin < ROUND_SECONDS:
        start = perf_counter()
        prepared(*inputs)
        if is_cuda:
            torch.cuda.synchronize()
        samples.append((perf_counter() - start) * 1e3)
        rewind()
    return median(samples)
