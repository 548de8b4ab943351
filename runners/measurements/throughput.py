"""Throughput: calls back to back, without a synchronisation between them."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

from results.statistics import describe

from .latency import synchronize

RUNS = 5
RUN_SECONDS = 0.2
FEWEST_CALLS, MOST_CALLS = 4, 1000


def measure(call: Callable[[], Any], device: str, batch: int, expected_ms: float) -> dict[str, Any]:
    """Samples per second over RUNS runs; a run has as many calls of `expected_ms` as fill RUN_SECONDS, and ends in a
    synchronisation."""
    calls = int(min(MOST_CALLS, max(FEWEST_CALLS, RUN_SECONDS * 1e3 / expected_ms)))
    runs = []
    for _ in range(RUNS):
        synchronize(device)
        start = perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        runs.append(calls * batch / (perf_counter() - start))
    return {"unit": "samples/s", "calls": calls, "runs": runs, "statistics": describe(runs)}
