"""A profile as it might be on another GPU, by a roofline rule: a guess, which never stands beside measurements unlabelled.

A kernel uses a share b of memory's bandwidth (`Node.bandwidth`). That share of its time goes with the bandwidths, the rest
with arithmetic and with the waves that its blocks take:

    t' = t * (b * bandwidth / bandwidth' + (1 - b) * rate / rate' * waves' / waves)

The rate is peak fp32 arithmetic of one multiprocessor. A kernel that another GPU's library would not choose stays.
"""

from dataclasses import replace
from math import ceil

from systems.profiling.profile import Kernel, OperatorProfile, Profile

from .gpu import Gpu


def on_another(profile: Profile, measured_on: Gpu, gpu: Gpu) -> Profile:
    """The profile with each time scaled from the GPU it was measured on to another one."""
    operators = tuple(_operator(operator, measured_on, gpu) for operator in profile.operators)
    return replace(profile, device=f"{gpu.device} (scaled from {profile.device})", operators=operators)


def _operator(operator: OperatorProfile, before: Gpu, after: Gpu) -> OperatorProfile:
    moved, seconds = operator.bytes_read + operator.bytes_written, operator.milliseconds / 1e3
    share = min(1.0, moved / (seconds * before.bandwidth_gb_s * 1e9)) if seconds else 0.0
    kernels = tuple(_kernel(kernel, share, before, after) for kernel in operator.kernels)
    milliseconds = sum(k.milliseconds for k in kernels) if kernels else operator.milliseconds
    return replace(operator, milliseconds=milliseconds, kernels=kernels)


def _kernel(kernel: Kernel, share: float, before: Gpu, after: Gpu) -> Kernel:
    compute = _rate(before) / _rate(after) * _waves(kernel, after) / _waves(kernel, before)
    factor = share * before.bandwidth_gb_s / after.bandwidth_gb_s + (1 - share) * compute
    warm_ms, cold_ms = (None if t is None else t * factor for t in (kernel.warm_ms, kernel.cold_ms))
    return replace(kernel, milliseconds=kernel.milliseconds * factor, warm_ms=warm_ms, cold_ms=cold_ms)


def _rate(gpu: Gpu) -> float:
    return gpu.fp32_tflops / gpu.multiprocessors


def _waves(kernel: Kernel, gpu: Gpu) -> int:
    return max(1, ceil(kernel.num_blocks / (max(1, gpu.capacity.resident_blocks(kernel)) * gpu.multiprocessors)))
