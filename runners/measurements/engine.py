"""runner=engine: a batch of equal requests on the engine, without a load: figure 4.7's microbenchmark."""

from __future__ import annotations

from typing import Protocol, cast

from results.record import Measured, Quantity, Record, now
from results.statistics import describe
from runners.serving.options import EngineOptions

from .base import DASH, Column, Composition, Measurement, Part
from .subject import Subject


class EngineSubject(Subject, Protocol):
    """A session whose calls are batches of requests."""

    def batch_ms(self) -> float: ...


class EngineRun(Composition):
    """A cell whose calls are batches of requests."""

    name = "engine"
    Options = EngineOptions
    session = "runners.serving.session:EngineSession"
    learns = False


def _text(record: Record) -> str:
    part = record.measured.get("engine")
    quantity = part.quantity("batch_ms") if part else None
    return DASH if quantity is None or quantity.value is None else f"{quantity.value:.4g}"


class Engine(Measurement):
    """How long a batch takes, from its submission to its last token."""

    name = "engine"
    Options = EngineOptions
    place = 38
    columns = (Column("batch ms", 0, _text, "from the submission of a batch of equal requests to its last token"),)
    options: EngineOptions

    def measure(self, session: Subject) -> Part:
        subject = cast(EngineSubject, session)
        times_ms = tuple(subject.batch_ms() for _ in range(self.options.samples))
        statistics = describe(times_ms)
        quantity = Quantity("batch_ms", "time of a batch", "ms", statistics.median, *statistics.ci95)
        return Measured((quantity,), {"batch_ms": times_ms}, now())
