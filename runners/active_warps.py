"""Active warps: how many warps the whole GPU has in flight on average while a call runs (IOS, Section 6.3)."""

import csv
import shutil
from collections.abc import Callable
from typing import Any

import torch

from .kernels import traced
from .sm_efficiency import DURATION, METRIC, CountersUnavailable, profiled

WARPS = "sm__warps_active.avg.per_cycle_active"  # of an SM, over the cycles in which it has any
WARP = 32  # threads
OCCUPANCY = "est. achieved occupancy %"


def measure(call: Callable[[], Any], cell: dict[str, Any], captured: bool, call_ms: float) -> dict[str, Any]:
    """value (warps on the whole GPU, the mean over a call) and its source, `counters` or `estimated`, as SM efficiency has
    them; the two are not comparable. call_ms: what a call takes when nothing profiles it. On a CPU the value is None.
    """
    if cell["device"] != "cuda":
        return {"value": None, "source": None, "reason": "a CPU has no warps"}
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    reason = "Nsight Compute (ncu) is not on the PATH"
    if shutil.which("ncu"):
        try:
            warp_ns, elapsed_ns = parse(profiled(cell, captured, (METRIC, WARPS, DURATION)))
            return {
                "value": sms * warp_ns / (elapsed_ns if captured else call_ms * 1e6),
                "source": "counters",
                "reason": None,
            }
        except CountersUnavailable as error:
            reason = str(error)
    return {"value": from_timeline(call), "source": "estimated", "reason": reason}


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


def from_timeline(call: Callable[[], Any]) -> float:
    """Estimate from the kernels' timeline: a kernel keeps the warps that its estimated occupancy leaves it, and kernels at
    once no more than the GPU holds.
    """
    properties = torch.cuda.get_device_properties(0)
    most = properties.multi_processor_count * properties.max_threads_per_multi_processor / WARP
    kernels = [e for e in traced(call) if e["cat"] == "kernel"]
    spans = [(e["ts"], e["ts"] + e["dur"], e["args"].get(OCCUPANCY, 0) / 100 * most) for e in kernels]
    return mean_warps(spans, most)


def mean_warps(spans: list[tuple[float, float, float]], most: float) -> float:
    """The mean over time of the warps in flight, at most `most`, for kernels given as (start, end, warps)."""
    if not spans:
        return 0.0
    changes = sorted([(start, warps) for start, _, warps in spans] + [(end, -warps) for _, end, warps in spans])
    area, running, last = 0.0, 0.0, changes[0][0]
    for moment, warps in changes:
        area += (moment - last) * min(most, running)
        running, last = running + warps, moment
    return area / (changes[-1][0] - changes[0][0])
