"""Active warps: how many warps the whole GPU has in flight over a call, and on average (IOS, Section 6.3)."""

import csv
import shutil
from collections.abc import Callable, Sequence
from math import ceil, prod
from typing import Any

import torch

from results.course import Course

from .kernels import of_one_call
from .sm_efficiency import DURATION, METRIC, CountersUnavailable, profiled

WARPS = "sm__warps_active.avg.per_cycle_active"  # of an SM, over the cycles in which it has any
WARP = 32  # threads
OCCUPANCY = "est. achieved occupancy %"  # rounded to a whole number
STEPS = 400  # of the course in a record, at most


def measure(call: Callable[[], Any], cell: dict[str, Any], captured: bool, call_ms: float) -> dict[str, Any]:
    """value (warps on the whole GPU, the mean over a call), its source, `counters` or `estimated`, and profiled_ms, as SM
    efficiency has them; the two sources are not comparable. estimated_course: the warps over the milliseconds of a call, as
    results.course has them in a record, in at most STEPS steps; an estimate whatever the source of the value, which is its
    mean where that is one.

    call_ms: what a call takes when nothing profiles it. On a CPU value and course are None.
    """
    if cell["device"] != "cuda":
        reason = "a CPU has no warps"
        return {"value": None, "source": None, "reason": reason, "profiled_ms": None, "estimated_course": None}
    found: dict[str, Any] = {"value": None, "source": "counters", "reason": None, "profiled_ms": None}
    if shutil.which("ncu"):
        try:
            warp_ns, elapsed_ns = parse(profiled(cell, captured, (METRIC, WARPS, DURATION)))
            sms = torch.cuda.get_device_properties(0).multi_processor_count
            found |= {"value": sms * warp_ns / 1e6 / call_ms, "profiled_ms": elapsed_ns / 1e6}
        except CountersUnavailable as error:
            found["reason"] = str(error)
    else:
        found["reason"] = "Nsight Compute (ncu) is not on the PATH"
    # Nsight Compute has profiled another process, and counters are for one profiler at a time: the trace is taken after it.
    course = from_timeline(call)
    if found["value"] is None:
        found |= {"value": course.mean, "source": "estimated"}
    return found | {"estimated_course": course.resampled(STEPS).to_json()}


def parse(text: str) -> tuple[float, float]:
    """Warps of an average SM times the nanoseconds they were active, and the nanoseconds that elapsed, summed over the
    workloads that Nsight Compute printed as CSV. Raises CountersUnavailable where it holds none.
    """
    rows = list(csv.DictReader(line for line in text.splitlines() if line.startswith('"')))[1:]  # the first holds units
    try:
        found = [[float(row[name].replace(",", "")) for name in (DURATION, METRIC, WARPS)] for row in rows]
    except (KeyError, ValueError) as error:
        raise CountersUnavailable(f"Nsight Compute reported no {WARPS}") from error
    if not found:
        raise CountersUnavailable("Nsight Compute profiled nothing")
    return sum(ns * percent / 100 * warps for ns, percent, warps in found), sum(ns for ns, *_ in found)


def from_timeline(call: Callable[[], Any]) -> Course:
    """Estimate of one call from its kernels' timeline, from the first kernel's beginning to the last one's end."""
    properties = torch.cuda.get_device_properties(0)
    most = properties.multi_processor_count * properties.max_threads_per_multi_processor // WARP
    return course_of([e for e in of_one_call(call) if e["cat"] == "kernel"], most)


def course_of(kernels: Sequence[dict[str, Any]], most: int) -> Course:
    """Of kernels as events of a Chrome trace. A kernel keeps the warps that it can have in flight for as long as it runs,
    and kernels at once have no more than `most`, what the GPU holds.
    """
    first = min((e["ts"] for e in kernels), default=0.0)
    milliseconds = [((e["ts"] - first) / 1e3, (e["ts"] + e["dur"] - first) / 1e3) for e in kernels]
    return Course.of(((*span, warps_of(e, most)) for span, e in zip(milliseconds, kernels, strict=True)), most)


def warps_of(kernel: dict[str, Any], most: int) -> float:
    """All of a kernel's warps, or those that its occupancy allows it of the `most` that the GPU holds.

    The occupancy alone would not do: a kernel of a few blocks is at 0 % of a large GPU.
    """
    arguments = kernel["args"]
    warps = prod(arguments["grid"]) * ceil(prod(arguments["block"]) / WARP)
    percent = arguments.get(OCCUPANCY, 0)
    limited = percent > 0 and warps > (percent + 0.5) / 100 * most
    return min(most, percent / 100 * most if limited else warps)
