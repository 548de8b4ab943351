"""Profiles that tests of the simulator make up."""

import random
from collections.abc import Sequence
from dataclasses import replace

from systems.profiling.profile import Kernel, OperatorProfile, Profile
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.schedule import sequential
from systems.scheduling.plans.stream_assignment import assign_streams
from systems.scheduling.simulate.gpu import load
from systems.scheduling.simulate.measured_set import MeasuredSchedule, MeasuredSet, ProfiledProgram
from systems.scheduling.simulate.random_schedules import random_schedule

GPU = load("h200")


def kernel(microseconds: float, blocks: int, threads: int, registers: int, shared_memory: int) -> Kernel:
    return Kernel("k", microseconds / 1e3, (blocks, 1, 1), (threads, 1, 1), registers, shared_memory)


def operator(*kernels: Kernel, moved: int = 0) -> OperatorProfile:
    return OperatorProfile(sum(k.milliseconds for k in kernels), kernels, moved, 0)


def profile_of(operators: Sequence[OperatorProfile]) -> Profile:
    return Profile(GPU.device, tuple(map(str, range(len(operators)))), tuple(operators), GPU.capacity)


def made_set(program: Program, microseconds: list[float], blocks: int = 8) -> MeasuredSet:
    """Each operator one kernel, of a time of its own; Nimble's schedule was measured, and one stream's in reverse order."""
    graph = program.graph
    signatures = tuple(f"{program.signature(v)}" for v in range(len(graph)))
    by_signature = {s: operator(kernel(us, blocks, 128, 32, 0)) for s, us in zip(signatures, microseconds, strict=True)}
    profile = replace(profile_of([by_signature[s] for s in signatures]), signatures=signatures)
    schedules = (
        MeasuredSchedule("sequential", "captured", sequential(graph), (0.3,), 0.3),
        MeasuredSchedule("nimble", "captured", assign_streams(graph), (0.2,), 0.2),
        MeasuredSchedule("random", "captured", random_schedule(graph, random.Random(0), 0.5), (0.1,), 0.1),
    )
    return MeasuredSet("branches", 1, {}, {"captured": ProfiledProgram(graph, profile)}, schedules)
