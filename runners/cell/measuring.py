"""What is measured of a cell, in its order.

Invariant: nothing is timed after a profiler was in the process, nor of a cell that is not seen to be correct.
"""

import os
from dataclasses import replace

from results.calls import Correctness
from results.record import Record
from results.warning import Warning
from runners.machine.cpu_load import MOST_OTHER_LOAD, CpuLoad
from runners.machine.environment import cores
from runners.measurements.base import NOT_YET, Measurement
from runners.measurements.parts import owing, placed
from runners.measurements.registry import ALWAYS, plan

from .session import Session
from .summaries import compilation_of, summary_of


def measured(session: Session, record: Record, *, is_profiled: bool = True) -> Record:
    """Prepare the session's cell and measure what its runner asks for.

    Args:
        session: loaded, not prepared.
        record: what is known of the cell before.
        is_profiled: False leaves what needs a profiler pending.

    Returns:
        The record with all that was measured.

    Raises:
        Unsupported: the system cannot run the model.
    """
    wanted = plan(session.cell.runner)
    session.before_preparing()
    for measurement in wanted.first:
        measurement.before_preparing(session)
    preparation_s = session.prepare()
    record = replace(
        record,
        status="ok",
        reason=None,
        preparation_s=preparation_s,
        operator_threads=session.operator_threads,
        schedule=summary_of(session),
        compilation=compilation_of(session),
        warnings=(*record.warnings, *session.notices),
    )
    for measurement in wanted.first:
        record = _with(record, measurement, session)
    (correctness,) = (m for m in wanted.measurements if m.name == ALWAYS)
    record = _with(record, correctness, session)
    assert isinstance(record.correctness, Correctness)
    if not record.correctness.is_correct:
        status = "incorrect" if record.correctness.is_checked else "unchecked"
        return replace(record, status=status, reason=record.correctness.reason)
    record = replace(record, warnings=(*record.warnings, *session.settle()))
    load = CpuLoad(os.getppid())  # the sweep's process: what else it runs is no other's
    for measurement in wanted.timed:
        record = _with(record, measurement, session)
    if session.device == "cpu" and session.is_clock_real and (share := load.share_of_others()) > MOST_OTHER_LOAD:
        record = replace(record, warnings=(*record.warnings, Warning("busy_cpu", {"load": share, "cores": cores()})))
    record = owing(record, tuple(m.name for m in wanted.profiled), NOT_YET)
    return profiled(session, record) if is_profiled else record


def profiled(session: Session, record: Record) -> Record:
    """What the record owes, all of which needs a profiler."""
    wanted = [m for m in plan(session.cell.runner).profiled if m.name in record.pending]
    for measurement in wanted:
        measurement.before_profiling(session)
    for measurement in wanted:
        record = _with(record, measurement, session)
    return replace(record, pending=())


def _with(record: Record, measurement: Measurement, session: Session) -> Record:
    session.phase(measurement.name.replace("_", " "))
    part = measurement.measure(session)
    doubts = measurement.doubts(session, part)
    return placed(replace(record, warnings=(*record.warnings, *doubts)), measurement.name, part)
