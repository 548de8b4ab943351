"""Nimble: stream assignment and ahead-of-time scheduling (Kwon et al., NeurIPS 2020)."""

from typing import Any

import torch
from torch import Tensor, nn

from systems.base import Prepared, System, Unsupported
from systems.scheduling.capture import capture
from systems.scheduling.execute import execute
from systems.scheduling.operator_graph import OperatorGraph
from systems.scheduling.schedule import Schedule

from .stream_assignment import assign_streams, single_stream


class Nimble(System):
    """Nimble's inference engine. multi_stream=False is the paper's ablation (Table 1): one stream, captured all the same."""

    name = "nimble"

    def __init__(self, multi_stream: bool = True):
        self.multi_stream = multi_stream

    def assign(self, graph: OperatorGraph) -> Schedule:
        return assign_streams(graph) if self.multi_stream else single_stream(graph)

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        program = capture(module, inputs)
        return execute(program, self.assign(program.graph))

    def schedule(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Schedule:
        return self.assign(capture(module, inputs).graph)


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
