"""The largest rate of arrivals that a server keeps an SLO at: what figure 4.8 of the dissertation compares systems by.

Invariant: the interval that is halved has a rate that keeps the SLO below, and one that does not above.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

MOST_DOUBLINGS = 10  # up or down from the rate that is tried first


@dataclass(frozen=True)
class Tried:
    """One rate.

    Args:
        rate: arrivals a second.
        normalized_ms: median normalized latency; None where requests came faster than they were finished.
        throughput: requests finished a second.
    """

    rate: float
    normalized_ms: float | None
    throughput: float

    def keeps(self, slo_ms: float) -> bool:
        return self.normalized_ms is not None and self.normalized_ms <= slo_ms


def largest_rate(
    try_rate: Callable[[float], Tried], slo_ms: float, first: float, steps: int
) -> tuple[Tried | None, list[Tried]]:
    """The largest rate found that keeps the SLO, None where none does; and all that were tried.

    Args:
        try_rate: serves a trace at a rate.
        slo_ms: median normalized latency, at most.
        first: the rate tried first, doubled or halved until the interval is found.
        steps: halvings of the interval, on a logarithmic scale.
    """
    tried = [try_rate(first)]
    factor = 2.0 if tried[0].keeps(slo_ms) else 0.5
    while len(tried) <= MOST_DOUBLINGS and tried[-1].keeps(slo_ms) == (factor > 1):
        tried.append(try_rate(tried[-1].rate * factor))
    low = max((t for t in tried if t.keeps(slo_ms)), key=lambda t: t.rate, default=None)
    high = min((t.rate for t in tried if not t.keeps(slo_ms)), default=math.inf)
    if low is None or math.isinf(high):
        return low, tried
    for _ in range(steps):
        tried.append(try_rate(math.sqrt(low.rate * high)))
        if tried[-1].keeps(slo_ms):
            low = tried[-1]
        else:
            high = tried[-1].rate
    return low, tried
