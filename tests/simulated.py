"""Profiles that tests of the simulator make up."""

from collections.abc import Sequence

from systems.profiling.profile import Kernel, OperatorProfile, Profile
from systems.scheduling.simulate.gpu import load

GPU = load("h200")


def kernel(microseconds: float, blocks: int, threads: int, registers: int, shared_memory: int) -> Kernel:
    return Kernel("k", microseconds / 1e3, (blocks, 1, 1), (threads, 1, 1), registers, shared_memory)


def operator(*kernels: Kernel, moved: int = 0) -> OperatorProfile:
    return OperatorProfile(sum(k.milliseconds for k in kernels), kernels, moved, 0)


def profile_of(operators: Sequence[OperatorProfile]) -> Profile:
    return Profile(GPU.device, tuple(map(str, range(len(operators)))), tuple(operators), GPU.capacity)
