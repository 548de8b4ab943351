"""runner=capacity: the largest rate that a server keeps an SLO at.

By default that is the chapter's (section 4.5.2, figure 4.8): twice the normalized latency of a request alone.

Each rate has `runner.repeats` traces, of seeds that follow each other. It keeps the SLO where all of them are stable and the
median of their median normalized latencies keeps it. The record has the latency of each stable trace (samples trace_rate and
trace_ms), and the rate of each other one (unstable_trace_rate). Of each rate that was tried it has how late the load
generator sent, in the trace where that is most (lag_p99_ms).
"""

from __future__ import annotations

from typing import Protocol, cast

from results.quantity import Measured, Quantity
from results.record import Record, now
from results.warning import Warning
from runners.serving.capacity import Tried, largest_rate
from runners.serving.options import CapacityOptions, ServingOptions

from .base import DASH, Column, Measurement, Part, ServingComposition, late_load, number_or_dash
from .subject import Subject

ALONE = 128, 32  # prompt tokens and new tokens of the request whose latency is the measure (figure 4.7's "orca(128)")
SLO_FACTOR = 2.0
NONE_KEEPS = "no rate that was tried keeps the SLO"
ALONE_IS_SLOWER = "not even requests that are alone keep the SLO"
MOST = "every rate that was tried keeps the SLO: the largest is beyond"


class CapacitySubject(Subject, Protocol):
    """A session that serves at a rate."""

    @property
    def options(self) -> ServingOptions: ...
    def try_rate(self, rate: float) -> Tried: ...
    def alone_ms(self, prompt_tokens: int, new_tokens: int) -> float: ...


class CapacityRun(ServingComposition):
    """A cell that serves, at several rates."""

    name = "capacity"
    Options = ServingOptions
    session = "runners.serving.session:ServingSession"


def _text(record: Record) -> str:
    part = record.measured.get("capacity")
    quantity = part.quantity("slo_rate") if part else None
    if quantity is None:
        return DASH
    simulated = " (simulated)" if quantity.source else ""
    return f"{quantity.value:.3g}{simulated}" if quantity.value is not None else f"none: {quantity.reason}"


def _slo_text(record: Record) -> str:
    part = record.measured.get("capacity")
    quantity = part.quantity("slo_ms") if part else None
    return number_or_dash(quantity.value if quantity else None, "{:.1f}")


def _at_it_text(record: Record) -> str:
    part = record.measured.get("capacity")
    rate = part.quantity("slo_rate") if part else None
    if part is None or rate is None:
        return DASH
    by_rate = dict(zip(part.samples["stable_rate"], part.samples["normalized_ms"], strict=True))
    return number_or_dash(by_rate.get(rate.value or 0.0), "{:.1f}")


class Capacity(Measurement):
    """The largest rate at an SLO."""

    name = "capacity"
    Options = CapacityOptions
    place = 37
    columns = (
        Column("req/s at SLO", 0, _text, "the largest rate of arrivals that keeps the SLO"),
        Column("SLO ms", 0, _slo_text, "normalized latency, median: the SLO"),
        Column("ms at it", 0, _at_it_text, "normalized latency, median: at that rate"),
    )
    options: CapacityOptions

    def measure(self, session: Subject) -> Part:
        served = cast(CapacitySubject, session)
        slo_ms = self.options.slo_ms or SLO_FACTOR * served.alone_ms(*ALONE)
        best, tried = largest_rate(served.try_rate, slo_ms, served.options.rate, self.options.steps)
        reason = MOST if all(t.keeps(slo_ms) for t in tried) else None
        if best is None:
            reason = ALONE_IS_SLOWER if tried[-1].is_alone else NONE_KEEPS
        value = best.rate if best is not None else None
        source = getattr(session, "source", None)  # of a simulated one
        rate = Quantity(
            "slo_rate", "largest rate at the SLO", "req/s", value, is_more_better=True, source=source, reason=reason
        )
        slo = Quantity("slo_ms", "SLO: normalized latency, median", "ms", slo_ms, source=source)
        stable = [(t.rate, t.normalized_ms, t.throughput) for t in tried if t.normalized_ms is not None]
        rates, latencies_ms, throughputs = zip(*stable, strict=True) if stable else ((), (), ())
        samples = {
            **{"stable_rate": rates, "normalized_ms": latencies_ms, "stable_throughput": throughputs},
            "unstable_rate": tuple(t.rate for t in tried if t.normalized_ms is None),
            "unstable_throughput": tuple(t.throughput for t in tried if t.normalized_ms is None),
        }
        traces = [(t.rate, ms) for t in tried for ms in t.trace_ms]
        samples |= {
            "trace_rate": tuple(rate for rate, ms in traces if ms is not None),
            "trace_ms": tuple(ms for _, ms in traces if ms is not None),
            "unstable_trace_rate": tuple(rate for rate, ms in traces if ms is None),
            "lag_p99_ms": tuple(t.lag_ms for t in tried),
        }
        most = max(t.throughput for t in tried)
        peak = Quantity("peak_throughput", "most requests finished", "req/s", most, is_more_better=True, source=source)
        return Measured((rate, slo, peak), samples, now())

    def doubts(self, session: Subject, part: Part) -> tuple[Warning, ...]:
        assert isinstance(part, Measured)
        return late_load(part.samples["lag_p99_ms"])
