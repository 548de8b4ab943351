"""Measures what each operator of a program takes alone, in one profiled run of the program, and keeps it in the cache."""

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from systems.cache import JSON
from systems.scheduling.graph.effects import is_view
from systems.scheduling.graph.program import Program

from . import trace
from .intensity import moved_bytes
from .measurements import Measurements
from .profile import Capacity, Kernel, OperatorProfile, Profile, checked, kernel_of, mapping, number
from .trace import DeviceEvent, Event, KernelEvent

WARM_UP_PASSES = 2
HOST_PASSES = 5
LABEL = "operator:"


def profile(program: Program, measure: bool = True) -> Profile | None:
    """Every operator of `program` alone, from the cache or from one profiled run of the whole program.

    The cache knows an operator by its signature, whichever program it is in. An entry that cannot be read counts as absent.

    Args:
        measure: False runs nothing; the result is then None where the cache lacks an operator.
    """
    device = program.device
    on_cuda = device.type == "cuda"
    signatures = tuple(program.signature(v) for v in range(len(program.graph)))
    cache = Measurements("opara", device)
    operators = _known(program, signatures, cache)
    if is_fresh := operators is None:
        if not measure:
            return None
        if on_cuda:
            measured = on_gpu(program)
        else:
            measured = [OperatorProfile(milliseconds) for milliseconds in host_times(program, program.examples)]
        cache.add({_name(s): to_entry(operator) for s, operator in zip(signatures, measured, strict=True)})
        operators = _known(program, signatures, cache)
        assert operators is not None, "what was measured is in the cache"
    name = torch.cuda.get_device_name(device) if on_cuda else str(device)
    return Profile(name, signatures, operators, capacity_of(device) if on_cuda else None, is_fresh)


def _known(program: Program, signatures: Sequence[str], cache: Measurements) -> tuple[OperatorProfile, ...] | None:
    """The operators as the cache has them; None where it lacks one, or has an entry that cannot be read."""
    try:
        return tuple(from_entry(cache[_name(s)], *moved_bytes(program, v)) for v, s in enumerate(signatures))
    except (KeyError, TypeError, ValueError):
        return None


def _name(signature: str) -> str:
    return f"operator {signature}"


def to_entry(operator: OperatorProfile) -> dict[str, JSON]:
    """What the cache keeps of an operator. Bytes are not among it, since they follow from the signature.

    `launches` holds (grid, block) of each kernel, beside their products `blocks` and `threads`, which every entry has.
    """
    kernels: list[JSON] = [
        {
            "name": k.name,
            "blocks": k.num_blocks,
            "threads": k.num_threads,
            "registers": k.registers,
            "shared_memory": k.shared_memory,
            "occupancy": k.achieved_occupancy,
            "milliseconds": k.milliseconds,
        }
        for k in operator.kernels
    ]
    launches: list[JSON] = [[[*k.grid], [*k.block]] for k in operator.kernels]
    return {"milliseconds": operator.milliseconds, "kernels": kernels, "launches": launches}


def from_entry(entry: object, bytes_read: int = 0, bytes_written: int = 0) -> OperatorProfile:
    """Read an entry of the cache.

    One without `launches` knows how many blocks and threads a kernel has, and not their shape. Its kernels are read as
    (blocks, 1, 1) and (threads, 1, 1): no demand and no occupancy depends on the shape.

    Raises:
        KeyError, TypeError, ValueError: It is no such entry.
    """
    whole = mapping(entry)
    kernels = [mapping(kernel) for kernel in checked(whole["kernels"], list)]
    launches = checked(whole.get("launches", [[[k["blocks"], 1, 1], [k["threads"], 1, 1]] for k in kernels]), list)
    return OperatorProfile(
        number(whole["milliseconds"]),
        tuple(
            kernel_of({**kernel, "grid": grid, "block": block, "achieved_occupancy": kernel["occupancy"]})
            for kernel, (grid, block) in zip(kernels, launches, strict=True)
        ),
        bytes_read,
        bytes_written,
    )


def on_gpu(program: Program) -> list[OperatorProfile]:
    """Every operator of `program` alone, as it runs in this process, from one profiled run of the whole program.

    Another process may launch other kernels where cuDNN chooses its algorithms by timing them (algorithms=timed). Bytes are
    left at 0.
    """
    (launches,) = launched(program, program.examples)
    return [_operator(events) for events in launches]


@torch.no_grad()
def launched(program: Program, inputs: Sequence[Tensor], passes: int = 1) -> list[list[list[DeviceEvent]]]:
    """The kernels and copies that each operator launches on a GPU: [pass][operator], in the order of launching.

    Args:
        passes: Runs of the whole program under one profiler, after some to warm up.

    Raises:
        ValueError: The profiler missed something.
    """
    rewind = program.rewinding()
    for _ in range(WARM_UP_PASSES):
        program.run(inputs)
        rewind()
    torch.cuda.synchronize()
    labels = [f"pass {i}, {LABEL}" for i in range(passes)]
    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for label in labels:
            _labelled_run(program, inputs, label)
            rewind()
        torch.cuda.synchronize()
    events = trace.exported(profiler)
    return seen(program, [by_operator(events, len(program.graph), label) for label in labels])


def seen(program: Program, runs: list[list[list[DeviceEvent]]]) -> list[list[list[DeviceEvent]]]:
    """What the passes launched, as it is: a profiler that finds no memory on the GPU says nothing, and sees no kernel.

    Raises:
        ValueError: A pass launched nothing, although an operator computes something.
    """
    computes = any(not is_view(call.function) for call in program.calls)
    if computes and not all(any(operators) for operators in runs):
        raise ValueError("the profiler saw no kernel: the GPU's memory may have no room for what it records")
    return runs


def by_operator(events: Sequence[Event], count: int, label: str = LABEL) -> list[list[DeviceEvent]]:
    """What each of `count` operators launched, from a trace in which operator v ran under the label `label` + v.

    Raises:
        ValueError: The trace lacks an operator, or the call that launched something.
    """
    launches = trace.launched_under(events, label)
    if missing := [v for v in range(count) if str(v) not in launches]:
        raise ValueError(f"operator {missing[0]} is not in the trace")
    return [launches[str(v)] for v in range(count)]


def host_times(program: Program, inputs: Sequence[Tensor]) -> list[float]:
    """Milliseconds of each operator's call on a CPU, the median over HOST_PASSES runs of the whole program."""
    samples: list[list[float]] = [[] for _ in program.calls]
    rewind = program.rewinding()
    for i in range(WARM_UP_PASSES + HOST_PASSES):
        rewind()
        start = perf_counter()

        def each(v: int, _output: object, is_sampled: bool = i >= WARM_UP_PASSES) -> None:
            nonlocal start
            if is_sampled:
                samples[v].append((perf_counter() - start) * 1e3)
            start = perf_counter()

        program.run(inputs, each)
    return [median(s) for s in samples]


def _labelled_run(program: Program, inputs: Sequence[Tensor], label: str) -> None:
    """Run all operators in the order of capture, operator v under the label `label` + v for a profiler."""
    values: list[Any] = [None] * len(program.graph)
    last = program.last_consumers()
    for v in range(len(program.graph)):
        with record_function(f"{label}{v}"):
            values[v] = program.execute(v, values, inputs)
        for u in last[v]:
            values[u] = None


def _operator(events: Sequence[DeviceEvent]) -> OperatorProfile:
    kernels = tuple(kernel_of_event(e) for e in events if isinstance(e, KernelEvent))
    return OperatorProfile(sum(e.duration_us for e in events) / 1e3, kernels)


def kernel_of_event(event: KernelEvent) -> Kernel:
    """Raises ValueError where the trace does not say what the kernel takes."""
    if event.registers is None or event.shared_memory is None:
        raise ValueError(f"the trace does not say what {event.name} takes of a multiprocessor")
    percent = event.occupancy_percent
    return Kernel(
        name=event.name,
        milliseconds=event.duration_us / 1e3,
        grid=event.grid,
        block=event.block,
        registers=event.registers,
        shared_memory=event.shared_memory,
        achieved_occupancy=None if percent is None else percent / 100,
    )


def capacity_of(device: torch.device) -> Capacity:
    """What a GPU says of itself."""
    from systems.scheduling.execution.cuda_streams import checked as succeeded
    from systems.scheduling.execution.cuda_streams import cudart  # which is absent where there is no CUDA

    properties = torch.cuda.get_device_properties(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    limits = cudart.cudaDeviceAttr
    blocks, reserved = (  # torch does not tell these two
        int(succeeded(cudart.cudaDeviceGetAttribute(limit, index)))
        for limit in (limits.cudaDevAttrMaxBlocksPerMultiprocessor, limits.cudaDevAttrReservedSharedMemoryPerBlock)
    )
    return Capacity(
        threads=properties.max_threads_per_multi_processor,
        registers=properties.regs_per_multiprocessor,
        shared_memory=properties.shared_memory_per_multiprocessor,
        blocks=blocks,
        reserved_shared_memory=reserved,
        num_multiprocessors=properties.multi_processor_count,
    )
