"""How long a small program takes on its device, measured by itself."""

from statistics import median
from time import perf_counter

import torch

from .program import Program

LEAST_SAMPLES, MOST_SAMPLES = 5, 30
SECONDS = 0.05  # of one measurement, after the warm-up
WARM_UP_RUNS = 3  # the first compile kernels, load them and let cuDNN choose its algorithms
COPIES = 10  # of the program in one CUDA Graph, so that the launch of the graph does not count


@torch.no_grad()
def milliseconds(program: Program) -> float:
    """Median time of `program`, one operator after the other, on its example inputs.

    On a GPU by replaying a CUDA Graph of several copies of it, so that no launch counts; on a CPU by calling it. Raises
    RuntimeError where an operator fails or cannot be captured.
    """
    for _ in range(WARM_UP_RUNS):
        program.run(program.examples)
    return _replayed(program) if program.examples[0].is_cuda else _called(program)


def _called(program: Program) -> float:
    samples: list[float] = []
    begin = perf_counter()
    while len(samples) < LEAST_SAMPLES or (perf_counter() - begin < SECONDS and len(samples) < MOST_SAMPLES):
        start = perf_counter()
        program.run(program.examples)
        samples.append((perf_counter() - start) * 1e3)
    return median(samples)


def _replayed(program: Program) -> float:
    side = torch.cuda.Stream(program.examples[0].device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_RUNS):
            program.run(program.examples)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(COPIES):
            program.run(program.examples)
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
    graph.reset()
    return median(samples)
