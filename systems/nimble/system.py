"""Nimble: stream assignment and ahead-of-time scheduling (Kwon et al., NeurIPS 2020)."""

from typing import Any

from torch import Tensor, nn

from systems.base import Prepared, System
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
    """`torch.compile(module, backend="opweave_nimble")`: what Dynamo traces, scheduled by Nimble."""
    return Nimble().prepare(module, tuple(inputs))
