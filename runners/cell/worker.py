"""The process of one cell. Commands come as lines on standard input, answers go to the file descriptor given.

python -m runners.cell.worker VISIBLE_DEVICE ANSWERS_FD STOOD_STILL_FD

STOOD_STILL_FD is a file that holds for how many seconds the process has been made to stand still, as messages.SECONDS.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from time import perf_counter
from typing import IO, TYPE_CHECKING

from conf.own_code import with_own_line
from conf.text import first_line
from results.cell import Cell, Choice
from results.words import one_line
from runners.machine.installation import module_name
from runners.machine.keeper import end_as
from runners.measurements.registry import plan
from systems.preparing import collector_off, give_back, lacks_memory

from . import messages
from .messages import Answer, Command, Failed, Phase, Refused, decoded, encoded

if TYPE_CHECKING:
    from .session import Session


class Phases:
    """Reports each phase of a cell as it begins, and adds up its seconds: "preparing: 12 stages" is of "preparing"."""

    def __init__(self, report: Callable[[str], None]):
        self.report = report
        self.begun: list[tuple[str, float]] = []

    def __call__(self, phase: str) -> None:
        self.begun.append((phase.partition(":")[0], perf_counter()))
        self.report(phase)

    def seconds(self) -> dict[str, float]:
        """By phase, up to now."""
        seconds_by_phase: dict[str, float] = {}
        for (name, begin), (_, end) in pairwise([*self.begun, ("", perf_counter())]):
            seconds_by_phase[name] = seconds_by_phase.get(name, 0.0) + end - begin
        return seconds_by_phase


class Worker:
    """Carries out commands, one after another, on at most one cell."""

    def __init__(self, answers: IO[str], visible_device: str = "0", stood_still: int | None = None):
        """stood_still: descriptor of STOOD_STILL_FD's file; None for a process that no one has stand still."""
        self.answers, self.visible_device, self.stood_still = answers, visible_device, stood_still
        self._session: Session | None = None

    def serve(self) -> None:
        """Until standard input ends."""
        for line in sys.stdin:
            command = decoded(line)
            if isinstance(command, messages.Ahead):
                with collector_off():
                    import_ahead(command.cell.model)
                    build_ahead(command.cell)
            elif isinstance(command, messages.Check):
                self.check_in_a_fork(command)
            else:
                self.write(guarded(self.carry_out, command))  # type: ignore[arg-type]

    def check_in_a_fork(self, command: messages.Check) -> None:
        """Answer from a fork, so that a cell may be measured in this process, which has only imported PyTorch.

        It ends as its fork does, where that ends in any other way than with an answer.
        """
        self.report("importing PyTorch")
        with collector_off():
            import_ahead()
        if fork := os.fork():
            if status := os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]):
                end_as(status)
            return
        self.write(guarded(self.carry_out, command))
        sys.stdout.flush()
        os._exit(0)

    def write(self, message: Answer | Phase) -> None:
        self.answers.write(encoded(message))
        self.answers.flush()

    def report(self, phase: str) -> None:
        self.write(Phase(phase))

    def clock(self) -> float:
        """Seconds, without those for which this process was made to stand still."""
        told = b"" if self.stood_still is None else os.pread(self.stood_still, messages.SECONDS.size, 0)
        return perf_counter() - (messages.SECONDS.unpack(told)[0] if told else 0.0)

    @property
    def session(self) -> Session:
        assert self._session is not None, "a cell is prepared first"
        return self._session

    def carry_out(self, command: Command) -> Answer:
        """The answer to a command. Raises whatever the model or the system raises."""
        match command:
            case messages.Round():
                return messages.Turn(self.session.round())
            case messages.Profile():
                return self._profile(command)
            case messages.Check():
                return self._check(command)
            case messages.Show():
                return self._show(command)
            case messages.Learn():
                return self._learn(command)
            case messages.Prepare():
                self._session = self._opened(command.cell, Phases(self.report))
                self._session.prepare()
                give_back()  # those that are prepared after it need it
                return messages.Ready()
            case messages.Measure():
                return self._measure(command)
        raise AssertionError(f"{command} has no answer")

    def _opened(self, cell: Cell, phases: Phases) -> Session:
        """The session that the cell's runner asks for. Raises as Session."""
        phases("importing PyTorch")
        with collector_off():
            import_ahead(cell.model)
        module, _, name = plan(cell.runner).composition.session.partition(":")
        session: Session = getattr(import_module(module_name(module)), name)(cell, self.visible_device, phases)
        give_back()  # of a model that was converted, its fp32 weights: libraries with allocators of their own may need it
        return session

    def _check(self, command: messages.Check) -> Answer:
        with collector_off():
            if command.group == "model":
                import_ahead(command.choice)
            from . import check
        return messages.Checked(check.sources_of(command.group, command.choice, command.batch, self.report))

    def _show(self, command: messages.Show) -> Answer:
        self.report("importing PyTorch")
        with collector_off():
            import_ahead(command.cell.model)
        from runners.showings.registry import showing

        document = showing(command.cell.runner).show(command.cell, self.visible_device, self.report)
        return document if isinstance(document, Failed) else messages.Shown(document)

    def _learn(self, command: messages.Learn) -> Answer:
        phases = Phases(self.report)
        phases("importing PyTorch")
        with collector_off():
            import_ahead(command.cell.model)
        import systems

        cell = command.cell
        if not plan(cell.runner).composition.learns or not systems.load(cell.system.name, **cell.system.options).learns:
            return messages.Learned(None)
        session = self._opened(cell, phases)
        session.system.clock = self.clock
        return messages.Learned(session.learn(), session.notices)

    def _measure(self, command: messages.Measure) -> Answer:
        from runners.machine import environment
        from systems.base import Unsupported

        record, phases = command.record, Phases(self.report)
        try:
            self._session = session = self._opened(record.cell, phases)
            from . import measuring

            session.known_limits = command.limits
            record = measuring.measured(session, record, is_profiled=command.is_profiled)
            record = replace(record, phases=phases.seconds())
        except Unsupported as error:
            record = replace(record, status="unsupported", reason=reason_of(error))
        where = environment.described(record.environment, record.cell.device, self.visible_device)
        return messages.Done(replace(record, environment=where))

    def _profile(self, command: messages.Profile) -> Answer:
        from . import measuring

        self.session.known_limits = command.limits
        return messages.Done(measuring.profiled(self.session, command.record))


def import_ahead(model: Choice | None = None) -> None:
    """Import PyTorch, and the libraries of a model that will come, whatever the system.

    What cannot be imported is an error where it is measured.
    """
    from models import registry

    from . import session as _imported  # noqa: F401

    with suppress(ImportError):
        if model and model.name in registry.names():  # a custom one is imported where what it raises has a cell to go to
            registry.find(model.name)


def build_ahead(cell: Cell) -> None:
    """Build the network of a cell that will come, on one thread: the others are the cell's that is measured meanwhile."""
    import torch

    import models

    if cell.model.name not in models.names() or not plan(cell.runner).composition.builds_on_cpu:
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with suppress(Exception):  # measuring it builds it again, and what that raises has a cell to go to
            models.build_ahead(cell.model.name, training=cell.runner.name == "training", **cell.model.options)
    finally:
        torch.set_num_threads(threads)


def guarded(carry_out: Callable[[Command], Answer], command: Command) -> Answer:
    """The answer, or what stands for an exception that was raised instead."""
    try:
        return carry_out(command)
    except Exception as error:  # whatever a model or a library raises is that cell's failure, and stands in its record
        import traceback

        from models import BadModel
        from systems.base import BadOption, Unsupported

        if isinstance(error, BadModel | BadOption):
            return Refused(reason_of(error))
        if isinstance(error, Unsupported):
            return Failed("unsupported", with_own_line(reason_of(error), error))
        with suppress(Exception):  # an error's message may itself be one
            traceback.print_exc()
        if lacks_memory(error):
            return Failed("out_of_memory", reason_of(error))
        return Failed("failed", with_own_line(f"{type(error).__name__}: {reason_of(error)}", error))


def reason_of(error: BaseException) -> str:
    """The first line of an error's message that says something, printable."""
    return one_line(first_line(error))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import may hide a KeyboardInterrupt
    answers, stood_still = map(int, sys.argv[2:])
    os.set_inheritable(answers, False)  # what the cell starts cannot hold the answers open
    os.set_inheritable(stood_still, False)
    with os.fdopen(answers, "w", encoding="utf-8") as channel:
        Worker(channel, sys.argv[1], stood_still).serve()
