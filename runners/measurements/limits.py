"""Limits: the critical path of a model's operators, and the time that all of them take together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from results.document import part_from_json
from results.limits import Limits as LimitsPart
from results.record import Record, now
from results.words import one_line

from .base import DASH, Column, Measurement, Part, Row
from .subject import Subject

if TYPE_CHECKING:
    from systems.scheduling.graph.program import Program

DISTANCE = " ms, latency is {:.2f} times that"


def of_model(session: Subject) -> LimitsPart:
    """Those of the model's own operators, the same for every system. Null with a reason where it cannot be captured."""
    from runners.cell.shape import counts_of
    from systems.base import Unsupported

    try:
        limits = measured(session, None if session.is_rewritten else session.program)
    except Unsupported as error:
        limits = LimitsPart(None, None, reason=one_line(str(error)))
    counts = counts_of(session.cell.model, session.cell.batch)
    return replace(limits, macs=counts.macs if counts is not None else None)


def measured(session: Subject, program: Program | None) -> LimitsPart:
    """Those of a program of the session's model; of its own operators where there is none. Raises Unsupported."""
    from systems.profiling import limits

    part: LimitsPart = part_from_json(limits.measure(session.module, session.inputs, program).to_json(), LimitsPart)
    return part


def _distance(record: Record, limit_ms: float | None, form: str) -> str:
    """A limit, and the latency over it where there is one."""
    if limit_ms is None:
        return DASH
    over = form.format(record.host_ms / limit_ms) if record.host_ms is not None and limit_ms else ""
    return f"{limit_ms:.3f}{over}"


def _critical_path(record: Record, form: str) -> str:
    return _distance(record, record.limits.executed.critical_path_ms if record.limits else None, form)


def _busy(record: Record, form: str) -> str:
    return _distance(record, record.limits.executed.busy_ms if record.limits else None, form)


def _area(record: Record, form: str) -> str:
    return _distance(record, record.limits.executed.sm_area_ms if record.limits else None, form)


def _traffic(record: Record, form: str) -> str:
    return _distance(record, record.limits.executed.traffic_ms if record.limits else None, form)


def _launch(record: Record, form: str) -> str:
    return _distance(record, record.limits.executed.launch_ms if record.limits else None, form)


def _bound(record: Record) -> str:
    """The largest of the limits, and the latency over it."""
    bounds = record.limits.executed.bounds if record.limits else {}
    return next((f"{name}, {_distance(record, ms, DISTANCE)}" for name, ms in bounds.items()), DASH)


class Limits(Measurement):
    """How fast any schedule of these operators could be."""

    name = "limits"
    needs_profiler = True
    place = 70
    columns = (
        Column(
            "limit ms",
            4,
            lambda record: _critical_path(record, " ({:.1f}x)"),
            "critical path of the operators (latency over it)",
        ),
    )
    rows = (
        Row("critical path of the operators", lambda record: _critical_path(record, DISTANCE)),
        Row("SM area of the kernels", lambda record: _area(record, DISTANCE)),
        Row("memory traffic of a call", lambda record: _traffic(record, DISTANCE)),
        Row("launch of as many kernels", lambda record: _launch(record, DISTANCE)),
        Row("bounded by", _bound),
        Row("sum of the operators", lambda record: _busy(record, DISTANCE)),
    )

    def measure(self, session: Subject) -> Part:
        limits = session.known_limits or of_model(session)
        # What passes make of the model has limits of its own, beside the model's.
        rewritten = measured(session, session.program) if session.is_rewritten else None
        return replace(limits, rewritten=rewritten, when=now())

    def missing(self, reason: str) -> Part:
        return LimitsPart(None, None, reason=reason)
