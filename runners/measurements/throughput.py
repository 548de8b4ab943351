"""Throughput: calls back to back, without a synchronisation between them."""

from __future__ import annotations

from time import perf_counter

from results.calls import Throughput as ThroughputPart
from results.record import Record
from results.statistics import describe
from runners.cell.calls import Call, sample, synchronize

from .base import Column, Measurement, Part, Row, number_or_dash
from .subject import Subject

RUNS = 5
RUN_SECONDS = 0.2
FEWEST_CALLS, MOST_CALLS = 4, 1000
EXPECTED_CALLS = 3  # whose shortest says how many calls fill a run


def measure(call: Call, device: str, batch: int, expected_ms: float) -> ThroughputPart:
    """Samples per second over RUNS runs. A run has as many calls of `expected_ms` as fill RUN_SECONDS; it ends in a
    synchronisation.
    """
    num_calls = int(min(MOST_CALLS, max(FEWEST_CALLS, RUN_SECONDS * 1e3 / expected_ms)))
    rates = []
    for _ in range(RUNS):
        synchronize(device)
        start = perf_counter()
        for _ in range(num_calls):
            call()
        synchronize(device)
        rates.append(num_calls * batch / (perf_counter() - start))
    return ThroughputPart(num_calls, tuple(rates), describe(rates))


def _median(record: Record, unit: str = "") -> str:
    return number_or_dash(record.throughput.statistics.median if record.throughput else None, "{:,.1f}" + unit)


class Throughput(Measurement):
    """Samples per second of calls that follow each other."""

    name = "throughput"
    place = 20
    columns = (Column("samples/s", 2, _median),)
    rows = (Row("throughput", lambda record: _median(record, " samples/s")),)

    def measure(self, session: Subject) -> Part:
        session.warm_up()
        expected_ms = min(sample(session.call, session.device, EXPECTED_CALLS))
        return measure(session.call, session.device, session.cell.batch, expected_ms)
