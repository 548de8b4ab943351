"""Opara: stream allocation in one pass and a resource- and interference-aware launch order (Chen et al., 2023)."""

from dataclasses import replace
from time import perf_counter

from torch import Tensor, nn

from systems.base import BadOption, Prepared, System
from systems.profiling.intensity import METHODS, memory_intensive
from systems.profiling.profiler import RESOURCES, profile
from systems.scheduling.execution.execute import execute
from systems.scheduling.graph.program import Program
from systems.scheduling.passes.rewriting import Rewriting
from systems.scheduling.plans.launch_order import ORDERS, PROFILED, TIMED
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stream_allocator import allocate_streams, needed_waits


class Opara(System):
    """resource: what the launcher takes for an operator's demand, one of RESOURCES. launch_order: one of ORDERS, all on the
    same streams (the ablation of the paper's figure 2, and an order of our own). classify: how operators are told to be
    memory- or compute-intensive, one of METHODS. rewriting: the switches of `Rewriting`, which are not in the paper. Raises
    BadOption for any other value.
    """

    name = "opara"

    def __init__(
        self, resource: str = "largest_share", launch_order: str = "opara", classify: str = "measured", **rewriting: bool
    ):
        for option, value, valid in (
            ("resource", resource, RESOURCES),
            ("launch_order", launch_order, ORDERS),
            ("classify", classify, METHODS),
        ):
            if value not in valid:
                raise BadOption(f"system.{option} is {value}, not one of {', '.join(valid)}")
        self.resource, self.launch_order, self.classify = resource, launch_order, classify
        self.rewriting = Rewriting(**rewriting)

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        program, report = self.rewriting.captured(module, inputs)
        self.rewriting.compile(program)
        return execute(program, replace(self.plan(program), rewriting=report))

    def schedule(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Schedule:
        """The schedule without executing the model: its demands are those that the cache knows, and where it lacks any, all
        operators count as equally demanding.
        """
        program, report = self.rewriting.captured(module, inputs)
        return replace(self.plan(program, measure=False), rewriting=report)

    def plan(self, program: Program, measure: bool = True) -> Schedule:
        """The schedule of a captured model; measure=False allows no profiled run.

        Its `search` holds, in seconds, what finding the schedule took without the profiler, what of that was Algorithm 1,
        and what the profiler took beside it; and the mean achieved occupancy of the model's kernels where it is known.
        """
        graph, n = program.graph, len(program.graph)
        begin = perf_counter()
        streams = allocate_streams(graph)
        allocated = perf_counter()
        waits = needed_waits(graph, streams)
        waited = perf_counter()
        memory, demand = [False] * n, [0.0] * n
        occupancy = None
        if self.launch_order in PROFILED:
            memory = memory_intensive(program, self.classify)
            if found := profile(program, measure):
                demand = found.milliseconds if self.launch_order in TIMED else found.demand(self.resource)
                occupancy = found.occupancy()
                self.profiled |= found.fresh and program.device.type == "cuda"
        profiled = perf_counter()
        order = ORDERS[self.launch_order](graph, memory, demand)
        search = {
            "seconds": perf_counter() - profiled + waited - begin,
            "states": 0,
            "transitions": 0,
            "allocation_seconds": allocated - begin,
            "profile_seconds": profiled - waited,
        }
        if occupancy is not None:
            search["occupancy"] = occupancy
        return Schedule(graph, self.name, order, streams, waits, search=search)
