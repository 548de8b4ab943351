"""How long a small program takes on its device, measured by itself."""

from collections.abc import Callable, Sequence
from hashlib import sha256
from statistics import median
from time import perf_counter
from typing import Any

import torch

from .costs import Cache
from .cpu_executor import CpuExecutor
from .program import Program
from .schedule import Schedule

LEAST_SAMPLES, MOST_SAMPLES = 5, 30
SECONDS = 0.03  # of one measurement, after the warm-up
WARM_UP_RUNS = 2  # the first compile kernels, load them and let cuDNN choose its algorithms
COPIES = 10  # of the program in one CUDA Graph, so that the launch of the graph does not count

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

    def known(self, signature: str, measure: Callable[[], float]) -> float:
        """What `measure` gives, if it was not measured before."""
        name = sha256(signature.encode()).hexdigest()[:24]  # some are pages long
        if name not in self.cache:
            self.cache[name] = measure()
            self.taken += 1
        return float(self.cache[name])

    def close(self) -> None:
        """Write what is new."""
        self.cache.write()


@torch.no_grad()
def milliseconds(program: Program, groups: Groups | None = None) -> float:
    """Median time of `program` on its example inputs, groups of its operators at once, or all of them in one group.

    On a GPU by replaying a CUDA Graph of several copies of it, one after the other, so that no launch counts; on a CPU by
    calling it. Raises RuntimeError where an operator fails or cannot be captured.
    """
    if groups is None:
        groups = [range(len(program.graph))]
    for _ in range(WARM_UP_RUNS):
        program.run(program.examples)
    if program.device.type == "cuda":
        return _replayed(program, groups)
    if len(groups) == 1:
        return _sampled(lambda: program.run(program.examples))
    order = tuple(v for group in groups for v in group)
    stream = {v: s for s, group in enumerate(groups) for v in group}
    executor = CpuExecutor(program, Schedule(program.graph, "stage", order, tuple(stream[v] for v in sorted(order)), ()))
    try:
        return _sampled(lambda: executor(*program.examples))
    finally:
        executor.close()


def _sampled(call: Callable[[], Any]) -> float:
    samples: list[float] = []
    begin = perf_counter()
    while len(samples) < LEAST_SAMPLES or (perf_counter() - begin < SECONDS and len(samples) < MOST_SAMPLES):
        start = perf_counter()
        call()
        samples.append((perf_counter() - start) * 1e3)
    return median(samples)


def _replayed(program: Program, groups: Groups) -> float:
    device = program.device
    sides = [torch.cuda.Stream(device) for _ in groups]
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=sides[0]):
        kept = [_launched(program, groups, sides) for _ in range(COPIES)]
    graph.replay()
    samples: list[float] = []
    begin = perf_counter()
    while len(samples) < LEAST_SAMPLES or (perf_counter() - begin < SECONDS and len(samples) < MOST_SAMPLES):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / COPIES)
    del kept
    graph.reset()
    return median(samples)


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
