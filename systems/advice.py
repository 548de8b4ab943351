"""What scheduling a model's operators over streams can gain, predicted by simulation: no GPU has to be here.

1. Profile. Each operator alone, out of measured sets; what none of them has is estimated by a roofline rule.
2. Limits. One stream's time, the critical path and the SM area bound what any schedule of these kernels gains.
3. Forecasts. The schedule that each scheduler makes is simulated. IOS searches by simulated costs, SEARCH_SECONDS at most.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import conf
from systems.base import Unsupported
from systems.preparing import OverBudget, at_most
from systems.profiling.intensity import in_table
from systems.profiling.limits import critical_path, held_share
from systems.profiling.profile import OperatorProfile, Profile
from systems.registry import load
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.lower import lower
from systems.scheduling.plans.merge import MERGED
from systems.scheduling.plans.schedule import Schedule, sequential
from systems.scheduling.scheduler import Scheduler
from systems.scheduling.simulate.estimate import estimated
from systems.scheduling.simulate.gpu import Gpu, find
from systems.scheduling.simulate.measured_set import MeasuredSet, ProfiledProgram
from systems.scheduling.simulate.simulator import Simulator
from systems.scheduling.simulate.stored import StoredOperators
from systems.scheduling.simulate.what_if import on_another

SCHEDULERS = ("nimble", "opara", "ios")
SEARCH_SECONDS = 20.0  # of IOS's search at most, which takes minutes for wide models


@dataclass(frozen=True)
class Forecast:
    """What one scheduler's schedule would take.

    Args:
        system: Its name.
        latency_ms: Simulated; None where it has no schedule, for this reason.
        num_streams: Of the schedule.
        num_merged: Operators that each take the place of several, in kernels of their own.
        measured_gain: One stream's latency over that of the same schedule, both measured in turn; None where nobody did.
    """

    system: str
    latency_ms: float | None
    num_streams: int | None = None
    num_merged: int = 0
    measured_gain: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Outlook:
    """What is predicted of one program. Milliseconds are of one replay, or of kernels alone.

    Args:
        is_guess: Are some kernels' times scaled from another GPU?
        operators, kernels, width: How many there are; the most operators with kernels of which none depends on another.
        one_stream_ms: All operators in turn on one stream, simulated.
        measured_ms: The same, measured; None where nobody did.
        launch_ms: What a graph of any schedule takes beside its kernels: its launch and its end.
        busy_ms: The sum over kernels.
        critical_path_ms: The longest chain of dependent operators.
        sm_area_ms: The sum over the waves of all kernels of the share of SMs that each one holds, at its own time.
        fusible_ms: What of `busy_ms` is of operators that memory limits by Opara's table: passes fuse these into others.
        estimated_ms: What of `busy_ms` is estimated, and not measured.
        forecasts: A scheduler each.
    """

    is_guess: bool
    operators: int
    kernels: int
    width: int
    one_stream_ms: float
    measured_ms: float | None
    launch_ms: float
    busy_ms: float
    critical_path_ms: float
    sm_area_ms: float
    fusible_ms: float
    estimated_ms: float
    forecasts: tuple[Forecast, ...]


def outlook(
    program: Program,
    sets: Sequence[MeasuredSet],
    gpu: Gpu,
    report: Callable[[str], None] = lambda _: None,
    systems: Sequence[str] = SCHEDULERS,
) -> Outlook:
    """What is predicted of a program on a GPU.

    Args:
        program: As captured, on any device.
        sets: Measured on one device, whose operators are known; scaled where that is another one than `gpu`.
        report: Told what is being done now.
        systems: Of SCHEDULERS.

    Raises:
        Unsupported: conf/gpu does not have the device of the sets, from which times could be scaled.
    """
    known = _Known(sets, gpu)
    graph = program.graph
    profile, estimates = known.profile(program)
    simulator = Simulator(graph, profile, gpu)
    one_stream = sequential(graph)
    nodes = simulator.kernels.nodes
    times_us = [0.0] * len(graph)
    area_us = 0.0
    for node in nodes:
        times_us[node.operator] += node.alone_us
        if node.blocks:
            area_us += node.alone_us * held_share(node.blocks, node.on_one, gpu.multiprocessors)
    forecasts = []
    for system in systems:
        report(f"scheduling by {system}")
        try:
            schedule = known.schedule(system, program, profile)
        except Unsupported as error:
            forecasts.append(Forecast(system, None, reason=str(error)))
        else:
            forecasts.append(known.forecast(system, program, schedule, one_stream, profile))
    return Outlook(
        is_guess=known.is_guess and any(us > 0 for v, us in enumerate(times_us) if v not in estimates),
        operators=len(graph),
        kernels=len(nodes),
        width=_width(graph, {node.operator for node in nodes}),
        one_stream_ms=simulator(one_stream).latency_us / 1e3,
        measured_ms=known.measured_ms(one_stream, profile),
        launch_ms=(gpu.launch_us + gpu.finish_us) / 1e3,
        busy_ms=sum(times_us) / 1e3,
        critical_path_ms=critical_path(graph, times_us) / 1e3,
        sm_area_ms=area_us / 1e3,
        fusible_ms=sum(times_us[v] for v, operator in enumerate(graph.operators) if in_table(operator.name)) / 1e3,
        estimated_ms=sum(times_us[v] for v in estimates) / 1e3,
        forecasts=tuple(forecasts),
    )


class _Known:
    """What measured sets know of operators and schedules, on one GPU."""

    def __init__(self, sets: Sequence[MeasuredSet], gpu: Gpu):
        self.sets, self.gpu, self.stored = sets, gpu, StoredOperators(sets)
        own = (replace(each, schedules=tuple(s for s in each.schedules if s.name != "random")) for each in sets)
        self.by_set = [StoredOperators([each]) for each in own if each.schedules]  # what one set has was measured in turn
        devices = {each.device for each in sets}
        assert len(devices) <= 1, f"sets of {sorted(devices)}"
        self.own: Gpu | None = gpu
        if devices and devices != {gpu.device}:
            (device,) = devices
            self.own = find(device)
            if self.own is None:
                raise Unsupported(f"conf/gpu has no {device}, from which times could be scaled")

    @property
    def is_guess(self) -> bool:
        """Are times scaled from another GPU?"""
        return self.own != self.gpu

    def profile(self, program: Program) -> tuple[Profile, list[int]]:
        """That of a program, and its operators that are estimated."""
        known = self.stored.operators(program)
        signatures = tuple(program.signature(v) for v in range(len(program.graph)))
        measured = tuple(operator or OperatorProfile(0.0) for operator in known)
        scaled = self._scaled(Profile(self.gpu.device, signatures, measured, self.gpu.capacity))
        unknown = [v for v, operator in enumerate(known) if operator is None]
        estimates = {v: estimated(program, v, self.gpu) for v in unknown}
        operators = tuple(estimates.get(v, operator) for v, operator in enumerate(scaled.operators))
        return Profile(scaled.device, signatures, operators, scaled.capacity), unknown

    def schedule(self, system: str, program: Program, profile: Profile) -> Schedule:
        """A scheduler's, of which nothing is executed. Raises Unsupported."""
        if system == "opara":
            # A captured graph keeps no launch order: of what Opara decides its streams alone count. They need no profile.
            return _planned(load(system, launch_order="depth_first"), program)
        if system != "ios":
            return _planned(load(system), program)
        if self.gpu.name not in conf.choices("gpu"):
            raise Unsupported(f"conf/gpu has no {self.gpu.device}, by which stages are simulated")
        # Merges are other operators: those that a set has measured are considered.
        programs = {"program": ProfiledProgram(program.graph, profile)}
        for i, each in enumerate(self.sets):
            if (merges := each.programs.get("merges")) is not None:
                programs[f"merges {i}"] = ProfiledProgram(merges.graph, self._scaled(merges.profile))
        with TemporaryDirectory() as folder:
            file = Path(folder) / "profile.json"
            MeasuredSet("", 0, {}, programs, ()).write(file)
            try:
                with at_most(SEARCH_SECONDS):
                    return _planned(load(system, costs="simulated", profile=str(file), gpu=self.gpu.name), program)
            except OverBudget as error:
                raise Unsupported(f"its search takes longer than {SEARCH_SECONDS:g} s") from error

    def forecast(
        self, system: str, program: Program, schedule: Schedule, one_stream: Schedule, profile: Profile
    ) -> Forecast:
        lowered, executed = lower(program, schedule)
        own = profile if lowered is program else self.profile(lowered)[0]
        timeline = Simulator(lowered.graph, own, self.gpu)(executed)
        gain = None
        for stored in () if self.is_guess else self.by_set:
            one, other = stored.measurement(one_stream, profile), stored.measurement(executed, own)
            if one is not None and other is not None:
                gain = one.latency_ms / other.latency_ms
        num_merged = 0 if lowered is program else sum(o.name == MERGED for o in lowered.graph.operators)
        return Forecast(system, timeline.latency_us / 1e3, executed.stream_count, num_merged, gain)

    def measured_ms(self, schedule: Schedule, profile: Profile) -> float | None:
        """Of a schedule, where a set has it."""
        measurements = (stored.measurement(schedule, profile) for stored in self.by_set if not self.is_guess)
        return next((measured.latency_ms for measured in measurements if measured is not None), None)

    def _scaled(self, profile: Profile) -> Profile:
        assert self.own is not None
        return on_another(profile, self.own, self.gpu) if self.is_guess else profile


def _width(graph: OperatorGraph, launching: Collection[int]) -> int:
    """The most operators that launch something, of which none depends on another by whatever way."""
    before: list[set[int]] = []  # of each operator, those nearest before it that launch something
    for v in range(len(graph)):
        before.append({w for u in graph.predecessors[v] for w in ({u} if u in launching else before[u])})
    place = {v: i for i, v in enumerate(sorted(launching))}
    operators = [replace(graph.operators[v], id=i) for v, i in place.items()]
    return OperatorGraph(operators, [[place[u] for u in sorted(before[v])] for v in place]).width


def _planned(system: object, program: Program) -> Schedule:
    assert isinstance(system, Scheduler)
    return system.plan(program)
