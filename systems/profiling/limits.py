"""How fast a model could run at all: its critical path, beside the time that its operators keep the device busy."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from torch import Tensor, nn

from systems.cache import JSON
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.graph.program import Program

from .profiler import host_times, launched

PASSES = 5


@dataclass(frozen=True)
class Limits:
    """Limits of every schedule of one program's operators, each operator at its own time alone.

    Args:
        critical_path_ms: The longest chain of dependent operators; no schedule of these kernels is faster.
        busy_ms: The sum over all operators; no schedule without concurrency is faster.
        operators: How many there are.
        kernels: Kernels and copies of one run; 0 on a CPU.
        width: The most operators of which none depends on another.
        source: "kernels", where an operator's time is that of its kernels and copies (on a GPU); "host", where it is that of
            its call (on a CPU).
    """

    critical_path_ms: float
    busy_ms: float
    operators: int
    kernels: int
    width: int
    source: str

    def to_json(self) -> dict[str, JSON]:
        return asdict(self)


def measure(module: nn.Module, inputs: tuple[Tensor, ...], program: Program | None = None) -> Limits:
    """Measure every operator of `module` alone, as medians over several runs, and from that the limits.

    Args:
        program: The module as captured, if that has been done.

    Raises:
        Unsupported: The module cannot be captured.
    """
    program = program or capture(module, inputs)
    if inputs[0].is_cuda:
        times, num_kernels = kernel_times(program, inputs)
        source = "kernels"
    else:
        times, num_kernels = host_times(program, inputs), 0
        source = "host"
    graph = program.graph
    return Limits(critical_path(graph, times), sum(times), len(graph), num_kernels, graph.width, source)


def critical_path(graph: OperatorGraph, times: Sequence[float]) -> float:
    """The largest sum of `times` (one an operator) along a chain of dependent operators.

    Invariant: finish[v] is the largest such sum along a chain that ends with v.
    """
    finish: list[float] = []
    for v, producers in enumerate(graph.predecessors):
        finish.append(times[v] + max((finish[u] for u in producers), default=0.0))
    return max(finish, default=0.0)


def kernel_times(program: Program, inputs: Sequence[Tensor]) -> tuple[list[float], int]:
    """Milliseconds of the kernels and copies that each operator launches, and how many all operators launch in one run."""
    passes = launched(program, inputs, PASSES)
    times = [median(sum(e.duration_us for e in events) / 1e3 for events in runs) for runs in zip(*passes, strict=True)]
    return times, sum(len(events) for launches in passes for events in launches) // PASSES
