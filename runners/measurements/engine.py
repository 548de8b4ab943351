"""runner=engine: a batch of equal requests on the engine, without a load: figure 4.7's microbenchmark.

Replays of an increment iteration's CUDA graph, back to back, take the device alone. What an iteration takes beyond them is
the host's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from results.quantity import Measured, Quantity
from results.record import Record, now
from results.statistics import describe
from runners.serving.options import EngineOptions

from .base import DASH, Column, Measurement, Part, Row, ServingComposition
from .subject import Subject

ONE_TOKEN = "requests of one token have no increments"
NO_GRAPH = "its iterations are no CUDA graphs of this process"
NO_WEIGHTS = "no process has all of its weights, or they are not in blocks"


class BatchTimes(Protocol):
    """Of a batch, of its prompts, and of each iteration after them."""

    @property
    def batch_ms(self) -> float: ...
    @property
    def prompts_ms(self) -> float: ...
    @property
    def increments_ms(self) -> tuple[float, ...]: ...


class EngineSubject(Subject, Protocol):
    """A session whose calls are batches of requests."""

    def batch_times(self) -> BatchTimes: ...
    def replay_ms(self) -> float | None: ...
    def prompt_flops(self) -> float | None: ...


class EngineRun(ServingComposition):
    """A cell whose calls are batches of requests."""

    name = "engine"
    Options = EngineOptions
    session = "runners.serving.session:EngineSession"


def _text(record: Record, name: str) -> str:
    part = record.measured.get("engine")
    quantity = part.quantity(name) if part else None
    return DASH if quantity is None or quantity.value is None else f"{quantity.value:.4g}"


class Engine(Measurement):
    """How long a batch takes, from its submission to its last token, and what of it is what."""

    name = "engine"
    Options = EngineOptions
    place = 38
    columns = (
        Column("batch ms", 0, lambda record: _text(record, "batch_ms"), "of a batch of equal requests, to its last token"),
        Column("increment ms", 1, lambda record: _text(record, "increment_ms"), "of an iteration without prompts"),
        Column("idle", 2, lambda record: _text(record, "idle_share"), "of that time, the device's share without work"),
    )
    rows = (
        Row("milliseconds of a batch", lambda record: _text(record, "batch_ms")),
        Row("milliseconds of its prompts", lambda record: _text(record, "prompts_ms")),
        Row("TFLOP/s of its prompts' products", lambda record: _text(record, "prompt_tflops")),
        Row("milliseconds of an increment iteration", lambda record: _text(record, "increment_ms")),
        Row("milliseconds of it by the device alone", lambda record: _text(record, "replay_ms")),
        Row("share of it that the device idles", lambda record: _text(record, "idle_share")),
    )
    options: EngineOptions

    def measure(self, session: Subject) -> Part:
        subject = cast(EngineSubject, session)
        batches, replays_ms = [], []
        for _ in range(self.options.samples):  # the replays in turn with the batches, at the same clocks
            batches.append(subject.batch_times())
            replays_ms.append(subject.replay_ms())
        increments_ms = [time_ms for batch in batches for time_ms in batch.increments_ms]
        prompts_ms = [batch.prompts_ms for batch in batches]
        by_device_ms = [time_ms for time_ms in replays_ms if time_ms is not None]
        flops = subject.prompt_flops()
        tflops = [flops / time_ms / 1e9 for time_ms in prompts_ms] if flops is not None else []
        idle = [1 - sum(by_device_ms) / len(by_device_ms) / time_ms for time_ms in increments_ms] if by_device_ms else []
        quantities = (
            _quantity("batch_ms", "time of a batch", "ms", [batch.batch_ms for batch in batches], ""),
            _quantity("prompts_ms", "time of a batch's prompts", "ms", prompts_ms, ""),
            _quantity("prompt_tflops", "products of prompts", "TFLOP/s", tflops, NO_WEIGHTS, True),
            _quantity("increment_ms", "increment iteration", "ms", increments_ms, ONE_TOKEN),
            _quantity("replay_ms", "increment iteration by the device alone", "ms", by_device_ms, NO_GRAPH),
            _quantity("idle_share", "share of an increment iteration that the device idles", "", idle, NO_GRAPH),
        )
        samples = {"batch_ms": [batch.batch_ms for batch in batches], "prompts_ms": prompts_ms}
        samples |= {"increment_ms": increments_ms, "replay_ms": by_device_ms}
        return Measured(quantities, {name: tuple(values) for name, values in samples.items() if values}, now())


def _quantity(
    name: str, heading: str, unit: str, values: Sequence[float], reason: str, is_more_better: bool = False
) -> Quantity:
    """The median; without values the reason why there is none."""
    if not values:
        return Quantity(name, heading, unit, None, is_more_better=is_more_better, reason=reason)
    statistics = describe(values)
    return Quantity(name, heading, unit, statistics.median, *statistics.ci95, is_more_better)
