"""The stream plans that weave chooses among: every one of this project that needs no search of its own, by name."""

from collections.abc import Callable
from functools import partial

from systems.profiling.intensity import memory_intensive
from systems.profiling.profiler import profile
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.launch_order import ORDERS
from systems.scheduling.plans.list_scheduling import list_schedule
from systems.scheduling.plans.schedule import Schedule, Search, sequential
from systems.scheduling.plans.stages import Stage, greedy, to_schedule
from systems.scheduling.plans.stream_allocator import allocate_streams, needed_waits
from systems.scheduling.plans.stream_assignment import assign_streams

MOST_STREAMS = (2, 3, 4, 6, 8, 12)  # of list schedules
StreamPlan = Callable[[Program], Schedule]


def _nimble(program: Program) -> Schedule:
    return assign_streams(program.graph)


def _sequential(program: Program) -> Schedule:
    return sequential(program.graph)


def _greedy_stages(program: Program) -> Schedule:
    """IOS's greedy stages without barriers."""
    stages = [Stage(tuple((v,) for v in level)) for level in greedy(program.graph)]
    return to_schedule(program.graph, "greedy", stages, Search(), barriers=False)


def _opara(program: Program, order: str) -> Schedule:
    """Opara's streams, launched in one of ORDERS; by milliseconds where that asks for a demand."""
    graph = program.graph
    streams = allocate_streams(graph)
    launched = ORDERS[order](graph, memory_intensive(program, "measured"), _milliseconds(program))
    return Schedule(graph, order, launched, streams, needed_waits(graph, streams))


def _list(program: Program, num_streams: int) -> Schedule:
    return list_schedule(program.graph, _milliseconds(program), num_streams)


def _milliseconds(program: Program) -> list[float]:
    profiled = profile(program)
    assert profiled is not None  # it was told to measure
    return list(profiled.milliseconds)


FIRST = "nimble"
STREAM_PLANS: dict[str, StreamPlan] = {
    FIRST: _nimble,
    "sequential": _sequential,
    "greedy stages": _greedy_stages,
    **{f"opara streams, {order}": partial(_opara, order=order) for order in ORDERS},
    **{f"list, {k} streams": partial(_list, num_streams=k) for k in MOST_STREAMS},
}
