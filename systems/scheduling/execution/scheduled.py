"""What every executor of schedules is."""

from systems.base import Prepared
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import Schedule


class Scheduled(Prepared):
    """A program that is executed by a schedule.

    Args:
        program: as executed: rewritten, its merges lowered.
        schedule: of that program.
    """

    program: Program
    schedule: Schedule
