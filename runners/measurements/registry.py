"""Which measurements there are, and which of them a runner makes."""

from dataclasses import dataclass
from functools import cache

from results.cell import Choice
from runners.checks import BadRequest, one_of
from runners.discovery import classes_of

from .base import Composition, Measurement, names_of, options_of

PACKAGE = __package__
ALWAYS = "correctness"  # of every cell


@dataclass(frozen=True)
class Plan:
    """What a runner makes of a cell.

    Args:
        measurements: in the order of its file; correctness is among them.
        composition: the runner's form.
    """

    measurements: tuple[Measurement, ...]
    composition: type[Composition]

    @property
    def is_compared(self) -> bool:
        """Do its cells take part in the interleaved rounds?"""
        return any(measurement.is_compared for measurement in self.measurements)

    @property
    def first(self) -> tuple[Measurement, ...]:
        """What comes before correctness."""
        return tuple(m for m in self.measurements if m.is_first)

    @property
    def timed(self) -> tuple[Measurement, ...]:
        """What comes after correctness, in a process without a profiler."""
        return tuple(m for m in self.measurements if not (m.is_first or m.needs_profiler or m.name == ALWAYS))

    @property
    def profiled(self) -> tuple[Measurement, ...]:
        """What comes last, with a profiler."""
        return tuple(m for m in self.measurements if m.needs_profiler)


@cache
def measurements() -> dict[str, type[Measurement]]:
    """Every measurement by name."""
    return classes_of(PACKAGE, Measurement)  # type: ignore[type-abstract]


@cache
def compositions() -> dict[str, type[Composition]]:
    """The runners of several measurements that are more than their list, by name."""
    return classes_of(PACKAGE, Composition)


def plan(runner: Choice) -> Plan:
    """What `runner` makes.

    Raises:
        BadRequest: a name is no measurement's, the options are wrong, or nothing reads one that was changed.
    """
    listed = runner.get("measurements")
    names = [runner.name] if listed is None else str(listed).split()
    composition = compositions().get(runner.name, Composition)
    known = [name for name, kind in measurements().items() if runner.options.keys() >= names_of(kind.Options)]
    possible = composition.possible or known
    for name in names:
        one_of("runner" if listed is None else "runner.measurements", name, possible)
    if len(set(names)) < len(names):
        raise BadRequest(f"runner.measurements={listed} names one of them twice")
    options = options_of(composition.Options, runner)
    wanted = [measurements()[name](runner) for name in dict.fromkeys((ALWAYS, *names))]
    for key, reason in options.unread.items():
        if key in runner.changed:
            raise BadRequest(f"nothing reads runner.{key}={runner.get(key)}: {reason}")
    return Plan(tuple(wanted), composition)


def in_order_of_columns() -> list[type[Measurement]]:
    """Every measurement, as tables show them."""
    return sorted(measurements().values(), key=lambda measurement: (measurement.place, measurement.name))
