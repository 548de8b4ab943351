"""Latency: one call at a time, each ended by a device synchronisation."""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

from results.statistics import describe

WINDOW = 10  # calls
STEADY = 0.02  # two windows' medians this close: warm
WARM_UP_CALLS, WARM_UP_SECONDS = 300, 3.0
LONG_ENOUGH = 0.3  # s; short calls are sampled more often than asked, up to MOST
MOST = 500


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def sample(call: Callable[[], Any], device: str, least: int, seconds: float = 0.0, most: int = MOST) -> list[float]:
    """Host milliseconds of each of at least `least` calls; more, up to `most`, until `seconds` have passed."""
    times: list[float] = []
    synchronize(device)
    begin = perf_counter()
    while len(times) < least or (len(times) < most and perf_counter() - begin < seconds):
        start = perf_counter()
        call()
        synchronize(device)
        times.append((perf_counter() - start) * 1e3)
    return times


def warm_up(call: Callable[[], Any], device: str) -> int:
    """Call until the latency is steady (or the bound is reached); returns the number of calls."""
    begin, calls = perf_counter(), 0
    previous: float | None = None
    while calls < WARM_UP_CALLS and perf_counter() - begin < WARM_UP_SECONDS:
        current = median(sample(call, device, WINDOW))
        calls += WINDOW
        if previous is not None and abs(current / previous - 1) < STEADY:
            break
        previous = current
    return calls


def measure(call: Callable[[], Any], device: str, samples: int, warm: bool = False) -> dict[str, Any]:
    """Host latency and, on a GPU, the device's own time between events around the call; every sample, in milliseconds.

    warm: it has been called often enough.
    """
    warm_up_calls = 0 if warm else warm_up(call, device)
    host = sample(call, device, samples, LONG_ENOUGH)
    events = _device_times(call, samples) if device == "cuda" else None
    return {
        "unit": "ms",
        "warmup_calls": warm_up_calls,
        "host_ms": host,
        "device_ms": events,
        "statistics": {"host": describe(host), "device": describe(events) if events else None},
    }


def _device_times(call: Callable[[], Any], samples: int) -> list[float]:
    times = []
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times
