"""Ratios between systems that were measured in turn, in interleaved rounds, on one machine."""

from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

RESAMPLES = 2000


@dataclass(frozen=True)
class Speedup:
    """How many times faster: the median over rounds, and a bootstrap 95 % interval of it.

    in_turn: False where the rounds are not to be trusted, and the systems' latencies, each measured alone, stand in.
    """

    ratio: float
    low: float
    high: float
    in_turn: bool = True


def comparable(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Were the two measured in turn, in the same rounds?"""
    x, y = a.get("comparison"), b.get("comparison")
    return bool(x and y and x["group"] == y["group"] and x["rounds"] and len(x["rounds"]) == len(y["rounds"]))


def disturbed(record: dict[str, Any]) -> bool:
    """Were its rounds measured in a process that a profiler had been in? It slows launches for as long as the process lives.

    So it was until records told when they were profiled.
    """
    return record.get("sm_efficiency") is not None and "when" not in record["sm_efficiency"]


def speedup(record: dict[str, Any], baseline: dict[str, Any]) -> Speedup | None:
    """How many times faster `record`'s system is than `baseline`'s, or None where they were not measured together.

    Each round gives one ratio, of the two systems' medians in that round, so that what slows the machine for a while slows
    both sides of a ratio.
    """
    if record["status"] != "ok" or baseline["status"] != "ok" or not comparable(record, baseline):
        return None
    if disturbed(record) or disturbed(baseline):
        slow, fast = (np.array(r["latency"]["host_ms"]) for r in (baseline, record))
        ratios = _medians(slow, seed=0) / _medians(fast, seed=1)
        return Speedup(float(np.median(slow) / np.median(fast)), *_interval(ratios), in_turn=False)
    pairs = zip(baseline["comparison"]["rounds"], record["comparison"]["rounds"], strict=True)
    ratios = np.array([median(slow) / median(fast) for slow, fast in pairs])
    return Speedup(float(np.median(ratios)), *_interval(_medians(ratios)))


def _medians(samples: np.ndarray, seed: int = 0) -> np.ndarray:
    """Of samples drawn anew from these, RESAMPLES times."""
    return np.median(np.random.default_rng(seed).choice(samples, (RESAMPLES, len(samples))), axis=1)


def _interval(estimates: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(estimates, [0.025, 0.975])
    return float(low), float(high)
