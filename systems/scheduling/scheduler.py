"""A scheduler: one function from a captured model to a schedule. All around it is the same for every scheduler."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import tracing

from conf.text import counted
from systems.base import Loss, System, Unsupported
from systems.notice import Notice
from systems.preparing import as_captured
from systems.profiling.timing import Timer
from systems.scheduling.decision import Decision, rows
from systems.scheduling.execution.arena import Arena
from systems.scheduling.execution.dynamo_graph import DynamoGraph
from systems.scheduling.execution.execute import execute
from systems.scheduling.execution.members import Members
from systems.scheduling.execution.scheduled import Scheduled
from systems.scheduling.execution.training_step import TrainingStep
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.joint_graph import capture_step
from systems.scheduling.graph.program import Program
from systems.scheduling.passes.rewriting import Rewriting
from systems.scheduling.plans.lower import lower
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.verify import verify


class Scheduler(System):
    """A system that executes a model by a schedule of its operators. A subclass has a `name` and says what to `plan`.

    NOTE: the order is the same for every scheduler.
    1. capture: the model becomes a Program of operators.
    2. passes: `Rewriting` changes the program; what it decides by measuring is kept in the cache.
    3. compile: fused kernels are compiled, but only where the program will run.
    4. plan: the scheduler's own algorithm. It may measure, and keeps in the cache what it has measured.
    5. execute: the schedule is verified, and captured into a CUDA Graph or given to a CPU's threads.
    `schedule` leaves out 3, and of 5 all but the proof; `learn` leaves out 5. A step of training has no passes.

    Args:
        switches: those of `Rewriting`.
    """

    trains = False  # `plan` takes programs whose operators change state, and then runs none of them
    captured_update = True  # a step of training holds the optimizer's; else that comes after it

    def __init__(self, **switches: bool):
        self.rewriting = Rewriting(**switches)
        self.num_measured = 0  # measurements that the cache lacked: `plan` adds its own

    @abstractmethod
    def plan(self, program: Program) -> Schedule:
        """The schedule of a program. Its own decisions are of the kind `name`; the caller adds those of the passes."""

    def plan_without_running(self, program: Program) -> Schedule:
        """The schedule as far as it is known without running the model; that of `plan` unless a scheduler overrides this."""
        return self.plan(program)

    def execute(self, program: Program, schedule: Schedule, arena: Arena | None = None) -> Scheduled:
        """Carry out the schedule's merges and make it callable. Raises InvalidSchedule where it may give a wrong answer."""
        return execute(*lower(program, schedule), arena)

    @property
    def learns(self) -> bool:
        return self.rewriting.measures

    def learn(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.report("capturing the model")
        program = captured(module, inputs)
        with program.undone():
            program, _ = self._rewritten(program)
            self.rewriting.compile(program)
            self.plan(program)

    def schedule(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Schedule:
        """The schedule alone; no operator runs but those that passes, or a search, measure. Raises as `prepare`."""
        program = captured(module, inputs)
        with program.undone():
            program, decisions = self._rewritten(program)
            schedule = self._explained(self.plan_without_running(program), decisions)
            proved(program, schedule)
            return schedule

    def lowered(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Program, Schedule]:
        """What would be executed: the program as the passes leave it, with the merges of its schedule carried out.

        Raises InvalidSchedule where it may give a wrong answer.
        """
        program = captured(module, inputs)
        with program.undone():
            program, _ = self._rewritten(program)
            return proved(program, self.plan_without_running(program))

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...], arena: Arena | None = None) -> Scheduled:
        """As every system's.

        Args:
            arena: on a GPU, memory to share with other schedules whose calls never overlap with this one's.

        Returns:
            An executor whose calls raise RuntimeError where the module has changed its form since, or holds another
            parameter, buffer or submodule, or where autocast is another. It uses what is written in place.
        """
        prepared = self.prepare_program(self.program_of(module, inputs), arena)
        prepared.module_members = Members(module)
        return prepared

    def program_of(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Program:
        """The program that is prepared; raises as `prepare`."""
        return captured(module, inputs)

    def prepare_training(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, inputs: tuple[Tensor, ...], target: Tensor
    ) -> TrainingStep:
        """One step as one graph of operators (Nimble, Sections 4.1 and 4.2), with the updates beside the rest of backward:

            optimizer.zero_grad()
            value = loss(module(*inputs), target)
            value.backward()
            optimizer.step()

        The module is trained in the form that it is in now. Parameters, buffers and the optimizer's state stay where they
        are, so that state_dict, schedulers of the learning rate and eager steps in between work as ever; `.grad` is neither
        read nor written. Random numbers are drawn as by an eager step. Where `captured_update` is False, the optimizer's own
        step comes after the graph, which leaves the gradients in `.grad`.

        Raises:
            Unsupported: this scheduler does not train, the step cannot be captured, or it is to hold the update of an
                optimizer that is none of SGD, Adam and AdamW.
        """
        if not self.trains:
            raise Unsupported(f"{self.name} runs inference only")
        if self.rewriting != Rewriting():
            raise Unsupported("the rewriting passes are for inference: a step of training is scheduled as autograd has it")
        _check_tuple(inputs)
        program, update = capture_step(module, optimizer, loss, inputs, target, self.captured_update)
        with as_captured(program.device.type):
            executor = self.execute(program, self.plan(program))
        return TrainingStep(module, update, executor)

    def compile_graph(self, module: Any, inputs: Sequence[object], backend: str) -> Callable[..., Any]:
        """What a backend of torch.compile does with the graph that Dynamo has traced.

        Dynamo hands parameters and buffers over as inputs. They are bound, so that a call copies only the user's inputs.

        Args:
            module: Dynamo's graph.
            inputs: of the graph, parameters and buffers among them.
            backend: its name, for messages.

        Returns:
            A function of the same inputs.

        Raises:
            Unsupported: a gradient is wanted, since this is inference, or shapes are not fixed. Dynamo makes shapes dynamic
                when it sees a second one, unless torch.compile is told dynamic=False.
        """
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        if len(tensors) < len(inputs):
            raise Unsupported(f'{backend} schedules fixed shapes: torch.compile(..., backend="{backend}", dynamic=False)')
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise Unsupported(f"{backend} runs inference: call the compiled module under torch.no_grad()")
        bound = [i for i, x in enumerate(tensors) if isinstance(x, nn.Parameter) or hasattr(x, "_dynamo_static_input_type")]

        def prepare(module: nn.Module, own: tuple[Tensor, ...]) -> tuple[Scheduled, Sequence[Tensor]]:
            with tracing(None):  # else passes that use Inductor would compile with the shapes of Dynamo's trace
                program = captured(module, own)
                return self.prepare_program(program), program.changed

        return DynamoGraph(module, tensors, bound, prepare)

    def prepare_program(self, program: Program, arena: Arena | None = None) -> Scheduled:
        """As `prepare`, from a program that was captured before.

        What it changes, and the random state, is as it was, whatever runs meanwhile.
        """
        devices = [program.device] if program.device.type == "cuda" else []
        with program.undone(), torch.random.fork_rng(devices), as_captured(program.device.type):
            return self._prepared_program(program, arena)

    def _prepared_program(self, program: Program, arena: Arena | None) -> Scheduled:
        self.num_measured = 0
        program, decisions = self._rewritten(program)
        self.rewriting.compile(program)
        schedule = self._explained(self.plan(program), decisions)
        if self.num_measured:
            lacked = counted(self.num_measured, "measurement")
            warnings.warn(
                f"learned in place: the cache lacked {lacked}, which this process has made", category=Notice, stacklevel=3
            )
        return self.execute(program, schedule, arena)

    def _explained(self, schedule: Schedule, decisions: Sequence[Decision]) -> Schedule:
        """The schedule with what passes decided before it, and then its scheduler. One of a file holds other passes' too."""
        own = (row for row in schedule.decisions if row.kind == self.name)
        return replace(schedule, decisions=(*rows(decisions), *own))

    def _rewritten(self, program: Program) -> tuple[Program, list[Decision]]:
        """The program as the passes leave it, and their decisions."""
        timer = Timer(program.device, self.report)
        try:
            return self.rewriting.apply(program, timer)
        finally:
            timer.close()  # also when it is interrupted, so that nothing is measured twice
            self.num_measured += timer.taken


def captured(module: nn.Module, inputs: tuple[Tensor, ...]) -> Program:
    """The program of a module.

    Raises:
        Unsupported: as `capture` does, and for a model without an operator.
        TypeError: the inputs are a tensor, which is a sequence too.
    """
    _check_tuple(inputs)
    program = capture(module, inputs)
    if not len(program.graph):
        raise Unsupported("the model has no operator, so there is nothing to schedule")
    return program


def _check_tuple(inputs: object) -> None:
    if isinstance(inputs, Tensor):
        raise TypeError("inputs is a tensor, and has to be a tuple: (x,)")


def proved(program: Program, schedule: Schedule) -> tuple[Program, Schedule]:
    """The two with the schedule's merges carried out. Raises InvalidSchedule where they may give a wrong answer."""
    lowered, executed = lower(program, schedule)
    verify(lowered.graph, executed)
    return lowered, executed
