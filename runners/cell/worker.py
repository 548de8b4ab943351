"""The process of one cell: commands come as JSON lines on standard input, answers go to the file descriptor given.

python -m runners.cell.worker ANSWERS_FD PARENT_PID
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from time import perf_counter
from typing import IO, TYPE_CHECKING, Any

from runners.machine.tether import die_with_parent
from systems.collector import collector_off

if TYPE_CHECKING:
    from .session import Session

NO_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # how others than torch's own exception put it


class Phases:
    """Tells of each phase of a cell as it begins, and keeps how long it took: "preparing: 12 stages" is of "preparing"."""

    def __init__(self, tell: Callable[[str], None]):
        self.tell = tell
        self.begun: list[tuple[str, float]] = []

    def __call__(self, phase: str) -> None:
        self.begun.append((phase.partition(":")[0], perf_counter()))
        self.tell(phase)

    def seconds(self) -> dict[str, float]:
        """By phase, up to now."""
        taken: dict[str, float] = {}
        for (name, begin), (_, end) in pairwise([*self.begun, ("", perf_counter())]):
            taken[name] = taken.get(name, 0.0) + end - begin
        return taken


class Worker:
    """Carries out commands, each of which names what to `do`:

    check: try the options of a model or a system. measure: answers {"record": ..., "environment": ...}. prepare: as measure
    does before it measures. round: {"host_ms": [...]} of the cell that was prepared. profile: {"profiled": ...}, what takes
    a profiler, after which its process must not be timed. schedule, timeline, list: what runners of that name show. ahead:
    import and build what a cell will need, with no answer. Lines {"phase": ...} come before the answer. In its place may
    stand {"status": ..., "reason": ...}, or {"bad_request": ...}.
    """

    def __init__(self, answers: IO[str]):
        self.answers = answers
        self.session: Session | None = None

    def serve(self) -> None:
        """Until standard input ends."""
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "ahead":  # of time, and nobody waits for an answer
                with collector_off():
                    import_ahead(command["cell"])
                    build_ahead(command["cell"])
            else:
                self.answer(guarded(self.carry_out, command))

    def answer(self, message: dict[str, Any]) -> None:
        self.answers.write(json.dumps(message) + "\n")
        self.answers.flush()

    def report(self, phase: str) -> None:
        self.answer({"phase": phase})

    def carry_out(self, command: dict[str, Any]) -> dict[str, Any]:
        do = command["do"]
        if do == "round":
            assert self.session is not None, "a cell is prepared first"
            return {"host_ms": self.session.round()}
        if do == "profile":
            assert self.session is not None, "a cell is prepared first"
            return {"profiled": self.session.profile(command["limits"])}
        phases = Phases(self.report)
        phases("importing PyTorch")
        with collector_off():
            if "model" in command.get("cell", ()):
                import_ahead(command["cell"])
            from runners.measurements import catalogue, schedule
            from runners.request import check
        if do in ("check", "schedule", "list"):
            return {"check": check, "schedule": schedule, "list": catalogue}[do].run(command["cell"], self.report)
        from runners.machine import environment
        from systems.base import Unsupported

        from .session import open_session

        cell, visible_device = command["cell"], command["visible_device"]
        if do == "prepare":
            self.session = open_session(cell, visible_device, phases)
            self.session.prepare()
            return {"prepared": True}
        if do == "timeline":
            from runners.measurements import timeline

            return timeline.run(cell, visible_device, self.report)
        try:
            self.session = open_session(cell, visible_device, phases)
            record = self.session.measure(command["limits"], command["profile"], command["again"])
            record["phases"] = phases.seconds()
        except Unsupported as error:
            record = {"status": "unsupported", "reason": str(error)}
        return {"record": record, "environment": environment.describe(cell["device"], visible_device)}


def import_ahead(cell: dict[str, Any]) -> None:
    """PyTorch and the libraries of a model that will come, whatever the system; what of them cannot be imported is told when
    it is measured.
    """
    from models import registry

    from . import session as _imported  # noqa: F401

    with suppress(ImportError):
        if cell["model"]["name"] in registry.names():  # a custom one is imported where what it raises has a cell to go to
            registry.find(cell["model"]["name"])


def build_ahead(cell: dict[str, Any]) -> None:
    """The network of a cell that will come, on one thread: the others are the cell's that is measured meanwhile."""
    import torch

    import models

    name, options = cell["model"]["name"], {k: v for k, v in cell["model"].items() if k != "name"}
    if name not in models.names():
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with suppress(Exception):  # measuring it builds it again, and what that raises has a cell to go to
            models.build_ahead(name, training=cell["runner"]["name"] == "training", **options)
    finally:
        torch.set_num_threads(threads)


def guarded(carry_out: Callable[[dict[str, Any]], dict[str, Any]], command: dict[str, Any]) -> dict[str, Any]:
    """The answer, or the status that stands for what was raised instead."""
    try:
        return carry_out(command)
    except Exception as error:  # whatever a model or a library raises is that cell's failure, told in its record
        import traceback

        import torch

        from models import BadModel
        from systems.base import BadOption, Unsupported

        if isinstance(error, BadModel | BadOption):
            return {"bad_request": one_line(error)}
        if isinstance(error, Unsupported):
            return {"status": "unsupported", "reason": one_line(error)}
        traceback.print_exc()
        known = isinstance(error, torch.cuda.OutOfMemoryError | MemoryError)
        if known or (isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)):
            return {"status": "out_of_memory", "reason": one_line(error)}
        return {"status": "failed", "reason": f"{type(error).__name__}: {one_line(error)}"}


def one_line(error: BaseException) -> str:
    """The first line of an error's message that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as channel:
        Worker(channel).serve()
