"""What every executor of schedules is."""

from collections.abc import Callable

from systems.base import Prepared
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import Schedule

from .members import Members


class Scheduled(Prepared):
    """A program that is executed by a schedule.

    Args:
        program: as executed: rewritten, its merges lowered.
        schedule: of that program.
        module_members: of the module in whose place it is called; None where the caller sees to them.
    """

    program: Program
    schedule: Schedule
    module_members: Members | None = None

    def check_module(self, may_go_on: Callable[[], bool] | None = None) -> None:
        """Raise RuntimeError where the module has other members, or another form, than the program was captured with.

        may_go_on: as of Members.check.
        """
        if self.module_members is not None:
            self.module_members.check(may_go_on)
