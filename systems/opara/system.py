"""Opara: stream allocation in one pass and a resource- and interference-aware launch order (Chen et al., 2023)."""

from time import perf_counter

from conf import not_one_of
from systems.base import BadOption
from systems.profiling.intensity import METHODS, memory_intensive
from systems.profiling.profiler import profile
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.launch_order import ORDERS, PROFILED, TIMED
from systems.scheduling.plans.schedule import Schedule, Search
from systems.scheduling.plans.stream_allocator import allocate_streams, needed_waits
from systems.scheduling.scheduler import Scheduler

from .demand import RESOURCES
from .demand import demand as demand_of


class Opara(Scheduler):
    """Opara's engine.

    Args:
        resource: what an operator demands of the device, one of RESOURCES.
        launch_order: one of ORDERS, all on the same streams. The paper's figure 2 has opara and depth_first.
        classify: how an operator is classified as memory- or compute-intensive, one of METHODS.
        switches: those of `Rewriting`, which the paper lacks.

    Raises:
        BadOption: an option has another value.
    """

    name = "opara"

    def __init__(
        self, resource: str = "largest_share", launch_order: str = "opara", classify: str = "measured", **switches: bool
    ):
        super().__init__(**switches)
        for option, value, valid in (
            ("resource", resource, RESOURCES),
            ("launch_order", launch_order, ORDERS),
            ("classify", classify, METHODS),
        ):
            if wrong := not_one_of(f"system.{option}", value, valid):
                raise BadOption(wrong)
        self.resource, self.launch_order, self.classify = resource, launch_order, classify

    @property
    def learns(self) -> bool:
        return super().learns or self.launch_order in PROFILED

    def plan(self, program: Program) -> Schedule:
        return self._plan(program, may_measure=True)

    def plan_without_running(self, program: Program) -> Schedule:
        """By the demands that the cache knows; where it lacks one, all operators count as equally demanding."""
        return self._plan(program, may_measure=False)

    def _plan(self, program: Program, may_measure: bool) -> Schedule:
        """Algorithms 1 and 2, with the profiler between them.

        The schedule's `search` holds the seconds of both algorithms, of the first with its waits, and of the profiler beside
        them; and the mean achieved occupancy of the model's kernels where it is known.
        """
        graph, n = program.graph, len(program.graph)
        begin = perf_counter()
        streams = allocate_streams(graph)
        waits = needed_waits(graph, streams)
        allocation_end = perf_counter()
        is_memory_intensive, demand = [False] * n, [0.0] * n
        occupancy = None
        if self.launch_order in PROFILED:
            is_memory_intensive = memory_intensive(program, self.classify)
            if profiled := profile(program, may_measure):
                demand = profiled.milliseconds if self.launch_order in TIMED else demand_of(profiled, self.resource)
                occupancy = profiled.occupancy()
                self.num_measured += n if profiled.is_fresh else 0
        profile_end = perf_counter()
        order = ORDERS[self.launch_order](graph, is_memory_intensive, demand)
        search = Search(
            seconds=perf_counter() - profile_end + allocation_end - begin,
            allocation_seconds=allocation_end - begin,
            profile_seconds=profile_end - allocation_end,
            occupancy=occupancy,
        )
        return Schedule(graph, self.name, order, streams, waits, search=search)
