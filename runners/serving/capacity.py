"""The largest rate of arrivals that a server keeps an SLO at: what figure 4.8 of the dissertation compares systems by.

Invariant: the interval that is halved has a rate that keeps the SLO below, and one that does not above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from results.latencies import seconds

if TYPE_CHECKING:
    from .traffic import Seen

MOST_DOUBLINGS = 10  # up or down from the rate that is tried first
ALONE = 0.1  # requests that are unfinished, on average, up to which the median one is alone


@dataclass(frozen=True)
class Tried:
    """One rate: medians over its traces, each of a seed of its own.

    Args:
        rate: arrivals a second.
        normalized_ms: median normalized latency; None where any trace is unstable.
        throughput: requests finished a second.
        num_unfinished: requests that have come and are not finished, mean over a trace.
        trace_ms: the median normalized latency of each trace; None for one that is unstable.
        lag_ms: of the load generator, p99 of the trace in which it is largest.
    """

    rate: float
    normalized_ms: float | None
    throughput: float
    num_unfinished: float
    trace_ms: tuple[float | None, ...] = ()
    lag_ms: float = 0.0

    @classmethod
    def of(cls, rate: float, traces: Sequence[Seen]) -> Tried:
        """What traces at a rate came to; requests came when they were due."""
        from . import metrics

        latencies = [metrics.latencies_ms(seen) for seen in traces]
        stable = [metrics.is_stable(seen.requests, 0) for seen in traces]
        trace_ms = [median(of["normalized"]) for of in latencies]
        return cls(
            rate,
            median(trace_ms) if all(stable) else None,
            median(metrics.request_throughput(seen) for seen in traces),
            median(sum(of["end_to_end"]) / 1e3 / seconds(seen.requests) for of, seen in zip(latencies, traces, strict=True)),
            tuple(ms if is_stable else None for ms, is_stable in zip(trace_ms, stable, strict=True)),
            max(map(metrics.lag_p99_ms, traces)),
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
        try_rate: serves the traces of a rate.
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
