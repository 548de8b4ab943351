"""Measurements that describe themselves: a part of a record."""

from __future__ import annotations

from dataclasses import dataclass, field

from .statistics import Samples


@dataclass(frozen=True)
class Quantity:
    """One number of a measurement that describes itself.

    Args:
        name: a key, unique within the measurement ("joules_per_call").
        heading: what a table's column and a chart's axis say ("energy").
        unit: of the value ("mJ").
        value: None where it was not measured; `reason` says why.
        low, high: the ends of its 95 % interval.
        is_more_better: whether a larger value is better.
        source: where the value comes from.
        reason: why there is no value.
    """

    name: str
    heading: str
    unit: str
    value: float | None
    low: float | None = None
    high: float | None = None
    is_more_better: bool = False
    source: str | None = None
    reason: str | None = None

    @property
    def title(self) -> str:
        """The heading with the unit, where there is one."""
        return f"{self.heading}, {self.unit}" if self.unit else self.heading


@dataclass(frozen=True)
class Measured:
    """A measurement without a type of its own here: its quantities, and its samples by name."""

    quantities: tuple[Quantity, ...]
    samples: dict[str, Samples] = field(default_factory=dict)
    when: str | None = None

    def quantity(self, name: str) -> Quantity | None:
        return next((quantity for quantity in self.quantities if quantity.name == name), None)
