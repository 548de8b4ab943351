"""A depthwise convolution and a pointwise one, with activations, bias and addition, in one kernel.

At batch 1 library kernels for these are so short that the gaps between them count as much. Here each block computes
the depthwise values that its tile of the product reads. Blocks of other output channels compute them again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .convolution import Convolution
from .kernel import Launch
from .tile import (
    activated,
    check_activations,
    let_consumers_launch,
    power_of_two,
    rounded,
    shared_sum,
    strides_of,
    wait_for_producers,
)

FEW_TAPS = 9  # of a depthwise kernel, up to which its rows are unrolled
SOME_TAPS = 25  # up to which that is worth a trial: it takes longer to compile


@dataclass(frozen=True)
class Tile:
    """How the output [pixels, channels] is cut.

    Args:
        pixels, channels: of the output that a block computes; powers of two, 16 at least.
        depth: input channels that it multiplies at a time; as those.
        warps: of a block.
        stages: of the software pipeline.
        splits: blocks that share a sum, each of some of the input channels. The last of them to end adds up the parts.
        is_unrolled: the rows of a depthwise kernel are instructions one after the other, not passes of a loop.
    """

    pixels: int
    channels: int
    depth: int
    warps: int
    stages: int
    is_unrolled: bool = True
    splits: int = 1

    def num_blocks(self, num_pixels: int, num_channels: int) -> int:
        """Of an output of so many pixels and channels; those that share a sum counted once."""
        return -(-num_pixels // self.pixels) * -(-num_channels // self.channels)

    def __str__(self) -> str:
        rows = "" if self.is_unrolled else ", row by row"
        splits = f", split by {self.splits}" if self.splits > 1 else ""
        return f"{self.pixels}x{self.channels}x{self.depth}, {self.warps} warps, {self.stages} stages{rows}{splits}"


@dataclass(frozen=True)
class Separable(Convolution):
    """out = after(bias + pointwise(between(depthwise(before(x)) + depthwise_bias)) + addend).

    The window is the depthwise convolution's.

    Args:
        before, between, after: one of ACTIVATIONS each. Raises ValueError for another.
        precision: of the product of fp32 tensors, "tf32" or "ieee".
        is_channels_last: the layout of the output; else it is contiguous.
        tile: how the output is cut.
    """

    before: str
    between: str
    after: str
    precision: str
    is_channels_last: bool
    tile: Tile

    def __post_init__(self) -> None:
        check_activations(self.before, self.between, self.after)

    def __str__(self) -> str:
        words = [self.window]
        words += [f"{name} {act}" for name in ("before", "between", "after") if (act := getattr(self, name)) != "none"]
        words += ["channels_last"] * self.is_channels_last
        return ", ".join([*words, self.precision, str(self.tile)])

    def launch(  # type: ignore[override]
        self,
        x: Tensor,
        depthwise: Tensor,
        depthwise_bias: Tensor | None,
        pointwise: Tensor,
        bias: Tensor | None,
        addend: Tensor | None,
        tickets: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Launch:
        """Args:
        x: [N, C, H, W], of any strides.
        depthwise: [kernel height * width, C], contiguous: neighbouring threads read neighbouring channels.
        depthwise_bias: [C].
        pointwise: [K, C, 1, 1], contiguous in memory.
        bias: [K].
        addend: of the output's shape, of any strides.
        tickets: [blocks without splits] int32, zeros, of this call alone; None without splits.
        out: [N, K, H', W'] of any strides, where it writes; a new tensor where there is none.
        """
        n, c, h, w = x.shape
        k = pointwise.shape[0]
        if out is None:
            out = self.output(x, k, self.is_channels_last)
        height, width = out.shape[2:]
        tile = self.tile
        grid = (triton.cdiv(n * height * width, tile.pixels), triton.cdiv(k, tile.channels), tile.splits)
        parts = None
        if tile.splits > 1:
            parts = torch.empty((*grid, tile.pixels, tile.channels), dtype=torch.float32, device=x.device)
        arguments = (
            x, depthwise, depthwise_bias, pointwise, bias, addend, out, parts, tickets,
            n * height * width, height, width, h, w, c, k,
            *x.stride(), *strides_of(addend), *out.stride(),
            *self.kernel, *self.stride, *self.padding, *self.dilation,
            self.before, self.between, self.after, self.precision,
            tile.pixels, tile.channels, tile.depth, tile.splits, tile.is_unrolled, self.is_early,
        )  # fmt: skip
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": self.is_early}
        return Launch(_separable, grid, arguments, options, out)


def tiles(in_channels: int, out_channels: int, num_taps: int, num_pixels: int, num_cores: int) -> list[Tile]:
    """The tiles worth a trial, most promising first.

    A depthwise value is computed once for each block of output channels. Few pixels a block make enough blocks at batch 1.
    Input channels that do not fit go to blocks of their own, which share the sum, as long as there are cores for these:
    several after one another took four times as long on an H200.

    Args:
        num_taps: of the depthwise kernel, height * width.
        num_pixels: of the output, of all samples.
        num_cores: multiprocessors of the GPU.
    """
    depth, widest = min(power_of_two(in_channels), 256), power_of_two(out_channels)
    shapes = [(32, depth), (64, depth)] if widest > 16 else [(16, depth)]
    if in_channels > 128:
        shapes = [(64, 128), *shapes]
    candidates = []
    for channels, depth in shapes:
        if channels > widest:
            continue
        tile = Tile(16, channels, depth, 8 if depth >= 256 else 4, 1, num_taps <= FEW_TAPS)
        splits = -(-in_channels // depth)
        has_room = splits * tile.num_blocks(num_pixels, out_channels) <= 8 * num_cores
        candidates.append(replace(tile, splits=splits if has_room else 1))
    if FEW_TAPS < num_taps <= SOME_TAPS:  # the widest unrolled, with threads for that
        candidates = [replace(candidates[-1], warps=8, is_unrolled=True), *candidates[:2]]
    return candidates


@triton.jit
def _read(
    x_ptr, y, x, is_pixel, is_c,
    H: tl.constexpr, W: tl.constexpr, YS: tl.constexpr, XS: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """Activated values of [pixels, channels]; 0 in the padding. x_ptr: of each pixel's sample and each channel."""
    is_inside = is_pixel & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    mask = is_inside[:, None] & is_c[None, :]
    values = tl.load(x_ptr + (y * YS + x * XS)[:, None], mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, activated(values, BEFORE), 0.0)


@triton.jit
def _separable(
    x_ptr, depthwise_ptr, depthwise_bias_ptr, pointwise_ptr, bias_ptr, addend_ptr, out_ptr, parts_ptr, tickets_ptr,
    M: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    C: tl.constexpr, K: tl.constexpr,
    XN: tl.constexpr, XC: tl.constexpr, XH: tl.constexpr, XW: tl.constexpr,
    AN: tl.constexpr, AC: tl.constexpr, AH: tl.constexpr, AW: tl.constexpr,
    ON: tl.constexpr, OC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BEFORE: tl.constexpr, BETWEEN: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr,
    SPLITS: tl.constexpr, IS_UNROLLED: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_producers(IS_EARLY)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_pixel, is_channel = pixel < M, channel < K
    sample, row, column = pixel // (HEIGHT * WIDTH), pixel // WIDTH % HEIGHT, pixel % WIDTH
    top, left = row * SH - PH, column * SW - PW
    sums = tl.full((PIXELS, CHANNELS), 0.0, tl.float32)
    steps: tl.constexpr = ((C + DEPTH - 1) // DEPTH + SPLITS - 1) // SPLITS
    for step in range(steps):
        c = (tl.program_id(2) * steps + step) * DEPTH + tl.arange(0, DEPTH)
        is_c = c < C
        x_c_ptr = x_ptr + c[None, :] * XC + (sample * XN)[:, None]
        value = tl.full((PIXELS, DEPTH), 0.0, tl.float32)
        if IS_UNROLLED:
            for i in tl.static_range(KH):
                for j in tl.static_range(KW):
                    weight = tl.load(depthwise_ptr + (i * KW + j) * C + c, mask=is_c, other=0.0).to(tl.float32)
                    read = _read(x_c_ptr, top + i * DH, left + j * DW, is_pixel, is_c, H, W, XH, XW, BEFORE)
                    value += read * weight[None, :]
        else:
            for i in range(KH):
                for j in tl.static_range(KW):
                    weight = tl.load(depthwise_ptr + (i * KW + j) * C + c, mask=is_c, other=0.0).to(tl.float32)
                    read = _read(x_c_ptr, top + i * DH, left + j * DW, is_pixel, is_c, H, W, XH, XW, BEFORE)
                    value += read * weight[None, :]
        if depthwise_bias_ptr is not None:
            value += tl.load(depthwise_bias_ptr + c, mask=is_c, other=0.0).to(tl.float32)[None, :]
        value = activated(value, BETWEEN)
        weights = tl.load(
            pointwise_ptr + channel[None, :] * C + c[:, None], mask=is_c[:, None] & is_channel[None, :], other=0.0
        )
        factor = value.to(weights.dtype)
        if PRECISION == "tf32":
            factor, weights = rounded(factor), rounded(weights)
        sums = tl.dot(factor, weights, sums, input_precision=PRECISION)
    let_consumers_launch(IS_EARLY)
    is_last = True
    if parts_ptr is not None:
        sums, is_last = shared_sum(sums, parts_ptr, tickets_ptr, SPLITS, PIXELS, CHANNELS)
    if is_last:
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        place = (sample * ON + row * OH + column * OW)[:, None] + channel[None, :] * OC
        mask = is_pixel[:, None] & is_channel[None, :]
        if addend_ptr is not None:
            addend_place = (sample * AN + row * AH + column * AW)[:, None] + channel[None, :] * AC
            sums += tl.load(addend_ptr + addend_place, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + place, activated(sums, AFTER).to(out_ptr.dtype.element_ty), mask=mask)
