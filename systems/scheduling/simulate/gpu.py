"""A GPU as the simulator knows it: a file of conf/gpu."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import inf

import torch

import conf
from systems.base import BadOption
from systems.profiling.intensity import bandwidth
from systems.profiling.profile import Capacity, checked
from systems.profiling.profiler import capacity_of

GROUP = "gpu"
LEAST = 1e-9  # of what is divided by: times have to stay finite
MAY_BE_NOTHING = (
    "reserved_shared_memory",
    "launch_us",
    "finish_us",
    "edge_us",
    "branch_us",
    "join_us",
    "dispatch_us",
    "sharing",
)
PEAKS = ("fp32_tflops", "tf32_tflops", "half_tflops")


@dataclass(frozen=True)
class Gpu:
    """What a file of conf/gpu says; the comments there say where each value is from.

    Args:
        name: Of the file.
        device: As CUDA names it.
        multiprocessors: Streaming multiprocessors (SMs) of the device.
        threads, registers, shared_memory, blocks: That one SM holds at most; shared memory in bytes.
        reserved_shared_memory: Bytes that CUDA takes for itself from each block's shared memory.
        l2_bytes: Of the L2 cache.
        clock_mhz: Of an SM, the highest under load.
        bandwidth_gb_s: Of device memory, in 1e9 bytes a second.
        fp32_tflops: Peak arithmetic outside matrix units, in 1e12 operations a second.
        tf32_tflops: Peak dense TF32 arithmetic; `fp32_tflops` where the matrix units take no TF32.
        half_tflops: The same of fp16 and bf16, added up in fp32; `fp32_tflops` where no unit takes them.
        launch_us: From the launch of a graph to the beginning of its first kernels.
        finish_us: From the end of its last kernel to what comes after the graph.
        edge_us: From the end of a kernel to the beginning of the next one in a chain.
        branch_us: The same where one of them has other neighbours too: where branches part or meet.
        dispatch_us: Between the beginnings of two kernels at least.
        join_us: What that takes more for each further kernel that the first of the two has waited for.
        sharing: How far kernels on the same SMs slow each other down: 0 not at all, 1 as if one ran after the other.
    """

    name: str
    device: str
    multiprocessors: int
    threads: int
    registers: int
    shared_memory: int
    blocks: int
    reserved_shared_memory: int
    l2_bytes: int
    clock_mhz: float
    bandwidth_gb_s: float
    fp32_tflops: float
    tf32_tflops: float
    half_tflops: float
    launch_us: float
    finish_us: float
    edge_us: float
    branch_us: float
    join_us: float
    dispatch_us: float
    sharing: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                continue
            least = 0 if field.name in MAY_BE_NOTHING else 1 if field.type is int else LEAST
            most = 1 if field.name == "sharing" else inf
            if not (least <= value <= most and value < inf):
                bound = f" and at most {most}" if most < inf else ""
                raise BadOption(f"{GROUP}.{field.name} is {value}: it is a number of at least {least:g}{bound}")

    @cached_property
    def capacity(self) -> Capacity:
        """What one SM shares among the blocks on it."""
        return Capacity(
            threads=self.threads,
            registers=self.registers,
            shared_memory=self.shared_memory,
            blocks=self.blocks,
            reserved_shared_memory=self.reserved_shared_memory,
            num_multiprocessors=self.multiprocessors,
        )


def load(name: str, **changed: conf.Value) -> Gpu:
    """The GPU of conf/gpu/NAME.yaml.

    Args:
        changed: Values in the place of the file's, for a what-if.

    Raises:
        BadOption: There is no such file, or a value is of the wrong kind or size.
    """
    if wrong := conf.not_one_of(GROUP, name, conf.choices(GROUP)):
        raise BadOption(wrong)
    values = conf.options(GROUP, name)
    if wrong := conf.mistake(GROUP, values, changed):
        raise BadOption(wrong)
    if missing := [field.name for field in fields(Gpu) if field.name not in values]:
        raise BadOption(f"conf/{GROUP}/{name}.yaml lacks {missing[0]}")
    if unknown := sorted(set(values) - {field.name for field in fields(Gpu)}):
        raise BadOption(f"conf/{GROUP}/{name}.yaml has {unknown[0]}, which no GPU has")
    gpu = Gpu(**{**values, **changed})  # type: ignore[arg-type]
    if "multiprocessors" not in changed:
        return gpu
    # Peak arithmetic is that of the multiprocessors there are, unless it is told.
    share = gpu.multiprocessors / checked(values["multiprocessors"], int)
    peaks = {name: getattr(gpu, name) * share for name in PEAKS if name not in changed}
    return replace(gpu, **peaks)


def find(device: str) -> Gpu | None:
    """The GPU that CUDA calls `device`; None where conf/gpu has none of that name."""
    return next((gpu for gpu in map(load, conf.choices(GROUP)) if gpu.device == device), None)


def of_device(device: torch.device) -> Gpu:
    """A GPU that is here: of conf/gpu; else by its own limits and a copy's bandwidth, with the H200's costs of edges."""
    name = torch.cuda.get_device_name(device)
    if (known := find(name)) is not None:
        return known
    like, capacity = load("h200"), capacity_of(device)
    share = capacity.num_multiprocessors / like.multiprocessors
    return replace(
        like,
        name=name,
        device=name,
        multiprocessors=capacity.num_multiprocessors,
        threads=capacity.threads,
        registers=capacity.registers,
        shared_memory=capacity.shared_memory,
        blocks=capacity.blocks,
        reserved_shared_memory=capacity.reserved_shared_memory,
        l2_bytes=torch.cuda.get_device_properties(device).L2_cache_size,
        bandwidth_gb_s=bandwidth(device) / 1e9,
        **{name: getattr(like, name) * share for name in PEAKS},
    )
