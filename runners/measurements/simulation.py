"""runner=simulation: traces served for real, and again under a virtual clock with the costs of this engine's iterations.

How near the two are says how far a simulation of this engine may be trusted: no simulated number is one of a real engine.
"""

from __future__ import annotations

from typing import Protocol, cast

from results.record import Measured, Quantity, Record, now
from runners.serving.options import ServingOptions

from .base import DASH, Column, Composition, Measurement, Part
from .subject import Subject

SOURCE = "virtual clock, with measured costs of iterations"
UNSTABLE = "requests came faster than they were finished"


class SimulationSubject(Subject, Protocol):
    """A session that serves its traces under both clocks."""

    def both_clocks(self) -> tuple[dict[str, tuple[float, ...]], dict[str, tuple[float, ...]]]: ...


class SimulationRun(Composition):
    """A cell that serves, under two clocks."""

    name = "simulation"
    Options = ServingOptions
    session = "runners.serving.session:ServingSession"
    learns = False


def _ratio(record: Record, name: str) -> str:
    part = record.measured.get("simulation")
    quantity = part.quantity(name) if part else None
    return DASH if quantity is None or quantity.value is None else f"{quantity.value:.3f}"


class Simulation(Measurement):
    """Real and simulated throughput and normalized latency of the same traces."""

    name = "simulation"
    Options = ServingOptions
    place = 39
    columns = (
        Column("simulated req/s", 0, lambda record: _ratio(record, "throughput_ratio"), "throughput, simulated over real"),
        Column(
            "simulated ms", 0, lambda record: _ratio(record, "normalized_ratio"), "normalized latency, simulated over real"
        ),
    )

    def measure(self, session: Subject) -> Part:
        from statistics import median

        real, virtual = cast(SimulationSubject, session).both_clocks()
        quantities = []
        for name, unit in (("throughput", "req/s"), ("normalized", "ms")):
            pair = [median(of[name]) if of[name] else None for of in (real, virtual)]
            ratio = pair[1] / pair[0] if pair[0] is not None and pair[1] is not None else None
            reason = UNSTABLE if ratio is None else None
            quantities += [
                Quantity(f"{name}_real", f"{name}, real", unit, pair[0], reason=reason),
                Quantity(f"{name}_simulated", f"{name}, simulated", unit, pair[1], source=SOURCE, reason=reason),
                Quantity(f"{name}_ratio", f"{name}, simulated over real", "", ratio, source=SOURCE, reason=reason),
            ]
        samples = {f"{name}_real": values for name, values in real.items()}
        samples |= {f"{name}_simulated": values for name, values in virtual.items()}
        return Measured(tuple(quantities), samples, now())
