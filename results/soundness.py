"""What readers of a record rely on beyond the types of its fields: a file is a record only where all of it holds."""

import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import pairwise
from math import isfinite
from typing import TypeGuard

from .record import Record
from .words import printable

LARGEST = 1e19  # of any number: seeds end just below it, and ratios of two such numbers are still finite
LEAST = 1e-9  # of what is divided by: seconds, milliseconds, samples a second
NUMBERS = {int, float}
MAY_DIVERGE = "correctness"  # the part whose numbers may be infinite, or none at all


def plain_document(value: object, *, is_bounded: bool = True) -> object:
    """JSON data with printable texts. Raises ValueError for a number that no table or chart can show.

    is_bounded: whether numbers have to be finite and at most LARGEST.
    """
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(k): plain_document(v, is_bounded=is_bounded and k != MAY_DIVERGE) for k, v in value.items()}
    if isinstance(value, list):
        if are_numbers(value) and not (is_bounded and _has_unbounded(value)):
            return value
        return [plain_document(entry, is_bounded=is_bounded) for entry in value]
    if isinstance(value, int | float) and is_bounded and not -LARGEST <= value <= LARGEST:
        raise ValueError(f"it holds {value:.0e}" if isinstance(value, float) else "it holds a number that is too large")
    return value


def are_numbers(values: list[object]) -> TypeGuard[list[float]]:
    """Whether JSON data hold nothing but numbers; true and false are none."""
    return NUMBERS.issuperset(map(type, values))


def _has_unbounded(numbers: list[float]) -> bool:
    """Whether one is no number or beyond LARGEST, by what Python does for all of a list at once."""
    return bool(numbers) and not (min(numbers) >= -LARGEST and max(numbers) <= LARGEST and isfinite(sum(numbers)))


def flaw(record: Record) -> str | None:
    """The first thing in a record that no run writes; None in a sound one."""
    return next(_flaws(record), None)


def _flaws(record: Record) -> Iterator[str]:
    if not re.fullmatch("[0-9a-f]{16}", record.id):
        yield f"its id is {record.id!r}, not 16 hexadecimal digits"
    try:
        datetime.fromisoformat(record.when)
    except ValueError:
        yield f"when: {record.when!r} is no time"
    cell = record.cell
    if cell.batch < 1:
        yield f"its batch is {cell.batch}"
    for choice in (cell.model, cell.system, cell.runner):
        if strange := set(choice.changed) - set(choice.options):
            yield f"{choice.choice} changes the option {min(strange)}, which it does not have"
    for name, numbers in _divisors(record):
        if min(numbers, default=LEAST) < LEAST:
            yield f"{name}: a number is below {LEAST:g}"
    for name, samples in _samples(record):
        if not samples:
            yield f"{name}: there is no sample"
    for name, measured in record.described.items():
        if any((quantity.low is None) != (quantity.high is None) for quantity in measured.quantities):
            yield f"{name}: an interval has one end"
    course = record.active_warps.estimated_course if record.active_warps is not None else None
    if course is not None and any(begin >= end for begin, end in pairwise(course.moments)):
        yield "active_warps.estimated_course: its moments do not ascend"


def _samples(record: Record) -> Iterator[tuple[str, Iterable[float]]]:
    """What has to hold a sample at least, by name."""
    if record.latency is not None:
        yield "latency.host_ms", record.latency.host_ms
        if record.latency.device is not None:
            yield "latency.device_ms", record.latency.device_ms or ()
    if record.throughput is not None:
        yield "throughput.runs", record.throughput.runs
    if record.comparison is not None:
        yield "comparison.rounds", tuple(call for turn in record.comparison.rounds for call in turn)
        yield from (("comparison.rounds", turn) for turn in record.comparison.rounds)
        if record.comparison.again is not None:
            yield from (("comparison.again", turn) for turn in record.comparison.again)


def _divisors(record: Record) -> Iterator[tuple[str, Iterable[float]]]:
    """What is divided by, or shown on a logarithmic axis, by name."""
    yield from _samples(record)
    described = {
        "latency.host": record.latency.host if record.latency else None,
        "latency.device": record.latency.device if record.latency else None,
        "throughput.statistics": record.throughput.statistics if record.throughput else None,
    }
    for name, s in described.items():
        if s is not None:
            yield name, (s.median, *s.ci95, s.min, s.p10, s.p90, s.p99, s.mean)
    if record.limits is not None:
        for limits in (record.limits, record.limits.executed):
            yield "limits", [n for n in (limits.critical_path_ms, limits.busy_ms) if n is not None]
