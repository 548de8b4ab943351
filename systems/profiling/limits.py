"""How fast a model could run at all: its critical path, beside the time that its operators keep the device busy."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from math import ceil
from statistics import median

from torch import Tensor, nn

from systems.cache import JSON
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.graph.program import Program

from .profile import Capacity, Kernel
from .profiler import capacity_of, host_times, kernel_of_event, launched
from .trace import DeviceEvent, KernelEvent

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
        sm_area_ms: The sum over kernels of the share of SMs that it holds, at its own time: no schedule of these kernels is
            faster, as far as a full SM takes no further block. None on a CPU.
        source: "kernels", where an operator's time is that of its kernels and copies (on a GPU); "host", where it is that of
            its call (on a CPU).
    """

    critical_path_ms: float
    busy_ms: float
    operators: int
    kernels: int
    width: int
    source: str
    sm_area_ms: float | None = None

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
        passes = launched(program, inputs, PASSES)
        times, num_kernels, source = kernel_times(passes), sum(map(len, passes[0])), "kernels"
        area_ms = median(sm_area(_kernels(operators), capacity_of(program.device)) for operators in passes)
    else:
        times, num_kernels, source, area_ms = host_times(program, inputs), 0, "host", None
    graph = program.graph
    return Limits(critical_path(graph, times), sum(times), len(graph), num_kernels, graph.width, source, area_ms)


def critical_path(graph: OperatorGraph, times: Sequence[float]) -> float:
    """The largest sum of `times` (one an operator) along a chain of dependent operators.

    Invariant: finish[v] is the largest such sum along a chain that ends with v.
    """
    finish: list[float] = []
    for v, producers in enumerate(graph.predecessors):
        finish.append(times[v] + max((finish[u] for u in producers), default=0.0))
    return max(finish, default=0.0)


def sm_area(kernels: Iterable[Kernel], capacity: Capacity) -> float:
    """Milliseconds of a device whose SMs are all held, as long as these kernels hold some of them, added up.

    A kernel holds as many SMs as its blocks fill, one beside the other as they fit, and all where there are more.
    """
    area_ms = 0.0
    for kernel in kernels:
        num_held = ceil(kernel.num_blocks / max(1, capacity.resident_blocks(kernel)))
        area_ms += kernel.milliseconds * min(1.0, num_held / capacity.num_multiprocessors)
    return area_ms


def _kernels(operators: Sequence[Sequence[DeviceEvent]]) -> list[Kernel]:
    """The kernels of one pass, without its copies."""
    return [kernel_of_event(e) for e in chain.from_iterable(operators) if isinstance(e, KernelEvent)]


def kernel_times(passes: Sequence[Sequence[Sequence[DeviceEvent]]]) -> list[float]:
    """Milliseconds of the kernels and copies that each operator launches, the median over passes.

    Args:
        passes: What `launched` returns.
    """
    return [median(sum(e.duration_us for e in events) / 1e3 for events in runs) for runs in zip(*passes, strict=True)]
