"""`system=custom`: a scheduler that is one function of the user's own."""

import importlib
import os
import sys
from collections.abc import Callable

from conf import nearest
from conf.own_code import module_hint, with_own_line
from conf.text import named_line
from systems.base import BadOption, Unsupported
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.scheduler import Scheduler

EXAMPLE = "mypkg.mymodule:plan, with plan(program: Program) -> Schedule"


class PlanFailed(RuntimeError):
    """The function raised an error; the message names it and the line, in one line."""


class Custom(Scheduler):
    """A scheduler made of one function.

    Args:
        plan: "package.module:function". The working directory comes first on the import path from here on, as under
            `python -m`.
        switches: those of `Rewriting`.

    Raises:
        BadOption: there is no such function.
    """

    name = "custom"

    def __init__(self, plan: str | None = None, **switches: bool):
        super().__init__(**switches)
        if not plan:
            raise BadOption(f"system custom needs system.plan={EXAMPLE}")
        self.path = plan
        self.function = _import(plan)

    def plan(self, program: Program) -> Schedule:
        """What the function gives. Raises PlanFailed where it raises, and BadOption where it gives something else."""
        try:
            schedule = self.function(program)
        except (Unsupported, BadOption, MemoryError):
            raise
        except Exception as error:
            raise PlanFailed(with_own_line(f"system.plan={self.path} raised {named_line(error)}", error)) from error
        if not isinstance(schedule, Schedule):
            raise BadOption(f"system.plan={self.path} returned a {type(schedule).__name__}, not a Schedule")
        return schedule


def _import(path: str) -> Callable[[Program], object]:
    module_name, colon, attribute = str(path).partition(":")
    if not (colon and module_name and attribute):
        raise BadOption(f"system.plan={path} is not of the form {EXAMPLE}")
    if hint := module_hint(module_name, attribute):
        raise BadOption(f"system.plan={path}: {hint}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise BadOption(f"system.plan={path}: there is no module {error.name} in {os.getcwd()} or installed") from error
        raise BadOption(
            with_own_line(f"system.plan={path}: importing {module_name} raised {named_line(error)}", error)
        ) from error
    except (Exception, SystemExit) as error:
        raise BadOption(
            with_own_line(f"system.plan={path}: importing {module_name} raised {named_line(error)}", error)
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        hint = nearest(attribute, public, otherwise="it has no functions")
        raise BadOption(f"system.plan={path}: module {module_name} has no function {attribute!r}; {hint}")
    return function
