"""CUDA streams and events of our own, as many as a schedule names.

torch.cuda.Stream hands out 32 streams a device in turn: past that two of a schedule's streams would be one, and any of them
may be one that the host process captures on.

Invariant: cuBLAS's workspace of a stream serves one graph at a time. torch keeps a workspace for each pair of a thread's
cuBLAS handle and a stream, for good, and a graph holds its address. So a stream once created is never destroyed; a graph
holds the streams of its matrix products until it is closed; and their workspaces lie in memory pools of these streams alone.
There they stay even where somebody has torch clear all workspaces of the process, as torch.compile does.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from cuda.bindings import runtime as cudart


def checked(result: tuple[Any, ...]) -> Any:
    """Unpack a cuda.bindings result.

    Raises:
        OutOfMemoryError: as PyTorch raises it.
        RuntimeError: any other error, with CUDA's own name of it.
    """
    status, *values = result
    if status == cudart.cudaError_t.cudaErrorMemoryAllocation:
        raise torch.cuda.OutOfMemoryError(f"CUDA out of memory: {status.name}")
    if status != cudart.cudaError_t.cudaSuccess:
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def pool_bytes(pool: tuple[int, int]) -> int:
    """The device memory of a pool of torch's.

    Not by MemPool.snapshot(include_traces=False), after which Python crashes (torch 2.11).
    """
    return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool))


class Stream:
    """A CUDA stream that lives as long as the process.

    Args:
        device: Of the stream.

    Attributes:
        handle: CUDA's.
        torch: torch's view of it.
    """

    def __init__(self, device: torch.device):
        self.device = device
        with torch.cuda.device(device):
            self.handle = checked(cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking))
        self.torch = torch.cuda.ExternalStream(int(self.handle), device=device)
        self.pool: Any = None  # of the workspaces
        self.thread = 0  # that it was last provided for

    def provide_workspace(self) -> None:
        """Have torch allocate the workspaces of this stream and of this thread's cuBLAS handle, where it has none."""
        self.thread = threading.get_ident()
        if self.pool is None:
            self.pool = torch.cuda.MemPool()
        with torch.no_grad(), torch.cuda.stream(self.torch):
            square = torch.zeros(16, 16, dtype=torch.float16, device=self.device)
            out = torch.empty_like(square)
            with torch.cuda.use_mem_pool(self.pool, self.device):
                torch.mm(square, square, out=out)
                torch.addmm(square[0], square, square, out=out)  # by cuBLASLt, whose workspace may be another one

    @property
    def workspace_bytes(self) -> int:
        return pool_bytes(self.pool.id) if self.pool else 0


class Streams:
    """Streams of one device that nobody else has until `close`, or until this object is gone.

    Args:
        device: Of the streams.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.streams: list[Stream] = []
        self._give_back = weakref.finalize(self, _Idle.put, self.streams)
        self._give_back.atexit = False

    def take(self, have_workspace: Sequence[bool]) -> list[Stream]:
        """One stream for each entry, with a workspace where that says so; the same ones again to a second caller.

        What was captured on a stream that another graph had must not run before that graph's work is over: this waits.
        """
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        device = torch.device("cuda", index)
        own = [[s for s in self.streams if (s.pool is not None) is has] for has in (False, True)]
        taken = []
        for has in have_workspace:
            if own[has]:
                stream = own[has].pop(0)
            else:
                stream = _Idle.get(device, has) or Stream(device)
                self.streams.append(stream)
            if has:
                stream.provide_workspace()
            taken.append(stream)
        torch.cuda.synchronize(device)
        return taken

    @property
    def workspace_bytes(self) -> int:
        return sum(stream.workspace_bytes for stream in self.streams)

    def close(self) -> None:
        self._give_back()


class _Idle:
    """The streams that nobody holds."""

    lock = threading.RLock()  # the garbage collector may call `put` within `get`
    streams: list[Stream] = []

    @classmethod
    def get(cls, device: torch.device, has_workspace: bool) -> Stream | None:
        with cls.lock:
            fitting = [s for s in cls.streams if s.device == device and (s.pool is not None) is has_workspace]
            if not fitting:
                return None
            stream = next((s for s in fitting if s.thread == threading.get_ident()), fitting[0])
            cls.streams.remove(stream)
            return stream

    @classmethod
    def put(cls, streams: list[Stream]) -> None:
        with cls.lock:
            cls.streams += streams
        streams.clear()


class ProductWatch:
    """Says whether an operator used cuBLAS's handle of this thread: torch gives the handle its stream before each use.

    Args:
        stream: On which the operators run; it has a workspace.
    """

    def __init__(self, stream: Stream):
        with torch.cuda.stream(stream.torch):
            self.handle = ctypes.c_void_p(torch.cuda.current_blas_handle())

    def begin(self) -> None:
        _succeeded(_cublas().cublasSetStream_v2(self.handle, None))

    def has_product(self) -> bool:
        """Whether there was a product since `begin`."""
        stream = ctypes.c_void_p()
        _succeeded(_cublas().cublasGetStream_v2(self.handle, ctypes.byref(stream)))
        return stream.value is not None


@cache
def _cublas() -> ctypes.CDLL:
    """The library that torch has loaded: its name finds it."""
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libcublas.so.{torch.version.cuda.split('.')[0]}")


def _succeeded(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS: status {status}")


class Event:
    """An event without timing, which is what a wait between streams needs."""

    def __init__(self) -> None:
        self.handle = checked(cudart.cudaEventCreateWithFlags(cudart.cudaEventDisableTiming))

    def record(self, stream: Any) -> None:
        checked(cudart.cudaEventRecord(self.handle, stream))

    def block(self, stream: Any) -> None:
        """What is launched on `stream` from now on waits for this event."""
        checked(cudart.cudaStreamWaitEvent(stream, self.handle, 0))

    def close(self) -> None:
        checked(cudart.cudaEventDestroy(self.handle))


def begin_capture(stream: Any) -> Callable[[], None]:
    """Begin to capture what this thread launches on `stream`; returns how to leave capture with nothing to show for it."""
    checked(cudart.cudaStreamBeginCapture(stream, cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))

    def discard() -> None:
        status, graph = cudart.cudaStreamEndCapture(stream)  # its error, if any, would hide the one that ended the capture
        if status == cudart.cudaError_t.cudaSuccess:
            checked(cudart.cudaGraphDestroy(graph))

    return discard


def num_captured(stream: Any) -> int:
    """Nodes so far of the graph that a stream is captured into."""
    _, _, graph, *_ = checked(cudart.cudaStreamGetCaptureInfo(stream))
    return num_nodes(graph)


def num_nodes(graph: Any) -> int:
    """Nodes of a captured graph."""
    _, number = checked(cudart.cudaGraphGetNodes(graph, 0))
    return int(number)
