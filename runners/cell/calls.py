"""Calls that are timed on the host's clock, each ended by a device synchronisation."""

from collections.abc import Callable
from statistics import median
from time import perf_counter, perf_counter_ns

WINDOW = 10  # calls
STEADY = 0.02  # two windows' medians this close: warm
WARM_UP_CALLS, WARM_UP_SECONDS = 300, 3.0
MOST_CALLS = 500

Call = Callable[[], object]


def synchronize(device: str) -> None:
    """Wait for all that was launched on the device ("cpu" or "cuda")."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def sample(call: Call, device: str, least: int, seconds: float = 0.0, most: int = MOST_CALLS) -> list[float]:
    """Host milliseconds of each of at least `least` calls; more, up to `most`, until `seconds` have passed.

    Each is a whole number of nanoseconds, as the clock has them.
    """
    times_ms: list[float] = []
    synchronize(device)
    begin = perf_counter()
    while len(times_ms) < least or (len(times_ms) < most and perf_counter() - begin < seconds):
        start = perf_counter_ns()
        call()
        synchronize(device)
        times_ms.append((perf_counter_ns() - start) / 1e6)
    return times_ms


def warm_up(call: Call, device: str) -> int:
    """Call until the latency is steady, or the bound is reached; returns the number of calls."""
    begin, num_calls = perf_counter(), 0
    previous_ms: float | None = None
    while num_calls < WARM_UP_CALLS and perf_counter() - begin < WARM_UP_SECONDS:
        current_ms = median(sample(call, device, WINDOW))
        num_calls += WINDOW
        if previous_ms is not None and abs(current_ms / previous_ms - 1) < STEADY:
            break
        previous_ms = current_ms
    return num_calls
