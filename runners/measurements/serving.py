"""runner=serving: requests of a trace go through a server, and what their client saw is kept."""

from __future__ import annotations

from typing import Protocol, cast

from results.latencies import lag_p99_ms
from results.quantity import Quantity
from results.record import Record
from results.serving import Serving
from results.warning import Warning
from runners.serving.options import ServingOptions

from .base import DASH, Column, Measurement, Part, Row, ServingComposition, late_load
from .subject import Subject


class ServingSubject(Subject, Protocol):
    """A session that serves."""

    def serve(self) -> Serving:
        """Every trace through the server."""


class ServingRun(ServingComposition):
    """A cell that serves."""

    name = "serving"
    Options = ServingOptions
    session = "runners.serving.session:ServingSession"
    shown_first = ("req/s", "tokens/s", "normalized ms")


def _quantity(record: Record, name: str) -> Quantity | None:
    part = record.described.get("serving")
    return part.quantity(name) if part else None


def _number(record: Record, name: str) -> str:
    quantity = _quantity(record, name)
    return DASH if quantity is None or quantity.value is None else _text(quantity.value) + _label(quantity)


def _label(quantity: Quantity) -> str:
    """What no engine has served says so."""
    return " (simulated)" if quantity.source else ""


def _text(value: float) -> str:
    """Three digits at least, and no power of ten."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _latency(record: Record, name: str) -> str:
    """Its median, p90 and p99 in milliseconds, or why there are none."""
    percentiles = [_quantity(record, f"{name}_p{percentile}_ms") for percentile in (50, 90, 99)]
    if percentiles[0] is None:
        return DASH
    if percentiles[0].value is None:
        return f"none: {percentiles[0].reason}"
    numbers = [_text(quantity.value) for quantity in percentiles if quantity is not None and quantity.value is not None]
    return ", ".join(numbers) + _label(percentiles[0])


class ServingMeasurement(Measurement):
    """What a client sees of a server."""

    name = "serving"
    Options = ServingOptions
    place = 36
    columns = (
        Column("req/s", 0, lambda record: _number(record, "request_throughput"), "requests finished a second"),
        Column("tokens/s", 0, lambda record: _number(record, "output_throughput"), "tokens generated a second"),
        Column("normalized ms", 0, lambda record: _number(record, "normalized_p50_ms"), "latency a token, median"),
        Column("TTFT p99", 2, lambda record: _number(record, "ttft_p99_ms"), "ms to the first token"),
        Column("ITL p99", 2, lambda record: _number(record, "itl_p99_ms"), "ms between tokens"),
        Column("at once", 3, lambda record: _number(record, "batch_size"), "requests of an iteration, mean over time"),
        Column("in vain", 3, lambda record: _number(record, "vain_tokens"), "share of tokens computed for nobody"),
    )
    rows = (
        Row("requests a second", lambda record: _number(record, "request_throughput")),
        Row("tokens a second, generated", lambda record: _number(record, "output_throughput")),
        Row("tokens a second, with prompts", lambda record: _number(record, "total_throughput")),
        Row("requests a second within the SLO", lambda record: _number(record, "goodput")),
        Row("normalized latency, ms a token: median, p90, p99", lambda record: _latency(record, "normalized")),
        Row("time to first token, ms", lambda record: _latency(record, "ttft")),
        Row("time per output token, ms", lambda record: _latency(record, "tpot")),
        Row("between tokens, ms", lambda record: _latency(record, "itl")),
        Row("end to end, ms", lambda record: _latency(record, "end_to_end")),
        Row("in the queue, ms", lambda record: _latency(record, "queued")),
        Row("requests of an iteration, mean over time", lambda record: _number(record, "batch_size")),
        Row("share of K/V slots in use", lambda record: _number(record, "slot_use")),
        Row("share of tokens computed in vain", lambda record: _number(record, "vain_tokens")),
        Row("iterations", lambda record: _number(record, "iterations")),
        Row("load generator's lag, p99 ms", lambda record: _number(record, "lag_p99_ms")),
    )
    options: ServingOptions

    def measure(self, session: Subject) -> Part:
        return cast(ServingSubject, session).serve()

    def doubts(self, session: Subject, part: Part) -> tuple[Warning, ...]:
        assert isinstance(part, Serving)
        return late_load([lag_p99_ms(trace.requests) for trace in part.traces])

    def missing(self, reason: str) -> Part:
        return Serving((Quantity("request_throughput", "request throughput", "req/s", None, reason=reason),), (), 0, "real")
