"""Where the parts of a record have their places."""

from dataclasses import fields, replace

from results.limits import Limits
from results.quantity import Measured
from results.record import Record

from .base import Part
from .registry import plan

FIELDS = {field.name for field in fields(Record)}


def placed(record: Record, name: str, part: Part) -> Record:
    """The record with a part in its field, or among the measurements that have no type of their own."""
    if isinstance(part, Measured):
        return replace(record, measured=record.measured | {name: part})
    assert name in FIELDS, f"{type(part).__name__} of {name} has no field in a record"
    return replace(record, **{name: part})  # type: ignore[arg-type]


def owing(record: Record, names: tuple[str, ...], reason: str) -> Record:
    """The record with these measurements pending, and the reason in their place."""
    return replace(without(record, names, reason), pending=names)


def without(record: Record, names: tuple[str, ...], reason: str) -> Record:
    """The record with a reason in the place of these measurements, none of them pending."""
    for measurement in plan(record.cell.runner).measurements:
        if measurement.name in names:
            record = placed(record, measurement.name, measurement.missing(reason))
    return replace(record, pending=())


def limits_of_model(record: Record) -> Limits | None:
    """What siblings need not measure again: the limits of the model's own operators."""
    limits = record.limits
    return None if limits is None or limits.critical_path_ms is None else replace(limits, rewritten=None)
