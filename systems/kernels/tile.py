"""What kernels share within a tile: activations, rounding to TF32, and the launch before the kernel before has ended."""

import os
from math import gcd

import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
ACTIVATIONS = ("none", "relu", "relu6", "silu", "sigmoid", "hardswish", "gelu", "gelu_tanh", "quick_gelu")


@triton.jit
def _between_0_and_6(x):
    return tl.minimum(tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), 6.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _coarse_gelu(x):
    """Within 1e-7 of x * Phi(x) relative to x, in fewer instructions: by Abramowitz and Stegun's formula 7.1.26."""
    t = 1.0 / (1.0 + 0.23164187 * tl.abs(x))
    rest = ((((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368) * t + 0.127414796) * t
    rest *= tl.exp2(-0.7213475204444817 * x * x)
    return x * tl.where(x < 0.0, rest, 1.0 - rest)


@triton.jit
def activated(x, name: tl.constexpr, is_coarse: tl.constexpr = False):
    """is_coarse: the result is rounded to 16 bits."""
    if name == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif name == "relu6":
        x = _between_0_and_6(x)
    elif name == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif name == "sigmoid":
        x = 1.0 / (1.0 + tl.exp(-x))
    elif name == "hardswish":
        x = x * _between_0_and_6(x + 3.0) / 6.0
    elif name == "gelu" and is_coarse:
        x = _coarse_gelu(x)
    elif name == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif name == "gelu_tanh":
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif name == "quick_gelu":
        x = x / (1.0 + tl.exp(-1.702 * x))
    return x


@triton.jit
def rounded(x):
    """To the nearest TF32, as libraries do: a tensor core cuts off what it cannot hold, which doubles the error."""
    if x.dtype == tl.float32:
        if not IS_INTERPRETED and cuda_capability_geq(9, 0):  # in one instruction
            x = tl.inline_asm_elementwise("cvt.rn.tf32.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)
        else:
            nearest = ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
            x = tl.where(x == x, nearest, x)  # the addition would carry some NaNs over into zeros
    return x


@triton.jit
def wait_for_producers(is_early: tl.constexpr):
    """Every block waits before it writes, or reads what a kernel has written. So what one before the last wrote is there."""
    if is_early:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_consumers_launch(is_early: tl.constexpr):
    """Blocks of the next kernel may take up an SM once all of this one's have come here."""
    if is_early:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def shared_sum(sums, parts_ptr, tickets_ptr, SPLITS, PIXELS: tl.constexpr, CHANNELS: tl.constexpr):
    """What the blocks of a sum add up to, and whether this is the last of them to come here; others get their own part.

    Blocks that share a sum differ in program_id(2). Parts are added in their order, whoever comes last.

    Args:
        sums: [PIXELS, CHANNELS], this block's part.
        parts_ptr: [blocks, SPLITS, PIXELS, CHANNELS] fp32, for the parts.
        tickets_ptr: [blocks] int32, zeros; left so.
        SPLITS: blocks that share a sum.
    """
    block = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    inner = tl.arange(0, PIXELS)[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    part_ptr = parts_ptr + block * (SPLITS * PIXELS * CHANNELS) + inner
    tl.store(part_ptr + tl.program_id(2) * (PIXELS * CHANNELS), sums)
    tl.debug_barrier()  # all threads have written before one of them says so
    is_last = tl.atomic_add(tickets_ptr + block, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        sums = tl.full((PIXELS, CHANNELS), 0.0, tl.float32)
        for s in range(SPLITS):
            sums += tl.load(part_ptr + s * (PIXELS * CHANNELS), volatile=True)
        tl.store(tickets_ptr + block, 0)
    return sums, is_last


def strides_of(tensor: Tensor | None) -> tuple[int, ...]:
    """Of four dimensions; zeros where there is no tensor."""
    return (0, 0, 0, 0) if tensor is None else tensor.stride()


def split_by_unit(tensor: Tensor, channels: int, *others: Tensor | None) -> tuple[int, list[int]]:
    """Numbers for a kernel to multiply by a unit, so that the compiler knows how memory is aligned.

    Without it the compiler takes only multiples of 16 for aligned: of 168 channels a thread reads one at a time.

    Args:
        tensor: [N, C, H, W], of any strides.
        channels: of it.
        others: as it, whose numbers share the unit.

    Returns:
        The unit, which is 1 where channels are no neighbours, and 16 bytes' numbers at most. The channels over it, and the
        strides over samples, rows and columns of each tensor over it.
    """
    tensors = [tensor, *others]
    numbers = [channels, *(strides_of(each)[i] for each in tensors for i in (0, 2, 3))]
    has_neighbours = all(each is None or each.stride(1) == 1 for each in tensors)
    unit = gcd(16 // tensor.element_size(), *numbers) if has_neighbours else 1
    return unit, [number // unit for number in numbers]


def power_of_two(size: int) -> int:
    """The least one that is no smaller, 16 at least: a tensor core takes no less."""
    return max(16, 1 << (size - 1).bit_length())


def check_activations(*names: str) -> None:
    """Raise ValueError for a name that is none of ACTIVATIONS."""
    for name in names:
        if name not in ACTIVATIONS:
            raise ValueError(f"there is no activation {name}")
