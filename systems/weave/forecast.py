"""What a candidate would take by simulation, out of a profile of its operators on this device."""

from dataclasses import replace

import torch

from systems.base import Unsupported
from systems.profiling.profiler import profile
from systems.scheduling.graph.program import Program
from systems.scheduling.plans.lower import lower
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.simulate.gpu import Gpu, find
from systems.scheduling.simulate.simulator import simulate

from .search import Forecast


def forecast_on(device: torch.device) -> Forecast:
    """Raises Unsupported where conf/gpu has no such device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    gpu = find(name)
    if gpu is None:
        raise Unsupported(f"system.costs other than measured simulate this device, and conf/gpu has no {name}")
    return lambda program, schedule: milliseconds(program, schedule, gpu)


def milliseconds(program: Program, schedule: Schedule, gpu: Gpu) -> float:
    """Of one replay. Profiles operators that the cache does not know."""
    if schedule.merges:
        program, schedule = lower(program, replace(schedule, early=()))
    profiled = profile(program)
    assert profiled is not None, "it was told to measure"
    return simulate(schedule, profiled, gpu).latency_us / 1e3
