"""The stream plans that weave chooses among, by name: those of every scheduler of this project."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakKeyDictionary

import torch

from systems.base import Unsupported
from systems.cache import code_of
from systems.profiling.intensity import memory_intensive
from systems.profiling.measurements import Measurements
from systems.profiling.profiler import profile
from systems.profiling.timing import Timer
from systems.registry import load
from systems.scheduling.graph.effects import is_view
from systems.scheduling.graph.part import part
from systems.scheduling.graph.program import Program
from systems.scheduling.graph.structure import digest, structure
from systems.scheduling.plans import local_search
from systems.scheduling.plans.launch_order import ORDERS
from systems.scheduling.plans.list_scheduling import list_schedule
from systems.scheduling.plans.schedule import Schedule, Search, sequential
from systems.scheduling.plans.stages import Stage, greedy, to_schedule
from systems.scheduling.plans.stream_allocator import allocate_streams, needed_waits, waits_between
from systems.scheduling.plans.stream_assignment import assign_streams
from systems.scheduling.scheduler import Scheduler
from systems.scheduling.simulate import edges, events, kernels, simulator
from systems.scheduling.simulate.gpu import Gpu, find
from systems.scheduling.simulate.measured_set import MeasuredSet, ProfiledProgram

KIND = "weave-stages"
MOST_STREAMS = (2, 3, 4, 6, 8, 12)  # of list schedules
# Of local search: schedules, and the operators of all of them. Together they take some 5 s.
MOST_TRIALS, SIMULATED_OPERATORS = 20_000, 2_000_000
StreamPlan = Callable[[Program], Schedule]
KNOWN_MS: WeakKeyDictionary[Program, Sequence[float]] = WeakKeyDictionary()  # of each operator: most plans ask for them


def _nimble(program: Program) -> Schedule:
    return assign_streams(program.graph)


def _sequential(program: Program) -> Schedule:
    return sequential(program.graph)


def _greedy_stages(program: Program, barriers: bool) -> Schedule:
    stages = [Stage(tuple((v,) for v in level)) for level in greedy(program.graph)]
    return to_schedule(program.graph, "greedy", stages, Search(), barriers)


def _ios(program: Program, barriers: bool) -> Schedule:
    """IOS's stages and merges by simulated costs, of a profile of this program on this device.

    They stay in the cache: IOS's search takes as long as some hundred trials.

    Raises:
        Unsupported: conf/gpu has no such device.
    """
    gpu = _gpu_of(program)
    cache = Measurements(KIND, program.device)
    name = digest([structure(program), operator_ms(program)])
    if name not in cache:
        stages = _ios_stages(program, gpu.name)
        cache.add({name: [[[list(group) for group in stage.groups], stage.is_merged] for stage in stages]})
    entry: Any = cache[name]
    stages = [Stage(tuple(map(tuple, groups)), is_merged) for groups, is_merged in entry]
    return to_schedule(program.graph, "ios", stages, Search(), barriers)


def _ios_stages(program: Program, gpu: str) -> list[Stage]:
    """Of the search that systems.load("ios", costs="simulated") makes for a GPU of conf/gpu."""
    profiled = profile(program)
    assert profiled is not None  # it was told to measure
    with TemporaryDirectory() as folder:
        file = Path(folder) / "profile.json"
        MeasuredSet("", 0, {}, {"rewritten": ProfiledProgram(program.graph, profiled)}, ()).write(file)
        ios = load("ios", costs="simulated", profile=str(file), gpu=gpu)
        assert isinstance(ios, Scheduler)
        schedule = ios.plan(program)
    merged = {frozenset(operators) for operators in schedule.merges or ()}
    return [Stage(groups, len(groups) == 1 and frozenset(groups[0]) in merged) for groups in schedule.stages or ()]


def _by_simulation(program: Program) -> Schedule:
    """What local search makes of the best of Nimble's and the list schedules, by latency as simulated from a profile.

    Raises:
        Unsupported: conf/gpu has no such device.
    """
    gpu = _gpu_of(program)
    cache = Measurements(KIND, program.device)
    code = code_of(*(module.__name__ for module in (local_search, simulator, events, edges, kernels)))
    name = digest(["local search", structure(program), operator_ms(program), repr(gpu), code])
    order_and_streams = _order_and_streams(cache[name]) if name in cache else None
    if order_and_streams is None:
        profiled = profile(program)
        assert profiled is not None  # it was told to measure
        simulated = simulator.Simulator(program.graph, profiled, gpu)

        def latency_us(schedule: Schedule) -> float:
            return simulated(schedule).latency_us

        first = min((_nimble(program), *(_list(program, k) for k in MOST_STREAMS)), key=latency_us)
        best = local_search.improved(first, latency_us, min(MOST_TRIALS, SIMULATED_OPERATORS // len(program.graph)))
        order_and_streams = best.order, best.streams
        cache.add({name: [[*best.order], [*best.streams]]})
    order, streams = order_and_streams
    return Schedule(program.graph, "local search", order, streams, waits_between(program.graph, order, streams))


def _order_and_streams(entry: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """As the cache has them; None where it has something else."""
    try:
        order, streams = ([int(number) for number in numbers] for numbers in entry)
    except (TypeError, ValueError):
        return None
    return (tuple(order), tuple(streams)) if len(order) == len(streams) else None


def _gpu_of(program: Program) -> Gpu:
    """Raises Unsupported where conf/gpu has no such device."""
    device = torch.cuda.get_device_name(program.device) if program.device.type == "cuda" else str(program.device)
    gpu = find(device)
    if gpu is None:
        why = "on a CPU" if program.device.type == "cpu" else f"since conf/gpu has no {device}"
        raise Unsupported(f"it is simulated for a GPU: skipped {why}")
    return gpu


def _opara(program: Program, order: str) -> Schedule:
    """Opara's streams, launched in one of ORDERS; by milliseconds where that asks for a demand."""
    graph = program.graph
    streams = allocate_streams(graph)
    launched = ORDERS[order](graph, memory_intensive(program, "measured"), operator_ms(program))
    return Schedule(graph, order, launched, streams, needed_waits(graph, streams))


def _list(program: Program, num_streams: int) -> Schedule:
    return list_schedule(program.graph, operator_ms(program), num_streams)


def operator_ms(program: Program) -> Sequence[float]:
    """Milliseconds of each operator alone, on this device; 0 of a view.

    Not by a profiler: on a GPU that stays in the process once it has stopped, and slows each later launch of a CUDA Graph.
    """
    if (known := KNOWN_MS.get(program)) is None:
        timer = Timer(program.device)
        try:
            known = [_alone_ms(program, v, timer) for v in range(len(program.graph))]
        finally:
            timer.close()
        KNOWN_MS[program] = known
    return known


def _alone_ms(program: Program, v: int, timer: Timer) -> float:
    """As the timer has it by the operator's signature, which is that of the operator alone; else as it measures that."""
    if is_view(program.calls[v].function):
        return 0.0
    milliseconds = timer.find(program.signature(v))
    return timer(part(program, [v])) if milliseconds is None else milliseconds


FIRST = "nimble"
STREAM_PLANS: dict[str, StreamPlan] = {  # those that were fastest most often come first
    FIRST: _nimble,
    "sequential": _sequential,
    "greedy stages": partial(_greedy_stages, barriers=False),
    **{f"list, {k} streams": partial(_list, num_streams=k) for k in MOST_STREAMS},
    **{f"opara streams, {order}": partial(_opara, order=order) for order in ORDERS},
    "greedy stages, barriers": partial(_greedy_stages, barriers=True),
}
# Those that take a search of their own, tried last.
SEARCHED: dict[str, StreamPlan] = {
    "local search": _by_simulation,
    "IOS": partial(_ios, barriers=False),
    "IOS, barriers": partial(_ios, barriers=True),
}
STREAM_PLANS |= SEARCHED
