"""What a stage costs by simulation: no GPU is needed, but a profile of the program's operators (the paper has neither)."""

from collections.abc import Callable, Sequence

from systems.profiling.timing import Timer
from systems.scheduling.graph.program import Program
from systems.scheduling.simulate.gpu import load
from systems.scheduling.simulate.kernels import Kernels, Node
from systems.scheduling.simulate.simulator import replay
from systems.scheduling.simulate.stored import read_sets, stored_profile

from .stage_timer import StageTimer, Unit


class StageSimulator(StageTimer):
    """Costs of stages as `StageTimer` gives them, out of a profile.

    A merge of convolutions is none of the operators of the program, and no profile has it: no stage is merged.

    Args:
        program: Whose units are timed.
        timer: Measures nothing here.
        gpu: Of conf/gpu.
        profile: A file of runner=profile; "" for all that are committed.
        on_measured: Hears nothing.

    Raises:
        BadOption: There is no such GPU or file.
        Unsupported: The profile lacks an operator.
    """

    def __init__(
        self,
        program: Program,
        timer: Timer,
        gpu: str,
        profile: str,
        on_measured: Callable[[int], None] = lambda _: None,
    ):
        super().__init__(program, timer, on_measured)
        self.gpu = load(gpu)
        self.kernels = Kernels.of(program.graph, stored_profile(program, read_sets(profile)), self.gpu)
        self.costs: dict[str, float] = {}

    def concurrent(self, groups: Sequence[Sequence[Unit]], numbers: Sequence[int]) -> float:
        name = self.name(numbers)
        if name not in self.costs:
            self.costs[name] = self._simulated(groups)
        return self.costs[name]

    def is_known(self, numbers: Sequence[int]) -> bool:
        return self.name(numbers) in self.costs

    def merged(self, units: Sequence[Unit]) -> float | None:
        return None

    def _simulated(self, groups: Sequence[Sequence[Unit]]) -> float:
        """Milliseconds of groups beside each other, with the edge to the next stage and without the launch of a graph."""
        first = self.kernels.first
        nodes: list[Node] = []
        before: list[tuple[int, ...]] = []
        for group in groups:
            needed: tuple[int, ...] = ()
            for v in sorted(v for unit in group for v in unit):
                for node in self.kernels.nodes[first[v] : first[v + 1]]:
                    before.append(needed)
                    needed = (len(nodes),)
                    nodes.append(node)
        if not nodes:
            return 0.0
        timeline = replay(Kernels(tuple(nodes), (), self.kernels.limits), before, self.gpu)
        edge_us = self.gpu.branch_us if len(groups) > 1 else self.gpu.edge_us
        return (max(timeline.ends_us) - self.gpu.launch_us + edge_us) / 1e3
