"""Opara's model profiler: what each operator launches on the GPU, and what that takes of a streaming multiprocessor."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from systems.scheduling.graph.program import Program

from . import limits
from .costs import Cache
from .kernel_trace import exported, launched_under

WARM_UP_PASSES = 2
RESOURCES = ("shared_memory", "largest_share")


@dataclass(frozen=True)
class Kernel:
    """One kernel of an operator. threads and shared_memory (bytes) are those of a block, registers those of a thread;
    occupancy is the achieved one (0 to 1) as the profiler estimates it, None where it does not.
    """

    name: str
    blocks: int
    threads: int
    registers: int
    shared_memory: int
    occupancy: float | None
    milliseconds: float


@dataclass(frozen=True)
class OperatorProfile:
    """The time that one operator's kernels and copies take, and the kernels; on a CPU the time of its call, and none."""

    milliseconds: float
    kernels: tuple[Kernel, ...] = ()

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "OperatorProfile":
        return cls(document["milliseconds"], tuple(Kernel(**kernel) for kernel in document["kernels"]))


@dataclass(frozen=True)
class Capacity:
    """What one streaming multiprocessor has to share among the blocks on it; shared_memory in bytes."""

    threads: int
    registers: int
    shared_memory: int


@dataclass(frozen=True)
class Profile:
    """An OperatorProfile for each operator, and what a multiprocessor holds; None on a CPU, which has no such resources.

    fresh: measured now, and not found in the cache.
    """

    operators: tuple[OperatorProfile, ...]
    capacity: Capacity | None
    fresh: bool = field(default=False, compare=False)

    def demand(self, resource: str) -> list[float]:
        """How much of the device each operator asks for, in a measure that only compares them.

        On a GPU that is what one block of its most demanding kernel asks for (Opara, Section 3.2), nothing for an operator
        that launches no kernel. resource: `shared_memory`, as the released prototype has it, in bytes; or `largest_share`,
        the largest of its shares in a multiprocessor's threads, registers and shared memory, the resources that Section 2.1
        names. On a CPU milliseconds stand in.
        """
        if self.capacity is None:
            return self.milliseconds
        return [max((_demand(k, resource, self.capacity) for k in o.kernels), default=0.0) for o in self.operators]

    @property
    def milliseconds(self) -> list[float]:
        """What each operator takes by itself."""
        return [o.milliseconds for o in self.operators]

    def occupancy(self) -> float | None:
        """The mean achieved occupancy over the kernels' time, of those that have one."""
        timed = [(k.occupancy, k.milliseconds) for o in self.operators for k in o.kernels if k.occupancy is not None]
        total = sum(milliseconds for _, milliseconds in timed)
        return sum(share * milliseconds for share, milliseconds in timed) / total if total else None


def profile(program: Program, measure: bool = True) -> Profile | None:
    """What every operator of `program` takes on its device, from the cache or from one profiled run of the whole model.

    The cache knows an operator by its signature, whichever model it is in. With measure=False nothing runs; then None where
    the cache does not know all of them.
    """
    device = program.device
    names = [f"operator {program.signature(v)}" for v in range(len(program.graph))]
    cache = Cache("opara", device)
    fresh = any(name not in cache for name in names)
    if fresh:
        if not measure:
            return None
        measured = on_gpu(program) if device.type == "cuda" else _on_cpu(program)
        cache.add({name: asdict(operator) for name, operator in zip(names, measured, strict=True)})
    operators = tuple(OperatorProfile.from_json(cache[name]) for name in names)
    return Profile(operators, _capacity(device) if device.type == "cuda" else None, fresh)


def from_trace(trace: dict[str, Any], operators: int) -> list[OperatorProfile]:
    """The profile of each operator from a Chrome trace in which operator v ran under the label limits.LABEL + v.

    Raises ValueError where the trace does not hold all of them, or does not say what launched a kernel.
    """
    launched = launched_under(trace, limits.LABEL)
    if missing := [v for v in range(operators) if str(v) not in launched]:
        raise ValueError(f"operator {missing[0]} is not in the trace")
    return [_operator(launched[str(v)]) for v in range(operators)]


def _operator(events: Sequence[dict[str, Any]]) -> OperatorProfile:
    kernels = tuple(_kernel(e) for e in events if e["cat"] == "kernel")
    return OperatorProfile(sum(e["dur"] for e in events) / 1e3, kernels)


def _kernel(event: dict[str, Any]) -> Kernel:
    arguments = event["args"]
    occupancy = arguments.get("est. achieved occupancy %")
    return Kernel(
        name=event["name"],
        blocks=prod(arguments["grid"]),
        threads=prod(arguments["block"]),
        registers=arguments["registers per thread"],
        shared_memory=arguments["shared memory"],
        occupancy=None if occupancy is None else occupancy / 100,
        milliseconds=event["dur"] / 1e3,
    )


def _demand(kernel: Kernel, resource: str, capacity: Capacity) -> float:
    if resource == "shared_memory":
        return float(kernel.shared_memory)
    return max(
        kernel.threads / capacity.threads,
        kernel.threads * kernel.registers / capacity.registers,
        kernel.shared_memory / capacity.shared_memory,
    )


def _capacity(device: torch.device) -> Capacity:
    properties = torch.cuda.get_device_properties(device)
    return Capacity(
        threads=properties.max_threads_per_multi_processor,
        registers=properties.regs_per_multiprocessor,
        shared_memory=properties.shared_memory_per_multiprocessor,
    )


def _on_cpu(program: Program) -> list[OperatorProfile]:
    return [OperatorProfile(milliseconds) for milliseconds in limits.host_times(program, program.examples)]


@torch.no_grad()
def on_gpu(program: Program) -> list[OperatorProfile]:
    """What every operator of `program` launches in this process, from one profiled run of the whole model. In another
    process it may launch other kernels where cuDNN chooses its algorithms by timing them (algorithms=timed).
    """
    for _ in range(WARM_UP_PASSES):
        program.run(program.examples)
    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        limits.labelled_run(program, program.examples)
        torch.cuda.synchronize()
    return from_trace(exported(profiler), len(program.graph))
