"""What a record keeps of a prepared system, as the plain types of results/."""

from results.document import part_from_json
from results.schedule import Compilation, ScheduleSummary

from .session import Session


def summary_of(session: Session) -> ScheduleSummary | None:
    """The schedule that runs, in numbers."""
    if session.schedule is None:
        return None
    summary: ScheduleSummary = part_from_json(session.schedule.summary(), ScheduleSummary)
    return summary


def compilation_of(session: Session) -> Compilation | None:
    """What a compiler says of its work."""
    compilation = session.compilation
    if compilation is None:
        return None
    part: Compilation = part_from_json(compilation.to_json(), Compilation)
    return part
