"""Active warps: how many warps the whole GPU has in flight over a call, and on average (IOS, Section 6.3)."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable, Sequence
from math import ceil, prod
from typing import TYPE_CHECKING

from results.cell import Cell
from results.course import Course
from results.occupation import ActiveWarps as ActiveWarpsPart
from results.record import Record, now

from .base import Column, Measurement, Part, Row, sourced
from .sm_efficiency import DURATION, METRIC, CountersUnavailable, profiled, workloads_of
from .subject import Subject

if TYPE_CHECKING:
    from systems.profiling.trace import KernelEvent

WARPS = "sm__warps_active.avg.per_cycle_active"  # of an SM, over the cycles in which it has any
WARP = 32  # threads
STEPS = 400  # of the course in a record, at most


def measure(call: Callable[[], object], cell: Cell, workloads: Sequence[str], call_ms: float | None) -> ActiveWarpsPart:
    """Warps on the whole GPU, the mean over a call, and their course, which is an estimate whatever the source of the mean.

    The two sources are not comparable. On a CPU there are neither.

    Args:
        call: one call of the prepared system, for the course.
        cell: run once more in another process, for the counters.
        workloads: what Nsight Compute is told to profile.
        call_ms: milliseconds of a call when nothing profiles it.
    """
    if cell.device != "cuda":
        return ActiveWarpsPart(None, None, "a CPU has no warps", when=now())
    import torch

    value, profiled_ms, reason = None, None, None
    if shutil.which("ncu"):
        assert call_ms is not None, "an undisturbed call is timed before any profiler"
        try:
            warp_ns, elapsed_ns = parse(profiled(cell, workloads, (METRIC, WARPS, DURATION)))
            sms = torch.cuda.get_device_properties(0).multi_processor_count
            value, profiled_ms = sms * warp_ns / 1e6 / call_ms, elapsed_ns / 1e6
        except CountersUnavailable as error:
            reason = str(error)
    else:
        reason = "Nsight Compute (ncu) is not on the PATH"
    # Nsight Compute has profiled another process, and counters are for one profiler at a time: the trace is taken after it.
    course = from_timeline(call)
    source = "estimated" if value is None else "counters"
    value = course.mean if value is None else value
    return ActiveWarpsPart(value, source, reason, profiled_ms, course.resampled(STEPS), now())


def parse(text: str) -> tuple[float, float]:
    """Warps of an average SM times the nanoseconds they were active, and the nanoseconds that elapsed, over all workloads.

    Args:
        text: What Nsight Compute printed as CSV.

    Raises:
        CountersUnavailable: It holds no such counters.
    """
    rows = list(csv.DictReader(line for line in text.splitlines() if line.startswith('"')))[1:]  # the first holds units
    try:
        workloads = [[float(row[name].replace(",", "")) for name in (DURATION, METRIC, WARPS)] for row in rows]
    except (KeyError, ValueError) as error:
        raise CountersUnavailable(f"Nsight Compute reported no {WARPS}") from error
    if not workloads:
        raise CountersUnavailable("Nsight Compute profiled nothing")
    return sum(ns * percent / 100 * warps for ns, percent, warps in workloads), sum(ns for ns, *_ in workloads)


def from_timeline(call: Callable[[], object]) -> Course:
    """Estimate of one call from its kernels' timeline, from the first kernel's beginning to the last one's end."""
    import torch

    from systems.profiling.trace import KernelEvent, of_one_call

    properties = torch.cuda.get_device_properties(0)
    most = properties.multi_processor_count * properties.max_threads_per_multi_processor // WARP
    return course_of([e for e in of_one_call(call) if isinstance(e, KernelEvent)], most)


def course_of(kernels: Sequence[KernelEvent], most: int) -> Course:
    """The course of warps of these kernels. A kernel keeps the warps that it can have in flight for as long as it runs.

    Args:
        most: Warps that the GPU holds, which kernels at once do not exceed.
    """
    first_us = min((e.begin_us for e in kernels), default=0.0)
    spans_ms = [((e.begin_us - first_us) / 1e3, (e.end_us - first_us) / 1e3) for e in kernels]
    return Course.of(((*span, warps_of(e, most)) for span, e in zip(spans_ms, kernels, strict=True)), most)


def warps_of(kernel: KernelEvent, most: int) -> float:
    """All of a kernel's warps, or those that its occupancy allows it of the `most` that the GPU holds.

    The occupancy alone would not do: a kernel of a few blocks is at 0 % of a large GPU.
    """
    warps = prod(kernel.grid) * ceil(prod(kernel.block) / WARP)
    percent = kernel.occupancy_percent or 0
    limited = percent > 0 and warps > (percent + 0.5) / 100 * most
    return min(most, percent / 100 * most if limited else warps)


def _text(record: Record, *, is_long: bool = False) -> str:
    return sourced(record.active_warps, "{:,.1f}", is_long=is_long)


class ActiveWarps(Measurement):
    """How many warps the whole GPU has in flight: the mean, and the course over one call."""

    name = "active_warps"
    needs_profiler = True
    place = 50
    columns = (Column("warps", 0, _text, "active on the whole GPU on average, c from counters, e estimated"),)
    rows = (Row("active warps on the whole GPU", lambda record: _text(record, is_long=True)),)

    def before_profiling(self, session: Subject) -> None:
        session.time_undisturbed()

    def measure(self, session: Subject) -> Part:
        return measure(session.call, session.cell, workloads_of(session), session.undisturbed_ms)

    def missing(self, reason: str) -> Part:
        return ActiveWarpsPart(None, None, reason)
