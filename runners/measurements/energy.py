"""Energy: joules of a call and of a sample, from the GPU's own counter.

NVML counts the millijoules of the whole card since its driver was loaded. Idle power is not subtracted, and neither is what
other processes on the card take: a record warns of those. The counter moves in steps, every 20 to 100 ms.

Invariant: a window begins and ends at a step, so that the energy between its two ends is that of the calls between them, but
for one chunk of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

from results.quantity import Measured, Quantity
from results.record import Record, now
from results.statistics import describe
from runners.cell.calls import Call, sample, synchronize
from runners.checks import BadRequest, is_positive
from runners.machine import card

from .base import DASH, Column, Measurement, Part, Row
from .subject import Subject

CHUNK_S = 0.005  # of calls back to back, between two looks at the counter
FINEST = 0.01  # a step of the counter over the total, at most
MOST_S = 20.0  # whatever the counter's resolution
WINDOWS = 10  # of which each has a value of its own
SOURCE = "NVML's energy counter, idle power included"
NO_COUNTER = "a CPU has no energy counter that NVML reads"

PER_CALL = Quantity("joules_per_call", "energy a call", "J", None, source=SOURCE)
PER_SAMPLE = Quantity("joules_per_sample", "energy a sample", "J", None, source=SOURCE)


@dataclass(frozen=True)
class EnergyOptions:
    """energy_s: seconds of calls at least."""

    energy_s: float

    def __post_init__(self) -> None:
        if not is_positive(self.energy_s) or self.energy_s > MOST_S:
            raise BadRequest(f"runner.energy_s={self.energy_s} is not a number of seconds above 0 and up to {MOST_S:g}")


@dataclass(frozen=True)
class Step:
    """The counter has moved. calls: since the beginning. millijoules: what it shows."""

    calls: int
    millijoules: int


def steps_of(call: Call, device: str, read: Callable[[], int], least_s: float, chunk_calls: int) -> list[Step]:
    """Call back to back, and note each step of the counter.

    Ends after `least_s` seconds, once the largest step is at most FINEST of the total; after MOST_S in any case.

    Args:
        call: one call of the prepared system.
        device: "cpu" or "cuda".
        read: the counter, in millijoules.
        least_s: seconds at least.
        chunk_calls: calls between two looks at the counter.
    """
    steps: list[Step] = []
    num_calls, last, begin = 0, read(), perf_counter()
    while True:
        for _ in range(chunk_calls):
            call()
        synchronize(device)
        num_calls += chunk_calls
        if (value := read()) != last:
            steps.append(Step(num_calls, value))
            last = value
        seconds = perf_counter() - begin
        if seconds >= MOST_S or (seconds >= least_s and is_fine(steps)):
            return steps


def is_fine(steps: Sequence[Step]) -> bool:
    """Is every step of the counter small against the total?"""
    if len(steps) <= WINDOWS:
        return False
    sizes = [after.millijoules - before.millijoules for before, after in pairwise(steps)]
    return max(sizes) <= FINEST * sum(sizes)


def joules_per_call(steps: Sequence[Step]) -> tuple[float, ...]:
    """Of each of up to WINDOWS windows, each from one step of the counter to another."""
    count = min(WINDOWS, len(steps) - 1)
    ends = [steps[i * (len(steps) - 1) // count] for i in range(count + 1)]
    return tuple((b.millijoules - a.millijoules) / 1e3 / (b.calls - a.calls) for a, b in pairwise(ends))


def measure(call: Call, device: str, batch: int, visible_device: str, least_s: float) -> Measured:
    """Joules of a call and of a sample: the median over windows, with its 95 % interval. Null with a reason where the card
    has no counter.
    """
    if device != "cuda":
        return missing(NO_COUNTER)
    try:
        with card.energy_counter(visible_device) as read:
            read()
            expected_s = min(sample(call, device, 3)) / 1e3
            steps = steps_of(call, device, read, least_s, max(1, int(CHUNK_S / expected_s)))
    except card.Unavailable as error:
        return missing(str(error))
    if len(steps) < 2:
        return missing("NVML's energy counter did not move")
    joules = joules_per_call(steps)
    statistics = describe(joules)
    quantities = (
        _filled(PER_CALL, statistics.median, statistics.ci95, 1),
        _filled(PER_SAMPLE, statistics.median, statistics.ci95, batch),
    )
    return Measured(quantities, {"joules_per_call": joules}, now())


def _filled(quantity: Quantity, value: float, ends: tuple[float, float], divisor: int) -> Quantity:
    low, high = ends
    return Quantity(
        quantity.name,
        quantity.heading,
        quantity.unit,
        value / divisor,
        low / divisor,
        high / divisor,
        source=quantity.source,
    )


def missing(reason: str) -> Measured:
    """Both quantities, without a value."""
    return Measured(
        tuple(Quantity(q.name, q.heading, q.unit, None, reason=reason) for q in (PER_CALL, PER_SAMPLE)), {}, now()
    )


def _quantity(record: Record, name: str) -> Quantity | None:
    part = record.measured.get("energy")
    return part.quantity(name) if part else None


def _short(record: Record) -> str:
    quantity = _quantity(record, PER_CALL.name)
    return DASH if quantity is None or quantity.value is None else f"{quantity.value:.3g}"


def _long(record: Record, name: str) -> str:
    quantity = _quantity(record, name)
    if quantity is None:
        return DASH
    if quantity.value is None:
        return f"none: {quantity.reason}"
    return f"{quantity.value:.3g} [{quantity.low:.3g}, {quantity.high:.3g}] J"


class Energy(Measurement):
    """What the GPU takes from the wall for a call."""

    name = "energy"
    Options = EnergyOptions
    place = 35
    columns = (Column("J", 3, _short, "energy of a call, the GPU's idle power included"),)
    rows = (
        Row("energy of a call", lambda record: _long(record, PER_CALL.name)),
        Row("energy of a sample", lambda record: _long(record, PER_SAMPLE.name)),
    )
    options: EnergyOptions

    def measure(self, session: Subject) -> Part:
        if session.device == "cuda":
            session.warm_up()
        return measure(session.call, session.device, session.cell.batch, session.visible_device, self.options.energy_s)

    def missing(self, reason: str) -> Part:
        return missing(reason)
