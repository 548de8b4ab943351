"""Nimble: graph rewriting, stream assignment and ahead-of-time scheduling (Kwon et al., NeurIPS 2020)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from systems.base import Prepared, System, Unsupported
from systems.scheduling.execution.arena import Arena
from systems.scheduling.execution.execute import execute
from systems.scheduling.graph.capture import capture
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.graph.program import Program
from systems.scheduling.passes.rewriting import Rewriting
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stream_assignment import assign_streams, single_stream
from systems.training.step import Loss

from .training import prepare_training


class NimbleSystem(System):
    """Nimble's inference engine. multi_stream=False is the paper's ablation (Table 1): one stream, captured all the same.

    rewriting: the switches of `Rewriting`.
    """

    name = "nimble"

    def __init__(self, multi_stream: bool = True, **rewriting: bool):
        self.multi_stream = multi_stream
        self.rewriting = Rewriting(**rewriting)

    def assign(self, graph: OperatorGraph) -> Schedule:
        return assign_streams(graph) if self.multi_stream else single_stream(graph)

    def plan(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Program, Schedule]:
        """The model as it will be executed, and its schedule."""
        program, report = self.rewriting.captured(module, inputs)
        return program, replace(self.assign(program.graph), rewriting=report)

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...], arena: Arena | None = None) -> Prepared:
        program, schedule = self.plan(module, inputs)
        self.rewriting.compile(program)
        return execute(program, schedule, arena)

    def prepare_training(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, inputs: tuple[Tensor, ...], target: Tensor
    ) -> Prepared:
        if self.rewriting != Rewriting():
            raise Unsupported("the rewriting passes are for inference: a step of training is scheduled as autograd has it")
        return prepare_training(module, optimizer, loss, inputs, target, assign=self.assign)

    def schedule(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Schedule:
        return self.plan(module, inputs)[1]


def compile_backend(module: Any, inputs: list[Tensor]) -> Any:
    """`torch.compile(module, backend="opweave_nimble")`: what Dynamo traces, scheduled by Nimble.

    Dynamo hands parameters and buffers over as inputs; they are bound, so that a call copies only the user's inputs. Raises
    Unsupported where a gradient is asked for, since this is inference, and for shapes that are not fixed: Dynamo asks for
    those when it sees a second shape, unless torch.compile is told dynamic=False.
    """
    if any(not isinstance(x, Tensor) for x in inputs):
        raise Unsupported(
            'opweave_nimble schedules fixed shapes: torch.compile(..., backend="opweave_nimble", dynamic=False)'
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise Unsupported("opweave_nimble runs inference: call the compiled module under torch.no_grad()")
    weights = {i: x for i, x in enumerate(inputs) if isinstance(x, nn.Parameter) or hasattr(x, "_dynamo_static_input_type")}
    program = capture(module, tuple(inputs)).bind(weights)
    prepared = execute(program, assign_streams(program.graph))
    return lambda *arguments: prepared(*(x for i, x in enumerate(arguments) if i not in weights))
