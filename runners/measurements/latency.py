"""Latency: one call at a time, each ended by a device synchronisation."""

from __future__ import annotations

from dataclasses import dataclass

from results.calls import Latency as LatencyPart
from results.record import Record
from results.statistics import Statistics, describe, spread
from results.warning import Warning
from runners.cell.calls import Call, sample
from runners.checks import positive_integer
from runners.machine import card

from .base import DASH, Column, Measurement, Part, Row, number_or_dash
from .subject import Subject

LONG_ENOUGH_S = 0.3  # short calls are sampled more often than asked for
NANOSECOND = 6  # decimal places of a millisecond; a GPU's events tell half a microsecond apart
WIDE = 0.1  # a spread (p90 - p10) / median above this is a doubt


@dataclass(frozen=True)
class LatencyOptions:
    """Args:
    samples: Calls at least, each timed alone.
    """

    samples: int

    def __post_init__(self) -> None:
        positive_integer("runner.samples", self.samples)


def measure(call: Call, device: str, samples: int, warmup_calls: int = 0) -> LatencyPart:
    """Time calls on the host and, on a GPU, between events of the device around each call.

    Args:
        call: one call of the prepared system, which is warm.
        device: "cpu" or "cuda".
        samples: calls at least; short ones are called until LONG_ENOUGH_S has passed.
        warmup_calls: how often it was called before.
    """
    host_ms = sample(call, device, samples, LONG_ENOUGH_S)
    device_ms = _device_ms(call, samples) if device == "cuda" else None
    return LatencyPart(
        warmup_calls=warmup_calls,
        host_ms=tuple(host_ms),
        device_ms=None if device_ms is None else tuple(device_ms),
        host=describe(host_ms),
        device=describe(device_ms) if device_ms else None,
    )


def _device_ms(call: Call, samples: int) -> list[float]:
    import torch

    times_ms = []
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times_ms.append(round(start.elapsed_time(end), NANOSECOND))
    return times_ms


def doubts(host_ms: tuple[float, ...], device: str, visible_device: str) -> tuple[Warning, ...]:
    """What speaks against trusting these samples: that they scatter, or that the GPU is throttled."""
    warnings = []
    if (wide := spread(host_ms)) > WIDE:
        warnings.append(Warning("latency_scatters", {"spread": wide}))
    if device == "cuda" and (reasons := card.clocks(visible_device).throttled):
        warnings.append(Warning("throttled", {"reasons": ", ".join(reasons)}))
    return tuple(warnings)


def _interval(statistics: Statistics | None, unit: str = "") -> str:
    if statistics is None:
        return DASH
    low, high = statistics.ci95
    return f"{statistics.median:.3f} [{low:.3f}, {high:.3f}] {unit}".strip()


def _median(statistics: Statistics | None) -> str:
    return number_or_dash(statistics.median if statistics else None, "{:.3f}")


def _tail(statistics: Statistics | None) -> str:
    return f"{statistics.min:.3f}, {statistics.p90:.3f}, {statistics.p99:.3f} ms" if statistics else DASH


def _host(record: Record) -> Statistics | None:
    return record.latency.host if record.latency else None


def _device(record: Record) -> Statistics | None:
    return record.latency.device if record.latency else None


class Latency(Measurement):
    """The time of a single call, from the host's launch to the end of the device's work."""

    name = "latency"
    Options = LatencyOptions
    is_compared = True
    place = 10
    columns = (
        Column(
            "latency ms",
            0,
            lambda record: _median(_host(record)),
            "median, with its 95 % interval where there is room",
            lambda record: _interval(_host(record)),
        ),
        Column("device ms", 3, lambda record: _median(_device(record))),
    )
    rows = (
        Row("latency, host", lambda record: _interval(_host(record), "ms")),
        Row("  min, p90, p99", lambda record: _tail(_host(record))),
        Row("latency, device", lambda record: _interval(_device(record), "ms")),
    )
    options: LatencyOptions

    def measure(self, session: Subject) -> Part:
        warmup_calls = session.warm_up()
        return measure(session.call, session.device, self.options.samples, warmup_calls)

    def doubts(self, session: Subject, part: Part) -> tuple[Warning, ...]:
        assert isinstance(part, LatencyPart)
        return doubts(part.host_ms, session.device, session.visible_device)
