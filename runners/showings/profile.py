"""runner=profile: each kernel of a model alone, and what schedules of it take, in one file that needs no GPU to be read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import conf
from conf.text import counted
from results.cell import Cell
from runners.checks import BadRequest, at_least
from runners.request.request import Request

from .asking import Document, write_answer
from .base import Showing

TIMES = 2  # that each schedule is measured


@dataclass(frozen=True)
class ProfileOptions:
    """Args:
    schedules: Choices of conf/system beside the request's own.
    random_schedules: How many are drawn.
    merged_forms: Of the program, over which these are spread too.
    """

    schedules: str
    random_schedules: int
    merged_forms: int

    def __post_init__(self) -> None:
        at_least("runner.random_schedules", self.random_schedules, 0)
        at_least("runner.merged_forms", self.merged_forms, 0)
        for choice in self.schedules.split():
            if choice not in (systems := conf.choices("system")):
                raise BadRequest(f"runner.schedules: no system is named {choice!r}: {conf.nearest(choice, systems)}")


class Profile(Showing):
    """Writes a set of measured schedules, compressed where the file's name ends with .gz."""

    name: ClassVar[str] = "profile"
    Options: ClassVar[type] = ProfileOptions
    writes_output: ClassVar[bool] = True
    options: ProfileOptions

    def run(self, request: Request) -> int:
        if len(request.cells) > 1:
            raise BadRequest(f"runner=profile writes one file, and {len(request.cells)} cells are asked for")

        def line(document: Document) -> str:
            operators, schedules = (counted(len(document[key]), key[:-1]) for key in ("operators", "schedules"))
            return f"{schedules} of {operators} that differ, on {document['device']}"

        return write_answer(request, line)

    def show(self, cell: Cell, visible_device: str, report: Callable[[str], None]) -> object:
        """The set as data. Raises Unsupported and what Session raises."""
        import torch

        import systems
        from runners.cell.measured_schedules import PreparedSchedules
        from runners.cell.session import Session
        from systems.base import Unsupported
        from systems.scheduling.graph.capture import capture
        from systems.scheduling.scheduler import Scheduler

        session = Session(cell, visible_device, report)
        schedulers = {}
        others = (name for name in self.options.schedules.split() if name != cell.system.choice)
        for name, system in [(cell.system.choice, session.system), *((name, systems.load(name)) for name in others)]:
            if not isinstance(system, Scheduler):
                raise Unsupported(f"{name} has no schedule of operators")
            schedulers[name] = system
        with torch.no_grad():
            program = capture(session.module, session.inputs)
            schedules = PreparedSchedules(
                cell.model.choice,
                cell.batch,
                program,
                schedulers,
                self.options.random_schedules,
                self.options.merged_forms,
                cell.conditions.seed,
                report,
            )
            schedules.profile()
            for _ in range(TIMES):
                schedules.measure()
            return schedules.result().to_json()
