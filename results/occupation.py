"""How a call occupies its GPU: parts of a record."""

from __future__ import annotations

from dataclasses import dataclass

from .course import Course


@dataclass(frozen=True)
class SmEfficiency:
    """The share of time in which an SM has an active warp, 0 to 1.

    Args:
        value: None where it was not measured; `reason` says why.
        source: "counters" of the hardware, or "estimated" from the kernels' timeline.
        reason: why there is no value, or why it is an estimate.
        profiled_ms: milliseconds of the call under Nsight Compute.
        when: the time of measuring.
    """

    value: float | None
    source: str | None
    reason: str | None
    profiled_ms: float | None = None
    when: str | None = None


@dataclass(frozen=True)
class ActiveWarps:
    """The warps in flight on the whole GPU, the mean over a call; fields as SmEfficiency has them.

    estimated_course: the warps over the milliseconds of one call, an estimate whatever the source of the value.
    """

    value: float | None
    source: str | None
    reason: str | None
    profiled_ms: float | None = None
    estimated_course: Course | None = None
    when: str | None = None


@dataclass(frozen=True)
class Kernels:
    """Kernels and copies of one call: their number, their durations added up, and the time in which any runs."""

    count: float | None
    sum_ms: float | None
    covered_ms: float | None
    reason: str | None = None
    when: str | None = None
