"""Ratios between systems that were measured in turn, in interleaved rounds, on one machine."""

from dataclasses import dataclass
from statistics import median

import numpy as np

from .record import Record
from .statistics import interval, resampled_medians


@dataclass(frozen=True)
class Speedup:
    """How many times faster: the median over rounds, and a bootstrap 95 % interval of it.

    is_in_turn: False where the rounds are not to be trusted, and latencies that were each measured alone stand in.
    """

    ratio: float
    low: float
    high: float
    is_in_turn: bool = True


# Warnings of a cell whose rounds give no ratio.
UNSOUND = ("busy_rounds", "apart_in_rounds")


def has_sound_rounds(record: Record) -> bool:
    """Was it measured in rounds, on a machine that did nothing else?"""
    return record.is_in_rounds and not any(warning.kind in UNSOUND for warning in record.warnings)


def comparable(a: Record, b: Record) -> bool:
    """Were the two measured in turn, in the same rounds, and are both sound?"""
    x, y = a.comparison, b.comparison
    if x is None or y is None or not (has_sound_rounds(a) and has_sound_rounds(b)):
        return False
    return x.group == y.group and len(x.rounds) == len(y.rounds)


def is_disturbed(record: Record) -> bool:
    """Had a profiler been in its process before the rounds? It slows launches for as long as the process lives."""
    return any(warning.kind == "profiled_before_timing" for warning in record.warnings)


def speedup(record: Record, baseline: Record) -> Speedup | None:
    """How many times faster `record`'s system is than `baseline`'s, or None where they were not measured together.

    Each round gives one ratio, of the two systems' medians in that round, so that what slows the machine for a while slows
    both sides of a ratio.
    """
    if not record.is_ok or not baseline.is_ok or not comparable(record, baseline):
        return None
    if is_disturbed(record) or is_disturbed(baseline):
        if record.latency is None or baseline.latency is None:
            return None
        slow, fast = baseline.latency.host_ms, record.latency.host_ms
        low, high = interval(resampled_medians(slow, seed=0) / resampled_medians(fast, seed=1))
        return Speedup(median(slow) / median(fast), low, high, is_in_turn=False)
    ratios = round_ratios(record, baseline)
    low, high = interval(resampled_medians(ratios))
    return Speedup(float(np.median(ratios)), low, high)


def round_ratios(record: Record, baseline: Record) -> list[float]:
    """How many times faster in each of the rounds that the two share."""
    assert record.comparison is not None and baseline.comparison is not None
    pairs = zip(baseline.comparison.rounds, record.comparison.rounds, strict=True)
    return [median(slow) / median(fast) for slow, fast in pairs]
