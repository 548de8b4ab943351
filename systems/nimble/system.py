"""Nimble: graph rewriting, stream assignment and ahead-of-time scheduling (Kwon et al., NeurIPS 2020)."""

from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stream_assignment import assign_streams, single_stream
from systems.scheduling.scheduler import Scheduler


class NimbleSystem(Scheduler):
    """Nimble's engine, for inference and training.

    Args:
        multi_stream: False is the paper's ablation (Table 1): ahead-of-time scheduling on one stream.
        switches: those of `Rewriting`.
    """

    name = "nimble"
    trains = True

    def __init__(self, multi_stream: bool = True, **switches: bool):
        super().__init__(**switches)
        self.multi_stream = multi_stream

    def plan(self, program: Program) -> Schedule:
        return assign_streams(program.graph) if self.multi_stream else single_stream(program.graph)
