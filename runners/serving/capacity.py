"""The largest rate of arrivals that a server keeps an SLO at: what figure 4.8 of the dissertation compares systems by.

Invariant: the interval that is halved has a rate that keeps the SLO below, and one that does not above.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .traffic import Seen

MOST_DOUBLINGS = 10  # up or down from the rate that is tried first
ALONE = 0.1  # requests that are unfinished, on average, up to which the median one is alone


@dataclass(frozen=True)
class Tried:
    """One rate.

    Args:
        rate: arrivals a second.
        normalized_ms: median normalized latency; None where requests came faster than they were finished.
        throughput: requests finished a second.
        num_unfinished: requests that have come and are not finished, mean over the trace.
    """

    rate: float
    normalized_ms: float | None
    throughput: float
    num_unfinished: float

    @classmethod
    def of(cls, rate: float, seen: Seen) -> Tried:
        """What one trace at a rate came to; requests came when they were due."""
        from . import metrics

        is_stable, requests = metrics.is_stable(seen.requests, 0), seen.requests
        latencies_ms = metrics.latencies_ms(seen)
        span_s = max(tokens[-1] for tokens in requests.token_s) - min(requests.due_s)
        return cls(
            rate,
            median(latencies_ms["normalized"]) if is_stable else None,
            metrics.request_throughput(seen),
            sum(latencies_ms["end_to_end"]) / 1e3 / span_s,
        )

    def keeps(self, slo_ms: float) -> bool:
        return self.normalized_ms is not None and self.normalized_ms <= slo_ms

    @property
    def is_alone(self) -> bool:
        """No lower rate is any faster: the median request meets nobody."""
        return self.normalized_ms is not None and self.num_unfinished <= ALONE


def largest_rate(
    try_rate: Callable[[float], Tried], slo_ms: float, first: float, steps: int
) -> tuple[Tried | None, list[Tried]]:
    """The largest rate found that keeps the SLO, None where none does; and all that were tried.

    Args:
        try_rate: serves a trace at a rate.
        slo_ms: median normalized latency, at most.
        first: the rate tried first, doubled or halved until the interval is found, or until requests are alone.
        steps: halvings of the interval, on a logarithmic scale.
    """
    tried = [try_rate(first)]
    factor = 2.0 if tried[0].keeps(slo_ms) else 0.5
    while (
        len(tried) <= MOST_DOUBLINGS and tried[-1].keeps(slo_ms) == (factor > 1) and (factor > 1 or not tried[-1].is_alone)
    ):
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
