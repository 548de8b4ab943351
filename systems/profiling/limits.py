"""How fast a model could run at all: its critical path, beside the time that its operators keep the device busy."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import chain
from math import ceil
from statistics import median

import torch
from torch import Tensor, nn

from systems.cache import JSON
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.graph.program import Input, Program

from .calibration import least_empty_graph_ms
from .intensity import bandwidth, num_bytes, tables_of
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
            faster, as far as waves take equally long and a full SM takes no further block. None on a CPU, as the two that
            follow.
        traffic_ms: What a call has to read from memory and write to it (`traffic`), at the bandwidth that a copy reaches.
        launch_ms: A CUDA Graph of as many kernels that do nothing, on the number of streams, 1 to `width`, on which it takes
            the least. None where there is no Triton.
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
    traffic_ms: float | None = None
    launch_ms: float | None = None

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
    graph = program.graph
    if not inputs[0].is_cuda:
        times = host_times(program, inputs)
        return Limits(critical_path(graph, times), sum(times), len(graph), 0, graph.width, "host")
    device = program.device
    passes = launched(program, inputs, PASSES)
    times, num_kernels = kernel_times(passes), sum(map(len, passes[0]))
    num_bytes_moved = traffic(module, program, torch.cuda.get_device_properties(device).L2_cache_size)
    return Limits(
        critical_path_ms=critical_path(graph, times),
        busy_ms=sum(times),
        operators=len(graph),
        kernels=num_kernels,
        width=graph.width,
        source="kernels",
        sm_area_ms=median(sm_area(_kernels(operators), capacity_of(device)) for operators in passes),
        traffic_ms=num_bytes_moved / bandwidth(device) * 1e3,
        launch_ms=least_empty_graph_ms(device, num_kernels, max(1, graph.width)) if find_spec("triton") else None,
    )


def traffic(module: nn.Module, program: Program, cache_bytes: int) -> int:
    """Bytes that a call has to read from memory and to write to it, whatever lies in the cache from the call before.

    Each weight that operators read, each input and each output counts once, and a table that they look up not at all: a call
    reads a few of its rows. What a pass has derived from weights is a weight. Memory that operators only pass on to each
    other may stay in the cache.

    Args:
        module: Whose weights the program reads.
        cache_bytes: That stay from one call to the next at most.
    """
    own = {id(t) for t in (*module.parameters(), *module.buffers(), *(d.tensor for d in program.derived.derived))}
    reads = {
        id(leaf): leaf
        for v, call in enumerate(program.calls)
        for leaf in call.leaves()
        if isinstance(leaf, Tensor) and id(leaf) in own and not any(leaf is table for table in tables_of(program, v))
    }
    read_inputs = {leaf.index for call in program.calls for leaf in call.leaves() if isinstance(leaf, Input)}
    outputs = {id(t): t for t in map(program.value, program.outputs) if isinstance(t, Tensor)}
    moved = [*reads.values(), *(program.examples[i] for i in read_inputs), *outputs.values()]
    return max(0, num_bytes(moved) - cache_bytes)


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

    A kernel holds of them what `held_share` says.
    """
    num_sms = capacity.num_multiprocessors
    return sum(k.milliseconds * held_share(k.num_blocks, max(1, capacity.resident_blocks(k)), num_sms) for k in kernels)


def held_share(num_blocks: int, on_one: int, num_sms: int) -> float:
    """The share of SMs that a kernel alone holds, 0 to 1: the mean over its waves, which take equally long.

    A wave holds as many SMs as its blocks fill, one beside the other as they fit: all of them but for the last wave.

    Args:
        num_blocks: Of the kernel; 0 of a copy, which holds no SM.
        on_one: Blocks that one SM holds at once.
        num_sms: Of the device.
    """
    full, left = divmod(num_blocks, on_one * num_sms)
    held, waves = full * num_sms + ceil(left / on_one), full + (left > 0)
    return held / (waves * num_sms) if waves else 0.0


def _kernels(operators: Sequence[Sequence[DeviceEvent]]) -> list[Kernel]:
    """The kernels of one pass, without its copies."""
    return [kernel_of_event(e) for e in chain.from_iterable(operators) if isinstance(e, KernelEvent)]


def kernel_times(passes: Sequence[Sequence[Sequence[DeviceEvent]]]) -> list[float]:
    """Milliseconds of the kernels and copies that each operator launches, the median over passes.

    Args:
        passes: What `launched` returns.
    """
    return [median(sum(e.duration_us for e in events) / 1e3 for events in runs) for runs in zip(*passes, strict=True)]
