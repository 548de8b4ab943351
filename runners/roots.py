"""The modules that a cell starts from: its record is as old as they and all that they import."""

from models import registry as models
from results.cell import Cell
from runners.machine.installation import PREFIX
from runners.measurements.registry import plan
from runners.showings import registry as showings
from systems import registry as systems

NO_FILE = ("custom", models.PIPELINE, *models.SERVED)  # names that no file of the zoo has
EVERY_CELL = ("runners.cell.worker", "runners.cell.measuring", "runners.measurements.correctness")


def roots(cell: Cell) -> tuple[str, ...]:
    """The process that every cell has, and the files of its model, its system and its runner, sorted.

    A runner that shows something of every model and every system starts from all of them.
    """
    runner: tuple[str, ...]
    if showings.is_showing(cell.runner):
        model_names, system_names = models.names(), systems.names()
        runner = (type(showings.showing(cell.runner)).__module__,)
    else:
        model_names, system_names = [cell.model.name], [cell.system.name]
        wanted = plan(cell.runner)
        session = wanted.composition.session.partition(":")[0]
        runner = (*(type(m).__module__ for m in wanted.measurements), wanted.composition.__module__, session)
    names = (
        *(name.removeprefix(PREFIX) for name in runner),
        *(models.module_name(name).removeprefix(PREFIX) for name in model_names if name not in NO_FILE),
        *(f"systems{systems.place(name)}" for name in system_names),
    )
    return tuple(sorted({*EVERY_CELL, *names}))
