"""What a stage costs by simulation: no GPU is needed, but a profile of the program's operators (the paper has neither)."""

from collections.abc import Callable, Sequence

from systems.profiling.timing import Timer
from systems.scheduling.graph.program import Program
from systems.scheduling.graph.rewrite import Replacement, replace
from systems.scheduling.plans.merge import merge, merge_name
from systems.scheduling.simulate.gpu import load
from systems.scheduling.simulate.kernels import Kernels
from systems.scheduling.simulate.simulator import replay
from systems.scheduling.simulate.stored import StoredOperators, files_of, read_sets

from .stage_timer import StageTimer, Unit


class StageSimulator(StageTimer):
    """Costs of stages as `StageTimer` gives them, out of a profile.

    A merge is considered where the profile has it; `merges.py` says which merges a profile of a program holds.

    Args:
        program: Whose units are timed.
        timer: Measures nothing here.
        gpu: Of conf/gpu.
        profile: A file of runner=profile; "" for all that are committed.
        on_measured: Hears nothing.

    Raises:
        BadOption: There is no such GPU or file.
        Unsupported: The profile lacks an operator, or is of another arithmetic.
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
        self.stored = StoredOperators(read_sets(files_of(profile)))
        self.kernels = Kernels.of(program.graph, self.stored.profile(program), self.gpu)
        self.costs: dict[str, float] = {}
        self.merges: dict[str, float | None] = {}

    def concurrent(self, groups: Sequence[Sequence[Unit]], numbers: Sequence[int]) -> float:
        name = self.name(numbers)
        if name not in self.costs:
            self.costs[name] = self._simulated(groups)
        return self.costs[name]

    def is_known(self, numbers: Sequence[int]) -> bool:
        return self.name(numbers) in self.costs

    def merged(self, units: Sequence[Unit]) -> float | None:
        replacement = merge(self.program, units)  # units of the same names may read other inputs, and cannot be merged then
        if replacement is None:
            return None
        name = merge_name(replacement, [*map(self._signature, units)])
        if name not in self.merges:
            self.merges[name] = self._merged(replacement)
        return self.merges[name]

    def _merged(self, replacement: Replacement) -> float | None:
        whole, place = replace(self.program, [replacement])
        v = place[replacement.operators[0]]
        if whole.signature(v) not in self.stored:
            return None
        kernels = Kernels.of(whole.graph, self.stored.profile(whole), self.gpu)
        return self._milliseconds(kernels, [range(kernels.first[v], kernels.first[v + 1])])

    def _simulated(self, groups: Sequence[Sequence[Unit]]) -> float:
        first = self.kernels.first
        members = [sorted(v for unit in group for v in unit) for group in groups]
        chains = [[i for v in operators for i in range(first[v], first[v + 1])] for operators in members]
        return self._milliseconds(self.kernels, chains)

    def _milliseconds(self, kernels: Kernels, chains: Sequence[Sequence[int]]) -> float:
        """Of chains of kernels beside each other, with the edge to the next stage and without the launch of a graph."""
        places = [i for chain in chains for i in chain]
        if not places:
            return 0.0
        before = [() if j == 0 else (n - 1,) for n, j in enumerate(j for chain in chains for j in range(len(chain)))]
        timeline = replay(kernels.part(places), before, self.gpu)
        edge_us = self.gpu.branch_us if len(chains) > 1 else self.gpu.edge_us
        return (max(timeline.ends_us) - self.gpu.launch_us + edge_us) / 1e3
