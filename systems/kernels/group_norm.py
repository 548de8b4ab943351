"""A group norm in two kernels: the moments of its groups, and what is made of each number with them.

A library's reads and writes contiguous tensors alone, so that between convolutions in channels_last it needs a copy before
and one after. These take either layout, what is added to each channel before, and an activation after.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel import Kernel, Launch
from .tile import activated, check_activations, let_consumers_launch, wait_for_producers

NUMBERS = 2048  # of a tile
MOST_SPLITS = 16  # of a group


@dataclass(frozen=True)
class GroupMoments(Kernel):
    """The sum of a group, and the sum of squares, both of what exceeds its first number: [N * groups, splits, 2] in fp32.

    Args:
        groups: of the channels.
        splits: parts of the pixels, each of a block of its own; a power of two.
    """

    groups: int
    splits: int

    def __str__(self) -> str:
        return f"{self.groups} groups, {self.splits} splits"

    def launch(self, x: Tensor, addend: Tensor | None) -> Launch:  # type: ignore[override]
        """Args:
        x: [N, C, H, W], contiguous or in channels_last.
        addend: [N or 1, C, 1, 1], added to each pixel before.
        """
        n, channels, pixels = x.shape[0], x.shape[1] // self.groups, x.shape[2] * x.shape[3]
        out = torch.empty(n * self.groups, self.splits, 2, dtype=torch.float32, device=x.device)
        padded = triton.next_power_of_2(channels)
        arguments = (
            x, addend, out, self.groups, channels, pixels, triton.cdiv(pixels, self.splits),
            *x.stride()[:2], x.stride(3), *_strides(addend),
            self.splits, padded, _pixels(padded), self.is_early,
        )  # fmt: skip
        options = {"num_warps": 4, "launch_pdl": self.is_early}
        return Launch(_moments, (n * self.groups, self.splits), arguments, options, out)


@dataclass(frozen=True)
class GroupNorm(Kernel):
    """act((x + addend - mean) / sqrt(variance + epsilon) * weight + bias), as x lies in memory.

    Args:
        groups: of the channels.
        epsilon: added to the variance.
        after: the activation, one of ACTIVATIONS. Raises ValueError for another.
    """

    groups: int
    epsilon: float
    after: str

    def __post_init__(self) -> None:
        check_activations(self.after)

    def __str__(self) -> str:
        return f"{self.groups} groups, epsilon {self.epsilon:.9g}, {self.after}"

    def launch(  # type: ignore[override]
        self, x: Tensor, addend: Tensor | None, moments: Tensor, weight: Tensor, bias: Tensor
    ) -> Launch:
        """Args:
        x, addend: as of the moments.
        moments: what `GroupMoments` makes of them.
        weight, bias: [C].
        """
        (n, channels), pixels = x.shape[:2], x.shape[2] * x.shape[3]
        out = torch.empty_like(x)
        tile = min(64, triton.next_power_of_2(channels)) if x.stride(1) == 1 else min(8, triton.next_power_of_2(channels))
        arguments = (
            x, addend, moments, weight, bias, out, channels, pixels, *x.stride()[:2], x.stride(3), *_strides(addend),
            self.groups, channels // self.groups, self.epsilon, moments.shape[1], tile, _pixels(tile), self.after,
            self.is_early,
        )  # fmt: skip
        grid = (triton.cdiv(pixels, _pixels(tile)), triton.cdiv(channels, tile), n)
        return Launch(_normed, grid, arguments, {"num_warps": 4, "launch_pdl": self.is_early}, out)


def splits_of(x: Tensor, groups: int, num_cores: int) -> int:
    """How many blocks share a group of x, [N, C, H, W], so that there are about two for each multiprocessor."""
    wanted = triton.cdiv(2 * num_cores, x.shape[0] * groups)
    fitting = triton.cdiv(x.shape[2] * x.shape[3] * (x.shape[1] // groups), NUMBERS)
    return min(MOST_SPLITS, triton.next_power_of_2(max(1, min(wanted, fitting))))


def _pixels(channels: int) -> int:
    return max(1, NUMBERS // channels)


def _strides(addend: Tensor | None) -> tuple[int, int]:
    if addend is None:
        return 0, 0
    return (addend.stride(0) if addend.shape[0] > 1 else 0), addend.stride(1)


@triton.jit(do_not_specialize=["PIXELS", "PART"])
def _moments(
    x_ptr, addend_ptr, out_ptr, GROUPS, CHANNELS, PIXELS, PART, XN, XC, XP, AN, AC,
    SPLITS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_producers(IS_EARLY)
    sample, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    split = tl.program_id(1)
    x_ptr += sample * XN + group * CHANNELS * XC
    c = tl.arange(0, PADDED)
    is_c = c < CHANNELS
    first = tl.load(x_ptr).to(tl.float32)
    added = tl.full((PADDED,), 0.0, tl.float32)
    if addend_ptr is not None:
        addend_ptr += sample * AN + group * CHANNELS * AC
        first += tl.load(addend_ptr).to(tl.float32)
        added = tl.load(addend_ptr + c * AC, mask=is_c, other=0.0).to(tl.float32)
    sums = tl.full((TILE, PADDED), 0.0, tl.float32)
    squares = tl.full((TILE, PADDED), 0.0, tl.float32)
    end = tl.minimum((split + 1) * PART, PIXELS)
    for begin in range(split * PART, end, TILE):
        p = begin + tl.arange(0, TILE)
        is_inside = (p < end)[:, None] & is_c[None, :]
        x = tl.load(x_ptr + p[:, None] * XP + c[None, :] * XC, mask=is_inside, other=0.0).to(tl.float32)
        x = tl.where(is_inside, x + added[None, :] - first, 0.0)
        sums += x
        squares += x * x
    let_consumers_launch(IS_EARLY)
    out_ptr += (tl.program_id(0) * SPLITS + split) * 2
    tl.store(out_ptr, tl.sum(tl.sum(sums, axis=1), axis=0))
    tl.store(out_ptr + 1, tl.sum(tl.sum(squares, axis=1), axis=0))


@triton.jit(do_not_specialize=["PIXELS"])
def _normed(
    x_ptr, addend_ptr, moments_ptr, weight_ptr, bias_ptr, out_ptr, CHANNELS, PIXELS, XN, XC, XP, AN, AC,
    GROUPS, GROUP_CHANNELS, EPSILON: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    AFTER: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_producers(IS_EARLY)
    sample = tl.program_id(2)
    p, c = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_p, is_c = p < PIXELS, c < CHANNELS
    group = tl.minimum(c // GROUP_CHANNELS, GROUPS - 1)
    s = tl.arange(0, SPLITS)
    parts_ptr = moments_ptr + ((sample * GROUPS + group)[:, None] * SPLITS + s[None, :]) * 2
    count = GROUP_CHANNELS * PIXELS
    above = tl.sum(tl.load(parts_ptr), axis=1) / count
    variance = tl.maximum(tl.sum(tl.load(parts_ptr + 1), axis=1) / count - above * above, 0.0)
    first_ptr = x_ptr + sample * XN + group * GROUP_CHANNELS * XC
    mean = tl.load(first_ptr).to(tl.float32) + above
    added = tl.full((WIDTH,), 0.0, tl.float32)
    if addend_ptr is not None:
        addend_ptr += sample * AN
        mean += tl.load(addend_ptr + group * GROUP_CHANNELS * AC).to(tl.float32)
        added = tl.load(addend_ptr + c * AC, mask=is_c, other=0.0).to(tl.float32)
    scale = tl.load(weight_ptr + c, mask=is_c, other=0.0).to(tl.float32) / tl.sqrt(variance + EPSILON)
    shift = tl.load(bias_ptr + c, mask=is_c, other=0.0).to(tl.float32)
    place = sample * XN + p[:, None] * XP + c[None, :] * XC
    is_inside = is_p[:, None] & is_c[None, :]
    x = tl.load(x_ptr + place, mask=is_inside, other=0.0).to(tl.float32)
    x = tl.where(is_inside, x + (added - mean)[None, :], 0.0)
    out = activated(x * scale[None, :] + shift[None, :], AFTER)
    let_consumers_launch(IS_EARLY)
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=is_inside)
