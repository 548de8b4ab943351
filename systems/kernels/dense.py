"""A convolution whose output channels read all input channels, with activations, bias and addition, in one kernel.

The convolution is a matrix product that reads its left factor out of the image (implicit GEMM). At batch 1 it has few
outputs and a long sum, so the sum can be split among blocks.
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
    split_by_unit,
    strides_of,
    wait_for_producers,
)

# Each factor as a number of TF32 and the rest, in three products: as precise as fp32, but for what TF32 rounds to infinity,
# which is within 0.05 % of the largest number.
THRICE = "tf32x3"
PRECISIONS = ("tf32", THRICE, "ieee")


@dataclass(frozen=True)
class DenseTile:
    """How the output [pixels, channels] is cut, and the sum of each element.

    Args:
        pixels, channels: of the output that a block computes; powers of two, 16 at least.
        depth: products that it adds at a time; as those.
        warps: of a block.
        stages: of the software pipeline.
        splits: blocks that share a sum. The last of them to end adds up the parts, in their order.
    """

    pixels: int
    channels: int
    depth: int
    warps: int
    stages: int
    splits: int = 1

    def num_blocks(self, num_pixels: int, num_channels: int) -> int:
        """Of an output of so many pixels and channels; those that share a sum counted once."""
        return -(-num_pixels // self.pixels) * -(-num_channels // self.channels)

    def __str__(self) -> str:
        splits = f", split by {self.splits}" if self.splits > 1 else ""
        return f"{self.pixels}x{self.channels}x{self.depth}, {self.warps} warps, {self.stages} stages{splits}"


@dataclass(frozen=True)
class Dense(Convolution):
    """out = after(bias + convolution(before(x)) + addend), of one group.

    Args:
        before, after: one of ACTIVATIONS each. Raises ValueError for another.
        precision: of the product of fp32 tensors, one of PRECISIONS. Raises ValueError for another.
        is_channels_last: the layout of the output; else it is contiguous.
        tile: how the output is cut.
    """

    before: str
    after: str
    precision: str
    is_channels_last: bool
    tile: DenseTile

    def __post_init__(self) -> None:
        check_activations(self.before, self.after)
        if self.precision not in PRECISIONS:
            raise ValueError(f"there is no precision {self.precision}")

    def __str__(self) -> str:
        words = [f"{name} {act}" for name in ("before", "after") if (act := getattr(self, name)) != "none"]
        words += ["channels_last"] * self.is_channels_last
        return ", ".join([self.window, *words, self.precision, str(self.tile)])

    def launch(  # type: ignore[override]
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        addend: Tensor | None,
        tickets: Tensor | None,
        out: Tensor | None = None,
        rest: Tensor | None = None,
    ) -> Launch:
        """Args:
        x: [N, C, H, W], of any strides.
        weight: [K, kernel height * width * C], contiguous, rounded to TF32 where that is the precision or THRICE.
        bias: [K].
        addend: of the output's shape, of any strides.
        tickets: [blocks without splits] int32, zeros, of this call alone; None without splits.
        out: [N, K, H', W'] of any strides, where it writes; a new tensor where there is none.
        rest: what rounding has taken of the weight, in THRICE alone; as the weight, and 0 where that is no number.

        Raises:
            ValueError: THRICE has no rest, or another precision has one.
        """
        if (rest is None) == (self.precision == THRICE):
            raise ValueError(
                f"{self.precision} takes {'what rounding left of' if rest is None else 'nothing beside'} a weight"
            )
        n, c, h, w = x.shape
        k = weight.shape[0]
        if out is None:
            out = self.output(x, k, self.is_channels_last)
        height, width = out.shape[2:]
        tile = self.tile
        m = n * height * width
        grid = (triton.cdiv(m, tile.pixels), triton.cdiv(k, tile.channels), tile.splits)
        parts = None
        if tile.splits > 1:
            parts = torch.empty((*grid, tile.pixels, tile.channels), dtype=torch.float32, device=x.device)
        is_pointwise = self.kernel == (1, 1) and self.padding == (0, 0)
        images = [tensor for tensor in (x, addend, out) if tensor is not None]
        is_linear = is_pointwise and self.stride == (1, 1) and all(map(_is_linear, images))
        in_unit, (in_channels, xn, xh, xw) = split_by_unit(x, c)
        out_unit, (out_channels, on, oh, ow, an, ah, aw) = split_by_unit(out, k, addend)
        arguments = (
            x, weight, rest, bias, addend, out, parts, tickets, m, height, width, h, w, in_channels, out_channels,
            xn, x.stride(1), xh, xw, an, strides_of(addend)[1], ah, aw, on, out.stride(1), oh, ow,
            *self.kernel, *self.stride, *self.padding, *self.dilation, tile.splits,
            self.before, self.after, self.precision,
            c < tile.depth, c % tile.depth == 0, is_pointwise, is_linear,
            in_unit, out_unit, tile.pixels, tile.channels, tile.depth, self.is_early,
        )  # fmt: skip
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": self.is_early}
        return Launch(_dense, grid, arguments, options, out)


def _is_linear(tensor: Tensor) -> bool:
    """Do all pixels of an image lie at one distance from each other?"""
    samples, _, height, width = tensor.shape
    by_sample, _, by_row, by_pixel = tensor.stride()
    return (height == 1 or by_row == width * by_pixel) and (samples == 1 or by_sample == height * width * by_pixel)


# The fastest of many that an H200 timed with convolutions of the zoo at batch 1.
SMALL = (
    DenseTile(16, 16, 64, warps=2, stages=3),
    DenseTile(16, 16, 64, warps=4, stages=5),
    DenseTile(16, 64, 64, warps=2, stages=3),
    DenseTile(32, 32, 32, warps=2, stages=3),
    DenseTile(32, 32, 32, warps=4, stages=3),
    DenseTile(64, 32, 64, warps=4, stages=3),
    DenseTile(64, 64, 32, warps=8, stages=3),
    DenseTile(64, 64, 64, warps=4, stages=3),
)
LARGE = (
    DenseTile(64, 64, 32, warps=4, stages=3),
    DenseTile(128, 64, 32, warps=8, stages=4),
    DenseTile(64, 128, 32, warps=8, stages=4),
    DenseTile(128, 128, 32, warps=8, stages=3),
)
MOST_SPLITS = 16  # of a sum


def tiles(num_pixels: int, out_channels: int, in_channels: int, num_taps: int, num_cores: int) -> list[DenseTile]:
    """The tiles worth a trial: small ones, their sums split, and large ones where even those have two blocks a core.

    Args:
        num_pixels: of the output, of all samples.
        num_taps: of the kernel, height * width.
        num_cores: multiprocessors of the GPU.
    """
    widest = power_of_two(num_pixels), power_of_two(out_channels), power_of_two(in_channels * num_taps)
    candidates = []
    for tile in (*SMALL, *LARGE):
        num_blocks = tile.num_blocks(num_pixels, out_channels)
        is_filled = tile.pixels <= widest[0] and tile.channels <= widest[1] and tile.depth <= widest[2]
        if not is_filled or num_blocks > 16 * num_cores or (tile in LARGE and num_blocks < 2 * num_cores):
            continue
        depth = tile.depth
        steps = -(-in_channels // depth) * num_taps if in_channels >= depth else -(-in_channels * num_taps // depth)
        candidates += split(tile, num_blocks, steps, num_cores)
    return candidates or [DenseTile(16, 16, 16, warps=4, stages=3)]


def split(tile: DenseTile, num_blocks: int, steps: int, num_cores: int) -> list[DenseTile]:
    """A tile with as many blocks as there are cores, and with twice as many: two blocks of a core hide each other's latency.

    Args:
        num_blocks: of the output.
        steps: of a sum; a block takes two at least.
        num_cores: multiprocessors of the GPU.
    """
    numbers = (max(1, min(blocks // num_blocks, steps // 2, MOST_SPLITS)) for blocks in (num_cores, 2 * num_cores))
    return [replace(tile, splits=splits) for splits in dict.fromkeys(numbers)]


# Sizes are arguments and not constants, so that a tile is compiled once for many convolutions. Only what says how memory is
# aligned is specialised.
UNALIGNED = ["M", "HEIGHT", "WIDTH", "H", "W", "KH", "KW", "SH", "SW", "PH", "PW", "DH", "DW", "SPLITS"]


@triton.jit(do_not_specialize=UNALIGNED)
def _dense(
    x_ptr, weight_ptr, rest_ptr, bias_ptr, addend_ptr, out_ptr, parts_ptr, tickets_ptr,
    M, HEIGHT, WIDTH, H, W, C, K, XN, XC, XH, XW, AN, AC, AH, AW, ON, OC, OH, OW, KH, KW, SH, SW, PH, PW, DH, DW, SPLITS,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr,
    IS_FLAT: tl.constexpr, IS_EVEN: tl.constexpr, IS_POINTWISE: tl.constexpr, IS_LINEAR: tl.constexpr,
    IN_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_producers(IS_EARLY)
    C, XN, XH, XW = C * IN_UNIT, XN * IN_UNIT, XH * IN_UNIT, XW * IN_UNIT
    K, ON, OH, OW = K * OUT_UNIT, ON * OUT_UNIT, OH * OUT_UNIT, OW * OUT_UNIT
    AN, AH, AW = AN * OUT_UNIT, AH * OUT_UNIT, AW * OUT_UNIT
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_pixel, is_channel = pixel < M, channel < K
    if IS_LINEAR:
        sample, row, column = pixel * 0, pixel * 0, pixel
    else:
        sample, row, column = pixel // (HEIGHT * WIDTH), pixel // WIDTH % HEIGHT, pixel % WIDTH
    top, left = row * SH - PH, column * SW - PW
    total = KH * KW * C  # products of a sum
    steps_per_tap = (C + DEPTH - 1) // DEPTH
    all_steps = (total + DEPTH - 1) // DEPTH if IS_FLAT else KH * KW * steps_per_tap
    steps = (all_steps + SPLITS - 1) // SPLITS
    begin = tl.program_id(2) * steps
    end = tl.minimum(begin + steps, all_steps)
    x_pixel_ptr = x_ptr + sample * XN + top * XH + left * XW
    weight_channel_ptr, rest_channel_ptr = weight_ptr + channel * total, rest_ptr
    if rest_ptr is not None:
        rest_channel_ptr += channel * total
    sums = tl.full((PIXELS, CHANNELS), 0.0, tl.float32)
    rests = tl.full((PIXELS, CHANNELS), 0.0, tl.float32)  # what the products with rests add to the sums
    # Division takes longer than a step. So only the first divides, and each counts on from the one before.
    tap = begin // steps_per_tap
    first_channel, first_product = begin % steps_per_tap * DEPTH, tap * C
    i, j = tap // KW, tap % KW
    for step in range(begin, end):
        if IS_FLAT:  # a step takes in channels of several taps
            at = step * DEPTH + tl.arange(0, DEPTH)
            taps, c = at // C, at % C
            down, right = taps // KW * DH, taps % KW * DW
            is_read = is_pixel[:, None] & (at < total)[None, :]
            if not IS_POINTWISE:
                y, z = top[:, None] + down[None, :], left[:, None] + right[None, :]
                is_read &= (y >= 0) & (y < H) & (z >= 0) & (z < W)
            pointers = x_pixel_ptr[:, None] + (down * XH + right * XW + c * XC)[None, :]
        else:
            c = first_channel + tl.arange(0, DEPTH)
            at = first_product + c
            is_inside = is_pixel
            if not IS_POINTWISE:
                y, z = top + i * DH, left + j * DW
                is_inside = is_pixel & (y >= 0) & (y < H) & (z >= 0) & (z < W)
            is_read = is_inside[:, None] & (IS_EVEN | (c < C))[None, :]
            pointers = (x_pixel_ptr + (i * DH * XH + j * DW * XW))[:, None] + (c * XC)[None, :]
            first_channel += DEPTH
            if not IS_POINTWISE:
                is_next_tap = first_channel >= C
                first_channel = tl.where(is_next_tap, 0, first_channel)
                first_product += tl.where(is_next_tap, C, 0)
                j += tl.where(is_next_tap, 1, 0)
                is_next_row = j >= KW
                j = tl.where(is_next_row, 0, j)
                i += tl.where(is_next_row, 1, 0)
        values = tl.load(pointers, mask=is_read, other=0.0)
        if BEFORE != "none":
            values = tl.where(is_read, activated(values.to(tl.float32), BEFORE), 0.0).to(values.dtype)
        is_product = at < total if IS_FLAT else IS_EVEN | (c < C)
        is_weight = is_channel[None, :] & is_product[:, None]
        weights = tl.load(weight_channel_ptr[None, :] + at[:, None], mask=is_weight, other=0.0)
        # A tensor core cuts off what it adds to a sum. So it adds the products of a step alone, which is what the number
        # says: without it the compiler makes one of both additions.
        if rest_ptr is not None:
            nearest = rounded(values)
            rests = tl.dot(values - nearest, weights, rests, input_precision="tf32")
            weight_rests = tl.load(rest_channel_ptr[None, :] + at[:, None], mask=is_weight, other=0.0)
            rests = tl.dot(nearest, weight_rests, rests, input_precision="tf32")
            sums += tl.dot(nearest, weights, input_precision="tf32", max_num_imprecise_acc=1)
        elif PRECISION == "tf32" and values.dtype == tl.float32:
            sums += tl.dot(rounded(values), weights, input_precision="tf32", max_num_imprecise_acc=1)
        else:
            sums = tl.dot(values, weights, sums, input_precision=PRECISION)
    if rest_ptr is not None:  # an infinite factor has no rest: what would be added is no number
        sums += tl.where(tl.abs(sums) < float("inf"), rests, 0.0)
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
        sums = activated(sums, AFTER, out_ptr.dtype.element_ty.primitive_bitwidth == 16)
        tl.store(out_ptr + place, sums.to(out_ptr.dtype.element_ty), mask=mask)
