"""What one call runs on a GPU: how many kernels and copies, how long they take, and how much of that they run at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from results.occupation import Kernels as KernelsPart
from results.record import now

from .base import Measurement, Part
from .subject import Subject


def measure(call: Callable[[], Any], device: str) -> KernelsPart:
    """Kernels and copies of a call: their number, their durations added up, and the time in which at least one runs.

    Kernels that run at once slow each other. What a call takes beyond the covered time, the GPU waits. All are means over
    some calls under torch.profiler, which slows launches and so lengthens the gaps, not the kernels. None on a CPU.
    """
    if device != "cuda":
        return KernelsPart(None, None, None, "a CPU runs no kernels")
    from systems.profiling.trace import CALLS, covered, traced

    spans = [(e.begin_us, e.end_us) for e in traced(call)]
    return KernelsPart(
        count=len(spans) / CALLS,
        sum_ms=sum(end - begin for begin, end in spans) / CALLS / 1e3,
        covered_ms=covered(spans) / CALLS / 1e3,
        when=now(),
    )


class Kernels(Measurement):
    """How many kernels a call launches, and for how long the GPU is busy with them."""

    name = "kernels"
    needs_profiler = True

    def measure(self, session: Subject) -> Part:
        return measure(session.call, session.device)

    def missing(self, reason: str) -> Part:
        return KernelsPart(None, None, None, reason)
