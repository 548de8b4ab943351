"""Nimble: graph rewriting, stream assignment and ahead-of-time scheduling (Kwon et al., NeurIPS 2020)."""

from systems.base import BadOption
from systems.scheduling.graph.program import Program
from systems.scheduling.graph.stateful_program import StatefulProgram
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stream_assignment import assign_forward_streams, assign_streams, single_stream
from systems.scheduling.scheduler import Scheduler


class NimbleSystem(Scheduler):
    """Nimble's engine, for inference and training.

    Args:
        multi_stream: False is the paper's ablation (Table 1): ahead-of-time scheduling on one stream.
        reuse_streams: a stream takes further chains of operators, as in the released code.
        multi_stream_backward: of a step of training. False puts backward on one stream, after all of forward and the loss;
            so does the released code, whose loss stands between two graphs.
        captured_update: of a step of training. False leaves the update to the optimizer itself, as the released code does.
        switches: those of `Rewriting`.

    Raises:
        BadOption: streams are to be reused, of which there is one.
    """

    name = "nimble"
    trains = True

    def __init__(
        self,
        multi_stream: bool = True,
        reuse_streams: bool = False,
        multi_stream_backward: bool = True,
        captured_update: bool = True,
        **switches: bool,
    ):
        super().__init__(**switches)
        if reuse_streams and not multi_stream:
            raise BadOption("system.reuse_streams is true, but with system.multi_stream=false there is one stream")
        self.multi_stream, self.reuse_streams = multi_stream, reuse_streams
        self.multi_stream_backward, self.captured_update = multi_stream_backward, captured_update

    def plan(self, program: Program) -> Schedule:
        if not self.multi_stream:
            return single_stream(program.graph)
        if isinstance(program, StatefulProgram) and program.num_forward and not self.multi_stream_backward:
            return assign_forward_streams(program.graph, program.num_forward, self.reuse_streams)
        return assign_streams(program.graph, self.reuse_streams)
