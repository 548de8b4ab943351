"""Makes torch's operators put their outputs and workspaces where a memory plan says.

An operator allocates inside its kernel's C++ code, so the only way to choose its addresses is to be the allocator. Each
operator runs under a torch.cuda.MemPool of its own whose memory comes from a callback; the pool does not split what it is
given, so every request that the caching allocator cannot serve from a block that this same operator has freed reaches the
callback. What an operator will ask for is known from a recorded run.
"""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .memory_plan import Request
from .program import Program

# How torch's caching allocator sizes what it asks its source for (c10/core/AllocatorConfig.h).
SMALL_REQUEST, SMALL_SEGMENT = 1 << 20, 2 << 20
LARGE_REQUEST, LARGE_SEGMENT = 10 << 20, 20 << 20
SEGMENT_ROUNDING = 2 << 20
MARKER = 1_000_003  # bytes; a size that no operator asks for marks the end of an operator in the allocator's trace


class AllocationMismatch(RuntimeError):
    """An operator asked for other memory than in the recorded run."""


@dataclass(frozen=True)
class Segment:
    """Memory that one operator asks its pool for: `size` bytes are used of the `segment` bytes that torch believes in.

    storage: the number of the output storage that lies in it, or None for a workspace.
    """

    size: int
    segment: int
    storage: int | None


def segment_size(size: int) -> int:
    """The bytes that the caching allocator asks its source for to serve a request of `size` bytes."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < LARGE_REQUEST:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING


def storages(value: Any) -> list[int]:
    """The addresses of the distinct storages of an operator's output."""
    tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.numel()]
    return list(dict.fromkeys(t.untyped_storage().data_ptr() for t in tensors))


def release_workspaces() -> None:
    """Give back cuBLAS's workspaces, one per stream that ran a matrix product: 32 MiB each on Hopper.

    Doing so after every operator makes the workspace a part of what that operator asks for, planned like everything else.
    """
    torch._C._cuda_clearCublasWorkspaces()


def record_requests(program: Program, inputs: Sequence[Tensor]) -> tuple[list[list[Segment]], list[Request]]:
    """Run `program` once and record what memory each operator asks for.

    Returns the segments of each operator in the order of asking, and one request for every segment of every operator, in
    the same order. A view's consumers count as consumers of the memory that it looks into. Must run after a warm-up, so
    that cuDNN has made its choice of algorithms, and under stream capture, since that is how the operators will run. Raises AllocationMismatch if the allocator's trace cannot be read.
    """
    device = inputs[0].device
    n = len(program.graph)
    aliases: list[set[int]] = [set() for _ in range(n)]  # storages (by number) that operator v's output looks into
    live: dict[int, int] = {}  # address -> number of the storage that lies there now
    outputs: list[list[tuple[int, int]]] = [[] for _ in range(n)]  # (address, number) of new storages
    count = 0

    def each(v: int, value: Any) -> None:
        nonlocal count
        inherited = set().union(*(aliases[u] for u in program.graph.predecessors[v]))
        for address in storages(value):
            if address in live and live[address] in inherited:
                aliases[v].add(live[address])
            else:  # of this operator, or a parameter or input, which no allocation in the trace will match
                live[address] = count
                outputs[v].append((address, count))
                aliases[v].add(count)
                count += 1
        release_workspaces()
        torch.empty(MARKER, dtype=torch.uint8, device=device)

    release_workspaces()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=200 * n + 1000)
    try:
        torch.empty(MARKER, dtype=torch.uint8, device=device)
        result = program.run(inputs, each)
        del result
        trace = torch.cuda.memory._snapshot(device)["device_traces"][device.index or 0]
    finally:
        torch.cuda.memory._record_memory_history(None)
    windows = _windows(trace, n)
    segments = [_segments(window, dict(outputs[v])) for v, window in enumerate(windows)]

    touched = [0] * count
    kept = [False] * count
    for v in range(n):
        for u in (*program.graph.predecessors[v], v):
            for storage in aliases[u]:
                touched[storage] |= 1 << v
    for v in program.kept_operators():
        for storage in aliases[v]:
            kept[storage] = True
    requests = [
        Request(s.size, v, 1 << v, False) if s.storage is None else Request(s.size, v, touched[s.storage], kept[s.storage])
        for v, asked in enumerate(segments)
        for s in asked
    ]
    return segments, requests


def _windows(trace: Sequence[dict[str, Any]], n: int) -> list[list[tuple[str, int, int]]]:
    """Split the allocator's trace into one list of (action, address, size) an operator."""
    windows: list[list[tuple[str, int, int]]] = []
    current: list[tuple[str, int, int]] = []
    marker = -1
    for event in trace:
        action, address, size = event["action"], event["addr"], event["size"]
        if action == "alloc" and size == MARKER:
            windows.append(current)
            current, marker = [], address
        elif action == "alloc" or (action == "free_completed" and address != marker):
            current.append((action, address, size))
    if len(windows) != n + 1:
        raise AllocationMismatch(f"the allocator's trace shows {len(windows) - 1} operators of {n}")
    return windows[1:]


def _segments(window: Sequence[tuple[str, int, int]], outputs: dict[int, int]) -> list[Segment]:
    """What a pool that serves only this operator asks its source for.

    The pool serves a request from the smallest block of its kind (small or large) that this operator has freed and that
    is large enough; such a block is then used by several requests and must hold the largest of them.
    """
    blocks: list[dict[str, Any]] = []  # one a segment
    by_address: dict[int, dict[str, Any]] = {}
    for action, address, size in window:
        if action == "alloc":
            small = size <= SMALL_REQUEST
            free = [b for b in blocks if b["free"] and b["small"] == small and b["segment"] >= size]
            if free:
                block = min(free, key=lambda b: b["segment"])
                block["size"] = max(block["size"], size)
            else:
                block = {"size": size, "segment": segment_size(size), "small": small}
                blocks.append(block)
            block["free"], block["address"] = False, address
            by_address[address] = block
        elif address in by_address:
            by_address.pop(address)["free"] = True
    for block in blocks:
        block["storage"] = None if block["free"] else outputs.get(block["address"])
    return [Segment(b["size"], b["segment"], b["storage"]) for b in blocks]


class _Source:
    """Where the pools' memory comes from: two callbacks that torch may call for as long as the process lives."""

    def __init__(self) -> None:
        self.state = threading.local()  # .allocator: the PlannedAllocator that this thread is running an operator under
        allocate_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        free_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        self.callbacks = (allocate_type(self._allocate), free_type(lambda *_: None))
        self.addresses = [ctypes.cast(c, ctypes.c_void_p).value or 0 for c in self.callbacks]

    def pool(self) -> Any:
        """A pool with a torch allocator of its own, since one of them may hand out each address only once."""
        return torch.cuda.MemPool(torch._C._cuda_customAllocator(self.addresses[0], self.addresses[1]), no_split=True)

    def _allocate(self, size: int, _device: int, _stream: int | None) -> int:
        current: PlannedAllocator = self.state.allocator
        i = len(current.served)
        current.served.append(size)
        # Null makes torch raise out of memory, which PlannedAllocator.operator turns into the reason.
        return current.expected[i][1] if i < len(current.expected) and current.expected[i][0] == size else 0


@cache
def _source() -> _Source:
    return _Source()


class PlannedAllocator:
    """Serves operators from planned addresses: `with allocator.operator(name, segments, addresses): run it`.

    The pools, and so torch's belief that they hold memory, last until `close`: emptying one during capture would not do.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.expected: list[tuple[int, int]] = []  # (segment bytes, address), in the order of asking
        self.served: list[int] = []
        self.pools: list[Any] = []

    @contextmanager
    def operator(self, name: str, segments: Sequence[Segment], addresses: Sequence[int]) -> Iterator[None]:
        """Within, what this thread allocates lies at `addresses`. Raises AllocationMismatch for any other request."""
        self.expected = [(s.segment, a) for s, a in zip(segments, addresses, strict=True)]
        self.served = []
        self.pools.append(_source().pool())
        _source().state.allocator = self
        planned = [size for size, _ in self.expected]
        mismatch = f"{name} asks for segments of %s bytes, in the recorded run for {planned}"
        try:
            with torch.cuda.use_mem_pool(self.pools[-1], self.device):
                yield
                release_workspaces()
        except torch.cuda.OutOfMemoryError as error:
            raise AllocationMismatch(mismatch % self.served) from error
        if self.served != planned:
            raise AllocationMismatch(mismatch % self.served)

    def close(self) -> None:
        self.pools.clear()
