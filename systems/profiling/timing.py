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

from conf.text import first_line
from systems.base import Unsupported
from systems.preparing import one_at_a_time, uncapturable
from systems.scheduling.execution.cpu_executor import CpuExecutor
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import Schedule

from .measurements import Measurements

MIN_SAMPLES, MAX_SAMPLES = 5, 30
SECONDS = 0.03  # of one measurement, after the warm-up
WARM_UP_RUNS = 2  # the first compile kernels, load them and let cuDNN choose its algorithms
MAX_COPIES = 10  # of the program in one CUDA Graph, so that the launch of the graph does not count
LONG_MS = 0.3  # a graph of this length hides its own launch

Groups = Sequence[Sequence[int]]  # of a program's operators: each group in order, the groups at once


class Timer:
    """Measures programs, each distinct one once: it keeps the times on disk, by the signatures of their operators.

    Args:
        device: On which the programs run.
        report: Told how many programs have been measured, after each.
    """

    def __init__(self, device: torch.device, report: Callable[[str], None] = lambda _: None):
        self.measurements, self.report = Measurements("times", device), report
        self.taken = 0  # measurements that this timer made

    def __call__(self, program: Program) -> float:
        """Milliseconds of `program`, its operators one after the other."""
        return self.known(_in_turn(program), lambda: milliseconds(program))

    def knows(self, program: Program) -> bool:
        """Is the time of `program` known, its operators one after the other? Its inputs may be on the meta device."""
        return self.find(_in_turn(program)) is not None

    def at_once(self, program: Program) -> float:
        """Milliseconds of `program`, whose operators do not depend on each other, each on a stream of its own."""
        signature = " | ".join(program.signature(v) for v in range(len(program.graph)))
        return self.known(signature, lambda: milliseconds(program, [[v] for v in range(len(program.graph))]))

    def known(self, signature: str, measure: Callable[[], float]) -> float:
        """The time of this signature: from the cache, else what `measure` returns."""
        name = name_of(signature)
        if name not in self.measurements:
            self.measurements[name] = measure()
            self.taken += 1
            self.report(f"measuring kernels: {self.taken} measured")
        return self.measurements.number(name)

    def find(self, signature: str) -> float | None:
        """The time of this signature from the cache, which this process or another wrote; None where it has none."""
        name = name_of(signature)
        return self.measurements.number(name) if name in self.measurements else None

    def close(self) -> None:
        """Write what is new, and give back the memory that was measured with."""
        self.measurements.write()
        _first_graph.cache_clear()


def _in_turn(program: Program) -> str:
    return "; ".join(program.signature(v) for v in range(len(program.graph)))


def name_of(signature: str) -> str:
    """What a time is kept under."""
    return sha256(signature.encode()).hexdigest()[:24]  # some are pages long


@torch.no_grad()
def milliseconds(
    program: Program,
    groups: Groups | None = None,
    seconds: float = SECONDS,
    warm_up_runs: int = WARM_UP_RUNS,
    least: float = 0.0,
) -> float:
    """Median time of `program` on its example inputs, each group of its operators on a stream of its own.

    On a GPU it replays a CUDA Graph of several copies of the program, one after the other, so that no launch counts. On a
    CPU it calls the program.

    Args:
        groups: All operators in one group where there is none.
        seconds: To go on for, within MIN_SAMPLES and MAX_SAMPLES.
        warm_up_runs: 0 where all of its operators have run in this process before.
        least: Milliseconds that it takes at least, if that is known: a long program needs fewer copies, and capturing them
            costs time.

    Raises:
        Unsupported: An operator fails on the examples, or it cannot be captured.
    """
    if groups is None:
        groups = [range(len(program.graph))]
    rewind = program.rewinding()  # timed with the program, since copies of it follow each other: of a few bytes, if of any

    def run() -> None:
        program.run(program.examples)
        rewind()

    try:
        for _ in range(warm_up_runs):
            run()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:  # such as of weights to draw by that are negative
        raise Unsupported(f"an operator fails on random inputs, so it cannot be measured: {first_line(error)}") from error
    if program.device.type == "cuda":
        return _replayed(program, groups, seconds, min(max(ceil(LONG_MS / least), 1), MAX_COPIES) if least else MAX_COPIES)
    if len(groups) == 1:
        return _sampled(run, seconds)
    order = tuple(v for group in groups for v in group)
    stream = {v: s for s, group in enumerate(groups) for v in group}
    executor = CpuExecutor(program, Schedule(program.graph, "stage", order, tuple(stream[v] for v in sorted(order)), ()))
    try:
        return _sampled(lambda: (executor(*program.examples), rewind()), seconds)
    finally:
        executor.close()


def _sampled(call: Callable[[], Any], seconds: float) -> float:
    samples: list[float] = []
    begin = perf_counter()
    while len(samples) < MIN_SAMPLES or (perf_counter() - begin < seconds and len(samples) < MAX_SAMPLES):
        start = perf_counter()
        call()
        samples.append((perf_counter() - start) * 1e3)
    return median(samples)


def _replayed(program: Program, groups: Groups, seconds: float, copies: int) -> float:
    device, rewind = program.device, program.rewinding()
    graph = torch.cuda.CUDAGraph()
    # Not by `with torch.cuda.graph`, which empties the allocator's cache: the next of thousands of stages wants it filled.
    with one_at_a_time:
        sides = [stream.torch for stream in _sides(device).take([False] * len(groups))]  # waits for the device
        first = _first_graph(device)
        with torch.cuda.stream(sides[0]):
            graph.capture_begin(pool=first.pool(), capture_error_mode="thread_local")
            try:
                outputs = [_launched(program, groups, sides, rewind) for _ in range(copies)]
            except RuntimeError as error:
                raise uncapturable(error, "a part of it") from error
            finally:
                graph.capture_end()
    # The first launch uploads the graph: its time is too long, and the number of samples that follows from it too small.
    first_ms = _between(graph, 1)[0]
    count = min(max(round(seconds * 1e3 / max(first_ms, 1e-3)), MIN_SAMPLES), MAX_SAMPLES)
    samples = [elapsed / copies for elapsed in _between(graph, count)]
    del outputs
    graph.reset()
    return median(samples)


def _between(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Milliseconds of each of `count` replays.

    All are launched before the first wait, so that each replay but the first begins with its launch over.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    events[-1].synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(events)]


@cache
def _sides(device: torch.device) -> Any:
    """Streams that are the same ones every time: the allocator keeps free memory by stream."""
    from systems.scheduling.execution.cuda_streams import Streams  # CUDA's bindings: PyTorch for a CPU comes without

    return Streams(device)


@cache
def _first_graph(device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph whose memory pool all other graphs allocate from, one after the other.

    A pool lasts as long as one of its graphs. torch cannot use its pool of pinned memory again once that pool is gone.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=_sides(device).take([False])[0].torch, capture_error_mode="thread_local"):
        torch.zeros(1, device=device)  # torch warns of an empty graph
    return graph


def _launched(program: Program, groups: Groups, sides: Sequence[torch.cuda.Stream], rewind: Callable[[], None]) -> list[Any]:
    """Launch the groups, each on a stream, join them on the first stream, and rewind the program there.

    The outputs it returns have to outlive the capture: else one stream could write memory that another still reads (WAR).
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
    rewind()
    return values
