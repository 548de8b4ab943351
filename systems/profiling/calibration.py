"""What launches, edges, blocks and bytes cost on this GPU, measured by kernels that do nothing else.

Each probe is a small graph of kernels, captured once and replayed back to back; its time is the median between the events of
two replays. Nothing here interprets the times: `systems.scheduling.simulate` takes its constants from them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations_with_replacement, pairwise
from statistics import median
from typing import Any

import torch

from systems.cache import JSON

WARPS, ELEMENTS = 4, 128  # of a block that spins: one element a thread
BUSY_ELEMENTS = 1024  # of a block that multiplies: eight a thread
COPY_ELEMENTS = 1024
REPLAYS = 15
SHORT, LONG = 1000, 3000  # passes of a spinning kernel, of some four cycles each

Kernel = Callable[[], object]  # launches one kernel on torch's current stream
Levels = Sequence[Sequence[Kernel]]  # the kernels of a level run at once, after all of the level before


@dataclass(frozen=True)
class Probe:
    """One graph.

    Args:
        name: Of the kind.
        sizes: What tells it from others of its kind.
        microseconds: Of a replay, the median.
        kernels: In the graph.
    """

    name: str
    sizes: dict[str, float]
    microseconds: float
    kernels: int

    def to_json(self) -> dict[str, JSON]:
        return {**asdict(self), "sizes": {**self.sizes}}


@dataclass(frozen=True)
class _Graph:
    """What a probe is before it is measured: chains of levels that run beside each other."""

    name: str
    sizes: dict[str, float]
    chains: Sequence[Levels]


def calibrate(device: torch.device, report: Callable[[str], None] = lambda _: None) -> list[Probe]:
    """Every probe on a GPU."""
    probes: list[Probe] = []
    for graph in _graphs(device):
        if not probes or probes[-1].name != graph.name:
            report(f"measuring {graph.name}")
        kernels = sum(len(level) for chain in graph.chains for level in chain)
        probes.append(Probe(graph.name, graph.sizes, _replayed_us(device, graph.chains), kernels))
    return probes


def empty_graph_ms(device: torch.device, num_kernels: int, num_streams: int) -> float:
    """Of a replay of a graph of so many kernels that do nothing, in chains of equal length beside each other.

    Args:
        num_kernels: 0 takes no time.
        num_streams: Chains, at most.
    """
    if not num_kernels:
        return 0.0
    from systems.kernels import probes  # Triton, which is absent where there is no GPU

    out = torch.empty(ELEMENTS, device=device)
    level = [lambda: probes.spin[(1,)](out, 0, ELEMENTS=ELEMENTS, num_warps=WARPS)]
    count = min(num_streams, num_kernels)
    lengths = [num_kernels // count + (i < num_kernels % count) for i in range(count)]
    return _replayed_us(device, [[level] * length for length in lengths]) / 1e3


def least_empty_graph_ms(device: torch.device, num_kernels: int, width: int) -> float:
    """As `empty_graph_ms`, the least of 1, 2, 4 and so on chains up to `width`: wide graphs may launch more slowly."""
    numbers = {*(1 << i for i in range(width.bit_length())), width}
    return min(empty_graph_ms(device, num_kernels, number) for number in sorted(numbers))


def _graphs(device: torch.device) -> Iterator[_Graph]:
    from systems.kernels import probes  # Triton, which is absent where there is no GPU

    sms = torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.empty(BUSY_ELEMENTS, device=device)

    def spin(blocks: int, passes: int, elements: int = ELEMENTS) -> Kernel:
        return lambda: probes.spin[(blocks,)](out, passes, ELEMENTS=elements, num_warps=WARPS)

    def copy(blocks: int, count: int, place: int = 0) -> Kernel:
        source, target = buffers[2 * place : 2 * place + 2]
        return lambda: probes.copy[(blocks,)](source, target, count, ELEMENTS=COPY_ELEMENTS, num_warps=WARPS)

    for n in (1, 2, 4, 16, 64, 256, 1024):
        yield _Graph("chain", {"kernels": n}, [[[spin(1, 0)]] * n])
    for passes in (SHORT, LONG):
        for n in (1, 2, 16, 64):
            yield _Graph("long chain", {"kernels": n, "passes": passes}, [[[spin(1, passes)]] * n])
    for width in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64):
        for passes in (0, LONG):
            # One kernel, then `width` at once, in turn: each step forks and joins.
            fan = [[spin(1, passes)], [spin(1, passes)] * width] * 16
            yield _Graph("fork and join", {"width": width, "passes": passes}, [fan])
        if width > 1:
            yield _Graph("all to all", {"width": width, "passes": LONG}, [[[spin(1, LONG)] * width] * 16])
        for passes in (0, SHORT, LONG):
            chain = [[spin(1, passes)]] * 32
            yield _Graph("chains beside each other", {"width": width, "passes": passes}, [chain] * width)
    for blocks in (1, sms // 2, sms, sms + 1, 2 * sms, 4 * sms, 8 * sms, 16 * sms, 17 * sms, 32 * sms, 64 * sms):
        for passes in (SHORT, LONG):
            yield _Graph("waves", {"blocks": blocks, "passes": passes}, [[[spin(blocks, passes)]] * 8])
        busy = [[spin(blocks, SHORT, BUSY_ELEMENTS)]] * 8
        yield _Graph("arithmetic", {"blocks": blocks, "passes": SHORT}, [busy])
    for blocks in (1, 1024, 4096, 16384, 65536):
        yield _Graph("empty blocks", {"blocks": blocks}, [[[spin(blocks, 0)]] * 8])

    largest = 1 << 28
    buffers = [torch.zeros(largest // 4, device=device) for _ in range(8)]  # [num_floats] each, in pairs
    for num_bytes in (1 << p for p in range(14, 29)):
        blocks = min(-(-num_bytes // 4 // COPY_ELEMENTS), 16 * sms)
        yield _Graph("copy warm", {"bytes": num_bytes, "blocks": blocks}, [[[copy(blocks, num_bytes // 4)]] * 8])
    for num_bytes in (1 << 24, 1 << 26, 1 << 28):
        levels = [[copy(16 * sms, num_bytes // 4, i % 4)] for i in range(8)]
        yield _Graph("copy cold", {"bytes": num_bytes, "blocks": 16 * sms}, [levels])
    for blocks in (1, 4, 16, sms // 4, sms // 2, sms, 2 * sms, 4 * sms, 8 * sms):
        for num_bytes in (1 << 22, 1 << 27):
            levels = [[copy(blocks, num_bytes // 4, i % 4 if num_bytes > 1 << 24 else 0)] for i in range(4)]
            yield _Graph("copy by few blocks", {"bytes": num_bytes, "blocks": blocks}, [levels])
    yield from _pairs(sms, spin, copy)


def _pairs(sms: int, spin: Callable[..., Kernel], copy: Callable[..., Kernel]) -> Iterator[_Graph]:
    """Every two of a few kernels at once, and each alone; the sizes name them by their places in this list."""
    kinds: list[tuple[Any, ...]] = [
        *((spin, blocks, LONG) for blocks in (1, sms // 2, sms, 8 * sms, 20 * sms)),
        *((spin, blocks, SHORT, BUSY_ELEMENTS) for blocks in (sms // 2, sms, 8 * sms, 20 * sms)),
        *((copy, blocks, 1 << 20) for blocks in (sms // 2, 2 * sms, 8 * sms)),
        *((copy, blocks, 1 << 24) for blocks in (sms // 2, 2 * sms, 8 * sms)),
    ]
    for i, (make, *sizes) in enumerate(kinds):
        yield _Graph("alone", {"first": i}, [[[make(*sizes)]] * 8])
    for i, j in combinations_with_replacement(range(len(kinds)), 2):
        first, second = kinds[i], kinds[j]
        # Two copies have buffers of their own.
        other = (*second[1:], 1) if second[0] is copy else second[1:]
        yield _Graph("pair", {"first": i, "second": j}, [[[first[0](*first[1:]), second[0](*other)]] * 8])


@torch.no_grad()
def _replayed_us(device: torch.device, chains: Sequence[Levels]) -> float:
    """Microseconds of a replay of chains that run beside each other, the median over replays back to back."""
    from systems.scheduling.execution.cuda_streams import Streams

    distinct = {id(kernel): kernel for chain in chains for level in chain for kernel in level}
    for kernel in distinct.values():
        kernel()  # compiled and loaded before the capture
    streams = Streams(device)
    widths = [max(map(len, levels)) for levels in chains]
    sides = [stream.torch for stream in streams.take([False] * sum(widths))]
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=sides[0], capture_error_mode="thread_local"):
            _launch(chains, widths, sides)
        graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        graph.replay()
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        events[-1].synchronize()
        return median(begin.elapsed_time(end) for begin, end in pairwise(events)) * 1e3
    finally:
        graph.reset()
        streams.close()


def _launch(chains: Sequence[Levels], widths: Sequence[int], sides: Sequence[torch.cuda.Stream]) -> None:
    """Launch chains on streams of their own; every kernel of a level waits for every kernel of the level before."""
    for side in sides[1:]:
        side.wait_stream(sides[0])
    own_sides = iter(sides)
    for levels, width in zip(chains, widths, strict=True):
        own = [next(own_sides) for _ in range(width)]
        before: list[tuple[int, torch.cuda.Event]] = []
        for level in levels:
            events = []
            for i, kernel in enumerate(level):
                for j, event in before:
                    if j != i:
                        own[i].wait_event(event)
                with torch.cuda.stream(own[i]):
                    kernel()
                if len(level) > 1 or width > 1:
                    events.append((i, own[i].record_event()))
            before = events
    for side in sides[1:]:
        sides[0].wait_stream(side)
