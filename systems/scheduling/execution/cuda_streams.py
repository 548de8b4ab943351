"""Real CUDA streams and events, as many as a schedule names.

torch.cuda.Stream hands out 32 streams a device in turn; past that two of a schedule's streams would be one, and the graph
captured from them would hold dependencies that the schedule does not have.
"""

from collections.abc import Callable
from typing import Any

import torch
from cuda.bindings import runtime as cudart


def checked(result: tuple[Any, ...]) -> Any:
    """Unpack a cuda.bindings result; raises RuntimeError with CUDA's own name of the error."""
    status, *values = result
    if status != cudart.cudaError_t.cudaSuccess:
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


class Streams:
    """`count` streams of one device, with torch's view of each; `close` destroys them."""

    def __init__(self, count: int, device: torch.device):
        with torch.cuda.device(device):
            self.handles = [checked(cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking)) for _ in range(count)]
        self.torch = [torch.cuda.ExternalStream(int(handle), device=device) for handle in self.handles]

    def close(self) -> None:
        for handle in self.handles:
            checked(cudart.cudaStreamDestroy(handle))
        self.handles, self.torch = [], []


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
