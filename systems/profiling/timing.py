"""How long a small program takes on its device, measured by itself."""

from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from itertools import pairwise
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any

import torch

from systems.scheduling.execution.cpu_executor import CpuExecutor
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import Schedule

from .costs import Cache

LEAST_SAMPLES, MOST_SAMPLES = 5, 30
SECONDS = 0.03  # of one measurement, after the warm-up
WARM_UP_RUNS = 2  # the first compile kernels, load them and let cuDNN choose its algorithms
COPIES = 10  # of the program in one CUDA Graph at most, so that the launch of the graph does not count
LONG = 0.3  # ms of such a graph, of which its launch is little enough

Groups = Sequence[Sequence[int]]  # of a program's operators: each group in order, the groups at once


class Timer:
    """Measures programs, each distinct one once: it keeps the times on disk, by what the operators do."""

    def __init__(self, device: torch.device):
        self.cache = Cache("times", device)
        self.taken = 0  # measurements made, and not found

    def __call__(self, program: Program) -> float:
        """Milliseconds of `program`, its operators one after the other."""
        signature = "; ".join(program.signature(v) for v in range(len(program.graph)))
        return self.known(signature, lambda: milliseconds(program))

    def at_once(self, program: Program) -> float:
        """Milliseconds of `program`, whose operators do not depend on each other, each of them on a stream of its own."""
        signature = " | ".join(program.signature(v) for v in range(len(program.graph)))
        return self.known(signature, lambda: milliseconds(program, [[v] for v in range(len(program.graph))]))

    def known(self, signature: str, measure: Callable[[], float]) -> float:
        """What `measure` gives, if it was not measured before."""
        name = _name(signature)
        if name not in self.cache:
            self.cache[name] = measure()
            self.taken += 1
        return float(self.cache[name])

    def find(self, signature: str) -> float | None:
        """What was measured before, in this process or another; None where it was not."""
        name = _name(signature)
        return float(self.cache[name]) if name in self.cache else None

    def close(self) -> None:
        """Write what is new, and give back the memory that was measured with."""
        self.cache.write()
        _first_graph.cache_clear()


def _name(signature: str) -> str:
    return sha256(signature.encode()).hexdigest()[:24]  # some are pages long


@torch.no_grad()
def milliseconds(
    program: Program,
    groups: Groups | None = None,
    seconds: float = SECONDS,
    warm_up_runs: int = WARM_UP_RUNS,
    least: float = 0.0,
) -> float:
    """Median time of `program` on its example inputs, groups of its operators at once, or all of them in one group.

    On a GPU by replaying a CUDA Graph of several copies of it, one after the other, so that no launch counts; on a CPU by
    calling it. seconds: to go on for, within LEAST_SAMPLES and MOST_SAMPLES. warm_up_runs: 0 where all of its operators have
    run in this process before. least: milliseconds that it takes at least, since capturing copies of what is long costs more
    than it tells. Raises RuntimeError where an operator fails or cannot be captured.
    """
    if groups is None:
        groups = [range(len(program.graph))]
    for _ in range(warm_up_runs):
        program.run(program.examples)
    if program.device.type == "cuda":
        return _replayed(program, groups, seconds, min(max(ceil(LONG / least), 1), COPIES) if least else COPIES)
    if len(groups) == 1:
        return _sampled(lambda: program.run(program.examples), seconds)
    order = tuple(v for group in groups for v in group)
    stream = {v: s for s, group in enumerate(groups) for v in group}
    executor = CpuExecutor(program, Schedule(program.graph, "stage", order, tuple(stream[v] for v in sorted(order)), ()))
    try:
        return _sampled(lambda: executor(*program.examples), seconds)
    finally:
        executor.close()


def _sampled(call: Callable[[], Any], seconds: float) -> float:
    samples: list[float] = []
    begin = perf_counter()
    while len(samples) < LEAST_SAMPLES or (perf_counter() - begin < seconds and len(samples) < MOST_SAMPLES):
        start = perf_counter()
        call()
        samples.append((perf_counter() - start) * 1e3)
    return median(samples)


def _replayed(program: Program, groups: Groups, seconds: float, copies: int) -> float:
    device = program.device
    sides = [_side(device, i) for i in range(len(groups))]
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # Not by `with torch.cuda.graph`, which empties the allocator's cache: the next of thousands of stages wants it filled.
    with torch.cuda.stream(sides[0]):
        graph.capture_begin(pool=_first_graph(device).pool(), capture_error_mode="thread_local")
        try:
            kept = [_launched(program, groups, sides) for _ in range(copies)]
        finally:
            graph.capture_end()
    once = _between(graph, 1)[0]  # the first launch uploads the graph; the time is too long, and the samples too few
    count = min(max(round(seconds * 1e3 / max(once, 1e-3)), LEAST_SAMPLES), MOST_SAMPLES)
    samples = [elapsed / copies for elapsed in _between(graph, count)]
    del kept
    graph.reset()
    return median(samples)


def _between(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Milliseconds of each of `count` replays. They are all launched before the first is waited for, so that the launch of
    each, but for the first, is over when its turn comes.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    events[-1].synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(events)]


@cache
def _side(device: torch.device, i: int) -> torch.cuda.Stream:
    """The same ones every time, since the allocator keeps what it has by stream."""
    return torch.cuda.Stream(device)


@cache
def _first_graph(device: torch.device) -> torch.cuda.CUDAGraph:
    """Its memory is what all the others allocate from, one after the other.

    A pool lasts as long as some graph of it does; torch's own for pinned memory may not even be asked for again afterwards.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        torch.zeros(1, device=device)  # an empty graph is warned of
    return graph


def _launched(program: Program, groups: Groups, sides: Sequence[torch.cuda.Stream]) -> list[Any]:
    """Launch the groups, each on a stream, and join them on the first. What is returned has to outlive the capture: no
    memory may be used again while another stream still uses it.
    """
    values: list[Any] = [None] * len(program.graph)
    for side in sides[1:]:
        side.wait_stream(sides[0])
    for side, group in zip(sides, groups, strict=True):
        with torch.cuda.stream(side):
            for v in group:
                values[v] = program.execute(v, values, program.examples)
    for side in sides[1:]:
        sides[0].wait_stream(side)
    return values
