"""Makes torch's operators put their outputs and scratch memory where a memory plan says.

An operator allocates inside its kernel's C++ code, so the only way to choose its addresses is to be the allocator. Each
operator runs under a torch.cuda.MemPool of its own whose memory comes from a callback, and which does not split what it is
given: every request that the pool cannot serve from what this same operator has freed reaches the callback. A first run
under capture records what each operator asks for; what comes of that is planned; the second run is given those addresses.

Where an operator has freed several segments of one size, torch serves its next request from the one at the lowest address,
which need not be the same one in both runs. Such segments are planned as if each were all of them.
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

from systems.base import Unsupported
from systems.preparing import uncapturable
from systems.scheduling.graph.program import Program

from .cuda_streams import ProductWatch, Stream
from .memory_plan import ALIGNMENT, Request

REQUESTS = 64  # of an operator, on the average, at most
SPARE = 128 << 20  # bytes of scratch beyond a whole run's: an operator may ask for more under capture


class AllocationMismatch(RuntimeError):
    """An operator asked for other memory than in the recorded run."""


def refusal(error: RuntimeError, what: str = "it") -> RuntimeError | Unsupported:
    """As `uncapturable`; memory that was asked for otherwise is no reason either."""
    return error if isinstance(error, AllocationMismatch) else uncapturable(error, what)


class PoolAllocator:
    """Serves operators from chosen addresses: `with allocator.operator(name, segments): run it`.

    The pools last until `close`, and with them torch's belief that they hold memory: a capture must not see one emptied.

    Args:
        device: On which the operators run.
        scratch: Bytes to serve operators without chosen addresses from. Each request begins at the next multiple of
            ALIGNMENT, so that requests overlap. That is for runs under capture whose graph never runs.
        requests: At most, of all operators without chosen addresses.
    """

    def __init__(self, device: torch.device, scratch: int = 0, requests: int = 0):
        self.device = device
        self.chosen: Sequence[tuple[int, int]] | None = None  # (segment bytes, address) in the order of asking
        self.served: list[tuple[int, int]] = []
        self.pools: list[Any] = []
        self.scratch = (
            torch.empty(scratch + ALIGNMENT * (requests + 1), dtype=torch.uint8, device=device) if scratch else None
        )
        self.next, self.end = 0, 0
        if self.scratch is not None:
            self.next = self.scratch.data_ptr() + ALIGNMENT
            self.end = self.scratch.data_ptr() + self.scratch.numel()

    @contextmanager
    def operator(self, name: str, chosen: Sequence[tuple[int, int]] | None = None) -> Iterator[list[tuple[int, int]]]:
        """Within, what this thread allocates lies at chosen addresses.

        Args:
            name: Of the operator, for messages.
            chosen: Its segments as (bytes, address), in the order of its requests; None for scratch memory.

        Yields:
            The segments that have been served.

        Raises:
            AllocationMismatch: The operator's requests are others than the chosen ones.
        """
        self.chosen, self.served = chosen, []
        self.pools.append(_source().pool())
        _source().current.allocator = self
        try:
            with torch.cuda.use_mem_pool(self.pools[-1], self.device):
                yield self.served
        except torch.cuda.OutOfMemoryError as error:
            raise AllocationMismatch(self._mismatch(name)) from error
        if chosen is not None and len(self.served) != len(chosen):
            raise AllocationMismatch(self._mismatch(name))

    def close(self) -> None:
        """Give up the pools. torch ends the process where it knows of a capture meanwhile."""
        self.pools.clear()

    def serve(self, size: int) -> int:
        """The address of a segment of `size` bytes. It is 0 where there is none, on which torch raises out of memory."""
        if self.chosen is None:
            address = self.next if self.next + size <= self.end else 0
            self.next += ALIGNMENT
        else:
            i = len(self.served)
            address = self.chosen[i][1] if i < len(self.chosen) and self.chosen[i][0] == size else 0
        self.served.append((size, address))
        return address

    def _mismatch(self, name: str) -> str:
        recorded = "scratch" if self.chosen is None else [size for size, _ in self.chosen]
        return f"{name} asks for {[size for size, _ in self.served]} bytes, planned from the recorded run are {recorded}"


class _Source:
    """Where the pools' memory comes from: two callbacks that torch may call for as long as the process lives."""

    def __init__(self) -> None:
        self.current = threading.local()  # .allocator: the PoolAllocator that this thread runs an operator under
        allocate_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        free_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        self.callbacks = (
            allocate_type(lambda size, _device, _stream: self.current.allocator.serve(size)),
            free_type(lambda *_: None),
        )
        self.addresses = [ctypes.cast(c, ctypes.c_void_p).value or 0 for c in self.callbacks]

    def pool(self) -> Any:
        """A pool with a torch allocator of its own, since one of them may hand out each address only once."""
        return torch.cuda.MemPool(torch._C._cuda_customAllocator(self.addresses[0], self.addresses[1]), no_split=True)


@cache
def _source() -> _Source:
    return _Source()


@dataclass(frozen=True)
class Recorded:
    """What memory the operators of a program ask for.

    Args:
        segments: For each operator the bytes of its segments, in the order of its requests.
        requests: One for every segment of every operator, in the same order, with the bytes that are used of it.
        looks_into: For each operator the places in `requests` of the segments that its output may lie in. Such a segment is
            its own or another operator's.
        has_product: For each operator whether it used cuBLAS, whose workspace is none of these segments.
    """

    segments: list[list[int]]
    requests: list[Request]
    looks_into: list[list[int]]
    has_product: list[bool]


@torch.no_grad()
def record_requests(program: Program, inputs: Sequence[Tensor], allocator: PoolAllocator, stream: Stream) -> Recorded:
    """Run `program` once, under capture of `stream`, and record what memory each operator asks for.

    A view's consumers count as consumers of the memory that it looks into. A warm-up comes before, in which cuDNN has chosen
    its algorithms.

    Args:
        program: To record.
        inputs: Of the shapes that calls will have.
        allocator: With scratch memory for what any single operator asks for.
        stream: The current one; it has a workspace.

    Raises:
        AllocationMismatch: The scratch memory is too small.
        Unsupported: An operator cannot be captured.
    """
    device, n = inputs[0].device, len(program.graph)
    values: list[Any] = [None] * n
    last = program.last_consumers()
    served: list[tuple[int, int]] = []  # (operator, bytes)
    number: dict[int, int] = {}  # address -> its place in `served`; none is served twice
    looks_into: list[list[int]] = []
    has_product: list[bool] = []
    watch = ProductWatch(stream)
    with _allocation_history(1000 * n + 10_000):
        for v in range(n):
            watch.begin()
            with allocator.operator(program.graph.label(v)) as segments:
                try:
                    values[v] = program.execute(v, values, inputs)
                except RuntimeError as error:
                    raise refusal(error, f"operator {program.graph.label(v)}") from error
            has_product.append(watch.has_product())
            for size, address in segments:
                if not address:  # also where the operator made do without: cuDNN takes another algorithm then
                    raise AllocationMismatch(f"{program.graph.label(v)} asks for {size} bytes, more than the scratch memory")
                number[address] = len(served)
                served.append((v, size))
            looks_into.append([number[a] for a in storages(values[v]) if a in number])
            for u in last[v]:
                values[u] = None
        trace = torch.cuda.memory._snapshot(device)["device_traces"][stream.device.index]
    values.clear()
    events = _events_of(trace, number)
    alike = interchangeable(served, events)
    used = [0] * len(served)
    for action, i, size in events:
        if action == "alloc":
            used[i] = max(used[i], size)
    touched = [1 << v for v, _ in served]
    outlives_run = [False] * len(served)
    for v in range(n):
        for u in (*program.graph.producers[v], v):
            for i in looks_into[u]:
                touched[i] |= 1 << v
    for v in program.kept_operators():
        for i in looks_into[v]:
            outlives_run[i] = True
    requests = []
    for i, (v, _) in enumerate(served):
        mask = 0
        for j in alike[i]:
            mask |= touched[j]
        requests.append(Request(max(used[j] for j in alike[i]), v, mask, any(outlives_run[j] for j in alike[i])))
    sizes: list[list[int]] = [[] for _ in range(n)]
    for v, size in served:
        sizes[v].append(size)
    into = [sorted({j for i in places for j in alike[i]}) for places in looks_into]
    return Recorded(sizes, requests, into, has_product)


@contextmanager
def _allocation_history(max_entries: int) -> Iterator[None]:
    """Within, torch records what its allocator does; a record that the host process keeps goes on."""
    if torch._C._cuda_isHistoryEnabled():
        yield
        return
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=max_entries)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None)


def _events_of(trace: Sequence[dict[str, Any]], number: dict[int, int]) -> list[tuple[str, int, int]]:
    """(action, number, bytes) of the allocator's events at these addresses, since each of them became a segment.

    Raises:
        RuntimeError: the host process keeps a record of its own, which is too short for this.
    """
    first = {e["addr"]: i for i, e in enumerate(trace) if e["action"] == "segment_alloc" and e["addr"] in number}
    if len(first) < len(number):
        raise RuntimeError("torch's record of allocations, which this process keeps, is too short: raise its max_entries")
    return [
        (e["action"], number[e["addr"]], e["size"])
        for i, e in enumerate(trace)
        if e.get("addr") in number and i >= first[e["addr"]]
    ]


def interchangeable(served: Sequence[tuple[int, int]], events: Sequence[tuple[str, int, int]]) -> list[list[int]]:
    """The segments that torch might have taken in the place of each other.

    torch serves a request from the operator's smallest free segment that it fits into. Of several it takes the one at the
    lowest address: all of these are alike.

    Args:
        served: (operator, bytes) of each segment.
        events: (action, place in `served`, bytes) of torch's allocator, in order.

    Returns:
        For each segment the places in `served` of those alike, its own among them.
    """
    group = [[i] for i in range(len(served))]
    free: set[int] = set()
    for action, i, _ in events:
        if action == "free_completed":
            free.add(i)
        elif action == "alloc" and i in free:
            for j in sorted(free):
                if served[j] == served[i] and group[j] is not group[i]:
                    group[i] += group[j]
                    for k in group[j]:
                        group[k] = group[i]
            free.remove(i)
    return group


def storages(value: Any) -> list[int]:
    """The addresses of the distinct storages of an operator's output."""
    tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.numel()]
    return list(dict.fromkeys(t.untyped_storage().data_ptr() for t in tensors))
