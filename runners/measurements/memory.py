"""Memory: the peak over the model's own weights and inputs."""

import gc
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import torch

CALLS = 3
CLEAR_REFERENCES = Path("/proc/self/clear_refs")


class MemoryMeter:
    """Created when the model and its inputs are in place; `measure` once it is prepared, before anything else runs."""

    def __init__(self, device: str):
        self.device = device
        if device == "cpu":
            # What systems import to capture and compile is code, 200 MiB of it; it is no memory of the model's.
            for module in ("torch._dynamo", "torch._inductor.compile_fx"):
                import_module(module)
        gc.collect()
        if device == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # building the model may have left one, which is not the model's own
            torch.cuda.empty_cache()
            self.allocated, self.reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        else:
            self.resident = psutil.Process().memory_info().rss

    def measure(self, call: Callable[[], Any], known: dict[str, int]) -> dict[str, Any]:
        """Bytes, over a few calls: peak_bytes is what the process holds over the model's weights and inputs.

        On a GPU that is what tensors and workspaces occupy, and what the private pools of CUDA Graphs keep for themselves;
        peak_reserved_bytes counts the segments that torch's allocator took for it. On a CPU it is resident memory. `known`
        is what the system knows of itself; its `outside_torch` is memory of the GPU that torch's allocator does not see.
        """
        self._run(call)  # the first calls choose algorithms, which takes memory once
        gc.collect()
        measured: dict[str, Any] = {"unit": "bytes", "system": known}
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._run(call)
            measured["source"] = "torch allocator"
            measured["weights_and_inputs_bytes"] = self.allocated
            outside = known.get("outside_torch", 0)
            measured["peak_bytes"] = torch.cuda.max_memory_allocated() - self.allocated + _kept_by_private_pools() + outside
            measured["peak_reserved_bytes"] = torch.cuda.max_memory_reserved() - self.reserved + outside
        else:
            if CLEAR_REFERENCES.exists():
                CLEAR_REFERENCES.write_text("5")  # resets the peak of this process's resident memory
            self._run(call)
            measured["source"] = "resident set"
            measured["weights_and_inputs_bytes"] = self.resident
            measured["peak_bytes"] = max(0, peak_resident() - self.resident)
        return measured

    def _run(self, call: Callable[[], Any]) -> None:
        for _ in range(CALLS):
            call()
        if self.device == "cuda":
            torch.cuda.synchronize()


def _kept_by_private_pools() -> int:
    """Bytes that no tensor occupies and that only a CUDA Graph's replay may use."""
    private = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    return sum(s["total_size"] - s["allocated_size"] for s in private)


def peak_resident() -> int:
    """The largest resident memory of this process, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss
