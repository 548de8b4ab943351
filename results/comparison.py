"""Ratios between systems that were measured in turn, in interleaved rounds, on one machine."""

from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True)
class Speedup:
    """How many times faster: the median over rounds, and a bootstrap 95 % interval of it."""

    ratio: float
    low: float
    high: float


def comparable(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Were the two measured in turn, in the same rounds?"""
    x, y = a.get("comparison"), b.get("comparison")
    return bool(x and y and x["group"] == y["group"] and x["rounds"] and len(x["rounds"]) == len(y["rounds"]))


def speedup(record: dict[str, Any], baseline: dict[str, Any]) -> Speedup | None:
    """How many times faster `record`'s system is than `baseline`'s, or None where they were not measured together.

    Each round gives one ratio, of the two systems' medians in that round, so that what slows the machine for a while slows
    both sides of a ratio.
    """
    if record["status"] != "ok" or baseline["status"] != "ok" or not comparable(record, baseline):
        return None
    pairs = zip(baseline["comparison"]["rounds"], record["comparison"]["rounds"], strict=True)
    ratios = np.array([median(slow) / median(fast) for slow, fast in pairs])
    resampled = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(resampled, axis=1), [0.025, 0.975])
    return Speedup(float(np.median(ratios)), float(low), float(high))
