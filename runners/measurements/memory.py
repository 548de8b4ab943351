"""Memory: the peak over the model's own weights and inputs."""

from __future__ import annotations

import gc
from importlib import import_module
from pathlib import Path

import psutil

from results.calls import Memory as MemoryPart
from results.record import Record
from runners.cell.calls import Call, synchronize

from .base import Column, Measurement, Part, Row, number_or_dash
from .subject import Subject

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
            import torch

            torch._C._cuda_clearCublasWorkspaces()  # building the model may have left one, which is not the model's own
            torch.cuda.empty_cache()
            self.allocated, self.reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        else:
            self.resident = psutil.Process().memory_info().rss

    def measure(self, call: Call, system_bytes: dict[str, int]) -> MemoryPart:
        """The peak over a few calls.

        On a GPU that is what tensors and workspaces occupy, and what the private pools of CUDA Graphs keep for themselves.
        On a CPU it is resident memory.

        Args:
            call: one call of the prepared system.
            system_bytes: what the system knows of itself, bytes by name. Its `outside_torch` is memory of the GPU that
                torch's allocator does not see.
        """
        self._run(call)  # the first calls choose algorithms, which takes memory once
        gc.collect()
        if self.device == "cuda":
            import torch

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._run(call)
            outside = system_bytes.get("outside_torch", 0)
            return MemoryPart(
                source="torch allocator",
                weights_and_inputs_bytes=self.allocated,
                peak_bytes=torch.cuda.max_memory_allocated() - self.allocated + _private_pool_bytes() + outside,
                peak_reserved_bytes=torch.cuda.max_memory_reserved() - self.reserved + outside,
                system=system_bytes,
            )
        if CLEAR_REFERENCES.exists():
            CLEAR_REFERENCES.write_text("5")  # resets the peak of this process's resident memory
        self._run(call)
        peak_bytes = max(0, peak_resident() - self.resident)
        return MemoryPart("resident set", self.resident, peak_bytes, system=system_bytes)

    def _run(self, call: Call) -> None:
        for _ in range(CALLS):
            call()
        synchronize(self.device)


def _private_pool_bytes() -> int:
    """Bytes that no tensor occupies and that only a CUDA Graph's replay may use."""
    import torch

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


def _peak(record: Record, unit: str = "") -> str:
    return number_or_dash(record.memory.peak_bytes / 2**20 if record.memory else None, "{:,.1f}" + unit)


class Memory(Measurement):
    """The peak of a few calls right after preparation, in the cell's own process."""

    name = "memory"
    is_first = True
    place = 30
    columns = (Column("MiB", 3, _peak, "peak over weights and inputs"),)
    rows = (Row("memory over weights and inputs", lambda record: _peak(record, " MiB")),)

    def before_preparing(self, session: Subject) -> None:
        self.meter = MemoryMeter(session.device)

    def measure(self, session: Subject) -> Part:
        return self.meter.measure(session.call, session.system_bytes)
