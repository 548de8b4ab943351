"""Where each buffer of a schedule lies in one arena, reused across streams only where happens-before allows it."""

from collections.abc import Sequence
from dataclasses import dataclass

from systems.scheduling.plans.verify import Buffer

ALIGNMENT = 512  # bytes; what torch's allocator gives, and cuDNN's fastest kernels need at most 256


@dataclass(frozen=True)
class Request:
    """Memory that one operator asks for.

    Args:
        size: In bytes.
        writer: The operator.
        touched: Bit mask of the operators that read or write it, the writer among them.
        outlives_run: It holds an output of the model.
    """

    size: int
    writer: int
    touched: int
    outlives_run: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """Where each request lies in one arena.

    Args:
        buffers: By request.
        size: Of the arena, in bytes.
        keep_all: What no reuse would need, in bytes.
    """

    buffers: tuple[Buffer, ...]
    size: int
    keep_all: int


def plan_memory(requests: Sequence[Request], happens_before: Sequence[int]) -> MemoryPlan:
    """Place the largest request first, each at the lowest address where no request of an overlapping live range lies.

    Invariant: two requests share bytes only where all operators that touch the one end before the other's writer begins.
    The problem is interval colouring over a partial order, which is NP-hard; greedy by size is its usual heuristic.

    Args:
        requests: To place.
        happens_before: For each operator a bit mask of those that end before it begins (Schedule.happens_before).
    """
    placed: list[Buffer] = []  # by start
    buffers: list[Buffer | None] = [None] * len(requests)
    size = 0
    for i in sorted(range(len(requests)), key=lambda i: (-requests[i].size, requests[i].writer)):
        request = requests[i]
        need = _aligned(request.size)
        before_writer = happens_before[request.writer]
        start = 0
        for other in placed:
            if other.start >= start + need:
                break
            end = other.start + other.size
            if end <= start:
                continue
            reusable = (not other.outlives_run and not other.touched & ~before_writer) or (
                not request.outlives_run and not request.touched & ~happens_before[other.writer]
            )
            if not reusable:
                start = end
        buffer = Buffer(start, need, request.writer, request.touched, request.outlives_run)
        buffers[i] = buffer
        size = max(size, start + need)
        _insert(placed, buffer)
    keep_all = sum(_aligned(r.size) for r in requests)
    return MemoryPlan(tuple(b for b in buffers if b is not None), size, keep_all)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _insert(placed: list[Buffer], buffer: Buffer) -> None:
    low, high = 0, len(placed)
    while low < high:
        middle = (low + high) // 2
        if placed[middle].start < buffer.start:
            low = middle + 1
        else:
            high = middle
    placed.insert(low, buffer)
