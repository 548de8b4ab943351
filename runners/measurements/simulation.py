"""runner=simulation: traces served for real, and again under a virtual clock with the costs of this engine's iterations.

How near the two are says how far a simulation of this engine may be trusted: no simulated number is one of a real engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Protocol, cast

from results.quantity import Measured, Quantity
from results.record import Record, now
from results.warning import Warning
from runners.serving.options import SimulationOptions

from .base import DASH, Column, Measurement, Part, ServingComposition, late_load
from .subject import Subject

SOURCE = "virtual clock, with measured costs of iterations"
UNSTABLE = "requests came faster than they were finished, or too few to tell"


class ClockedTrace(Protocol):
    """One trace under two clocks: rates and throughputs in requests a second, medians of normalized latencies or None.

    lag_ms: of the real load generator, p99.
    """

    @property
    def rate(self) -> float: ...
    @property
    def real_throughput(self) -> float: ...
    @property
    def virtual_throughput(self) -> float: ...
    @property
    def real_ms(self) -> float | None: ...
    @property
    def virtual_ms(self) -> float | None: ...
    @property
    def lag_ms(self) -> float: ...


class SimulationSubject(Subject, Protocol):
    """A session that serves its traces under both clocks, and says what costs the virtual one goes by."""

    def both_clocks(self) -> tuple[Sequence[ClockedTrace], Mapping[str, tuple[float, ...]]]: ...


class SimulationRun(ServingComposition):
    """A cell that serves, under two clocks."""

    name = "simulation"
    Options = SimulationOptions
    session = "runners.serving.session:ServingSession"


def _ratio(record: Record, name: str) -> str:
    part = record.measured.get("simulation")
    quantity = part.quantity(name) if part else None
    return DASH if quantity is None or quantity.value is None else f"{quantity.value:.3f}"


class Simulation(Measurement):
    """Real and simulated throughput and normalized latency of the same traces."""

    name = "simulation"
    Options = SimulationOptions
    place = 39
    columns = (
        Column("simulated req/s", 0, lambda record: _ratio(record, "throughput_ratio"), "throughput, simulated over real"),
        Column(
            "simulated ms", 0, lambda record: _ratio(record, "normalized_ratio"), "normalized latency, simulated over real"
        ),
    )

    def measure(self, session: Subject) -> Part:
        """The ratios that are farthest from 1 over all rates, and the numbers of each rate."""
        traces, costs = cast(SimulationSubject, session).both_clocks()
        rates = sorted({trace.rate for trace in traces})
        throughput = _Pairs("throughput", "req/s", traces, lambda t: (t.real_throughput, t.virtual_throughput))
        normalized = _Pairs("normalized", "ms", traces, lambda t: (t.real_ms, t.virtual_ms))
        quantities, samples = [], {"rate": tuple(trace.rate for trace in traces), **costs}
        samples["lag_p99_ms"] = tuple(trace.lag_ms for trace in traces)
        for pairs in (throughput, normalized):
            quantities.append(pairs.farthest(rates))
            for rate in rates:
                quantities += pairs.at(rate)
            samples |= pairs.samples()
        return Measured(tuple(quantities), samples, now())

    def doubts(self, session: Subject, part: Part) -> tuple[Warning, ...]:
        assert isinstance(part, Measured)
        return late_load(part.samples["lag_p99_ms"])


class _Pairs:
    """A number of each trace under both clocks, where it has both.

    Args:
        name, unit: of the number.
        traces: every one.
        pair: a trace's two numbers, the real one first.
    """

    def __init__(
        self,
        name: str,
        unit: str,
        traces: Sequence[ClockedTrace],
        pair: Callable[[ClockedTrace], tuple[float | None, float | None]],
    ):
        self.name, self.unit = name, unit
        numbers = [(trace.rate, *pair(trace)) for trace in traces]
        self.numbers = [(rate, real, virtual) for rate, real, virtual in numbers if real is not None and virtual is not None]

    def ratio(self, rate: float) -> float | None:
        """Of the medians at a rate, simulated over real; None where it has no such number."""
        reals, virtuals = self._at(rate)
        return median(virtuals) / median(reals) if reals else None

    def farthest(self, rates: Sequence[float]) -> Quantity:
        """The ratio that is farthest from 1."""
        ratios = [ratio for ratio in map(self.ratio, rates) if ratio is not None]
        value = max(ratios, key=lambda ratio: abs(ratio - 1), default=None)
        heading = f"{self.name}, simulated over real, the farthest from 1"
        return Quantity(f"{self.name}_ratio", heading, "", value, source=SOURCE, reason=UNSTABLE if value is None else None)

    def at(self, rate: float) -> list[Quantity]:
        """The numbers of a rate."""
        reals, virtuals = self._at(rate)
        reason = None if reals else UNSTABLE
        real, virtual = (median(values) if values else None for values in (reals, virtuals))
        at, where = f"at_{rate:g}", f"at {rate:g} req/s"
        return [
            Quantity(f"{self.name}_real_{at}", f"{self.name} {where}, real", self.unit, real, reason=reason),
            Quantity(
                f"{self.name}_simulated_{at}",
                f"{self.name} {where}, simulated",
                self.unit,
                virtual,
                source=SOURCE,
                reason=reason,
            ),
        ]

    def samples(self) -> dict[str, tuple[float, ...]]:
        """Of every trace that has both."""
        return {
            f"{self.name}_real": tuple(real for _, real, _ in self.numbers),
            f"{self.name}_simulated": tuple(virtual for _, _, virtual in self.numbers),
        }

    def _at(self, rate: float) -> tuple[list[float], list[float]]:
        of_rate = [(real, virtual) for each, real, virtual in self.numbers if each == rate]
        return [real for real, _ in of_rate], [virtual for _, virtual in of_rate]
