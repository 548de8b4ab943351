"""What one call runs on a GPU: how many kernels and copies, how long they take, and how much of that they run at once."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from systems.opara.kernel_trace import exported, on_device

CALLS = 5  # that a trace is of


def measure(call: Callable[[], Any], device: str) -> dict[str, Any]:
    """count: kernels and copies of a call. sum_ms: their durations added up, where those that run at once slow each other.
    covered_ms: the time in which at least one of them runs; what a call takes beyond that, the GPU waits.

    The mean over CALLS calls under torch.profiler, which slows launches and so lengthens the gaps, not the kernels. None on
    a CPU, with the reason.
    """
    if device != "cuda":
        return {"count": None, "sum_ms": None, "covered_ms": None, "reason": "a CPU runs no kernels"}
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in traced(call)]
    return {
        "count": len(spans) / CALLS,
        "sum_ms": sum(end - begin for begin, end in spans) / CALLS / 1e3,
        "covered_ms": covered(spans) / CALLS / 1e3,
        "reason": None,
    }


def traced(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """The kernels and copies of CALLS calls, as events of a Chrome trace (times in microseconds), by when they began."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    return on_device(exported(profiler))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans (begin, end)."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
