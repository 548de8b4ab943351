"""What one call runs on a GPU: how many kernels and copies, how long they take, and how much of that they run at once."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from systems.profiling.kernel_trace import exported, on_device

CALLS = 5  # that a trace is of
TURNS = 9  # of which the shortest is taken for one call: what the profiler does beside a call makes it longer
QUEUE_CYCLES = 40_000_000  # some 20 ms, within which the profiler launches a graph of thousands of kernels


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


def traced(call: Callable[[], Any], calls: int = CALLS, ahead: Callable[[], Any] | None = None) -> list[dict[str, Any]]:
    """The kernels and copies of some calls, and of what is launched ahead of them, as events of a Chrome trace (times in
    microseconds), by when they began.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        if ahead is not None:
            ahead()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    return on_device(exported(profiler))


def of_one_call(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """The kernels and copies of one call, the shortest of TURNS, as `traced` gives them.

    Of a call that replays a CUDA Graph those of the graph, launched while the GPU is busy: under the profiler a launch takes
    longer than the graph, whose first kernels would wait for the others to be launched.
    """
    graph = launched_graph(traced(call, 1))  # the profiler's first turn is slow, too
    ahead = partial(torch.cuda._sleep, QUEUE_CYCLES) if graph is not None else None
    return min((replayed(traced(call, 1, ahead)) for _ in range(TURNS)), key=_length)


def _length(events: list[dict[str, Any]]) -> float:
    """Microseconds from the beginning of the first to the end of the last."""
    return max(e["ts"] + e["dur"] for e in events) - events[0]["ts"] if events else 0.0


def launched_graph(events: list[dict[str, Any]]) -> int | None:
    """The correlation of the launch of a CUDA Graph, which all that the graph runs has; None where there is not just one."""
    launches = Counter(event["args"]["correlation"] for event in events)
    graphs = [correlation for correlation, count in launches.items() if count > 1]
    return graphs[0] if len(graphs) == 1 else None


def replayed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of a call that replays a CUDA Graph what the graph ran, of any other all that ran.

    The profiler takes a millisecond and more to launch a graph, which would lie between the copies of the inputs and the
    graph as if the device had waited for that long.
    """
    graph = launched_graph(events)
    return events if graph is None else [e for e in events if e["args"]["correlation"] == graph]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans (begin, end)."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
