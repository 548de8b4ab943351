"""A depthwise convolution, its bias, and the activations before and after it, in one kernel.

A window's values are read once a tap, and from the cache after the first: the kernel is as short as its launch allows where
every thread has few outputs and several reads in flight. A large window is read many times over. There a thread has COLUMNS
outputs beside each other, and reads each value of a row once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .convolution import Convolution
from .kernel import Launch
from .tile import activated, check_activations, let_consumers_launch, split_by_unit, wait_for_producers

COLUMNS = 4  # of a strip
MOST_UNROLLED = 25  # taps of a kernel whose rows are all instructions one after the other


@dataclass(frozen=True)
class DepthwiseTile:
    """How the output [pixels, channels] is cut.

    Args:
        pixels, channels: of the output that a block computes; powers of two.
        warps: of a block.
        is_in_strips: the pixels are strips of COLUMNS. Neighbouring windows read neighbouring pixels.
    """

    pixels: int
    channels: int
    warps: int
    is_in_strips: bool = False

    def __str__(self) -> str:
        return f"{self.pixels}x{self.channels}, {self.warps} warps" + ", in strips" * self.is_in_strips


@dataclass(frozen=True)
class Depthwise(Convolution):
    """out = after(bias + depthwise(before(x))), with as many outputs as inputs.

    Args:
        before, after: one of ACTIVATIONS each. Raises ValueError for another.
        is_channels_last: the layout of the output; else it is contiguous.
        tile: how the output is cut. Raises ValueError for strips of windows that a stride or a dilation spreads.
    """

    before: str
    after: str
    is_channels_last: bool
    tile: DepthwiseTile

    def __post_init__(self) -> None:
        check_activations(self.before, self.after)
        if self.tile.is_in_strips and not _are_neighbours(self.stride, self.dilation):
            raise ValueError(f"no strips of windows with stride {self.stride} and dilation {self.dilation}")

    def __str__(self) -> str:
        words = [f"{name} {act}" for name in ("before", "after") if (act := getattr(self, name)) != "none"]
        words += ["channels_last"] * self.is_channels_last
        return ", ".join([self.window, *words, str(self.tile)])

    def launch(self, x: Tensor, taps: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Launch:  # type: ignore[override]
        """Args:
        x: [N, C, H, W], of any strides.
        taps: [C, kernel height * width], with strides (1, C): neighbouring threads read neighbouring channels.
        bias: [C].
        out: [N, C, H', W'] of any strides, where it writes; a new tensor where there is none.
        """
        n, c, h, w = x.shape
        if out is None:
            out = self.output(x, c, self.is_channels_last)
        height, width = out.shape[2:]
        tile = self.tile
        unit, (channels, xn, xh, xw, on, oh, ow) = split_by_unit(x, c, out)
        strips = triton.cdiv(width, COLUMNS)
        m = n * height * (strips if tile.is_in_strips else width)
        arguments = (
            x, taps, bias, out, m, height, width, strips, h, w, channels,
            xn, x.stride(1), xh, xw, on, out.stride(1), oh, ow,
            *self.stride, *self.padding, *self.dilation, *self.kernel, self.before, self.after,
            unit, tile.pixels, tile.channels, self.kernel[0] * self.kernel[1] <= MOST_UNROLLED, self.is_early,
        )  # fmt: skip
        options = {"num_warps": tile.warps, "launch_pdl": self.is_early}
        blocks = triton.cdiv(m, tile.pixels // (COLUMNS if tile.is_in_strips else 1))
        function = _in_strips if tile.is_in_strips else _depthwise
        return Launch(function, (blocks, triton.cdiv(c, tile.channels)), arguments, options, out)


def _are_neighbours(stride: tuple[int, int], dilation: tuple[int, int]) -> bool:
    return stride == dilation == (1, 1)


def tiles(channels: int, kernel: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]) -> list[DepthwiseTile]:
    """The tiles worth a trial, of four to eight outputs a thread; a narrow one where there are fewer than 64 channels.

    Of strips a thread has as many of several channels.
    """
    wide = 1 << (channels - 1).bit_length()
    candidates = [DepthwiseTile(8, 64, 4), DepthwiseTile(16, 64, 4), DepthwiseTile(4, 128, 4)]
    if kernel[1] > 1 and _are_neighbours(stride, dilation):
        candidates += [DepthwiseTile(8, 64, 1, True), DepthwiseTile(16, 64, 1, True), DepthwiseTile(32, 64, 4, True)]
        candidates.append(DepthwiseTile(16, 32, 1, True))
    return [tile for tile in candidates if tile.channels <= wide] or [DepthwiseTile(16, min(wide, 32), 4)]


# Sizes are arguments, so that a tile is compiled once for many convolutions of one kernel size.
SIZES = ["M", "HEIGHT", "WIDTH", "STRIPS", "H", "W", "SH", "SW", "PH", "PW", "DH", "DW"]


@triton.jit(do_not_specialize=SIZES)
def _depthwise(
    x_ptr, taps_ptr, bias_ptr, out_ptr, M, HEIGHT, WIDTH, STRIPS, H, W, C, XN, XC, XH, XW, ON, OC, OH, OW,
    SH, SW, PH, PW, DH, DW, KH: tl.constexpr, KW: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    UNIT: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, IS_UNROLLED: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_producers(IS_EARLY)
    C, XN, XH, XW, ON, OH, OW = C * UNIT, XN * UNIT, XH * UNIT, XW * UNIT, ON * UNIT, OH * UNIT, OW * UNIT
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_pixel, is_c = pixel < M, c < C
    sample, row, column = pixel // (HEIGHT * WIDTH), pixel // WIDTH % HEIGHT, pixel % WIDTH
    top, left = row * SH - PH, column * SW - PW
    x_window_ptr = x_ptr + (sample * XN + top * XH + left * XW)[:, None] + (c * XC)[None, :]
    sums = tl.full((PIXELS, CHANNELS), 0.0, tl.float32)
    if IS_UNROLLED:
        for i in tl.static_range(KH):
            sums = _row(sums, x_window_ptr, taps_ptr + c, i, top, left, is_pixel, is_c, H, W, C, XH, XW, DH, DW, KW, BEFORE)
    else:
        for i in range(KH):
            sums = _row(sums, x_window_ptr, taps_ptr + c, i, top, left, is_pixel, is_c, H, W, C, XH, XW, DH, DW, KW, BEFORE)
    let_consumers_launch(IS_EARLY)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + c, mask=is_c, other=0.0).to(tl.float32)[None, :]
    place = (sample * ON + row * OH + column * OW)[:, None] + c[None, :] * OC
    tl.store(out_ptr + place, activated(sums, AFTER).to(out_ptr.dtype.element_ty), mask=is_pixel[:, None] & is_c[None, :])


@triton.jit
def _row(
    sums, x_window_ptr, taps_c_ptr, i, top, left, is_pixel, is_c, H, W, C, XH, XW, DH, DW,
    KW: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """The sums with what row i of the windows adds. x_window_ptr: of each window's first value, [PIXELS, CHANNELS]."""
    y = top + i * DH
    is_inside_y = is_pixel & (y >= 0) & (y < H)
    for j in tl.static_range(KW):
        x = left + j * DW
        mask = (is_inside_y & (x >= 0) & (x < W))[:, None] & is_c[None, :]
        values = tl.load(x_window_ptr + (i * DH * XH + j * DW * XW), mask=mask, other=0.0).to(tl.float32)
        if BEFORE != "none":  # of which some make no zero of a zero
            values = tl.where(mask, activated(values, BEFORE), 0.0)
        taps = tl.load(taps_c_ptr + (i * KW + j) * C, mask=is_c, other=0.0).to(tl.float32)
        sums += values * taps[None, :]
    return sums


@triton.jit(do_not_specialize=SIZES)
def _in_strips(
    x_ptr, taps_ptr, bias_ptr, out_ptr, M, HEIGHT, WIDTH, STRIPS, H, W, C, XN, XC, XH, XW, ON, OC, OH, OW,
    SH, SW, PH, PW, DH, DW, KH: tl.constexpr, KW: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    UNIT: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr, IS_UNROLLED: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_producers(IS_EARLY)
    C, XN, XH, XW, ON, OH, OW = C * UNIT, XN * UNIT, XH * UNIT, XW * UNIT, ON * UNIT, OH * UNIT, OW * UNIT
    strip = tl.program_id(0) * (PIXELS // 4) + tl.arange(0, PIXELS // 4)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_strip, is_c = strip < M, c < C
    sample, row, column = strip // (HEIGHT * STRIPS), strip // STRIPS % HEIGHT, strip % STRIPS * 4
    top, left = row - PH, column - PW
    x_row_ptr = x_ptr + (sample * XN + top * XH + left * XW)[:, None] + (c * XC)[None, :]
    zeros = tl.full((PIXELS // 4, CHANNELS), 0.0, tl.float32)
    s0, s1, s2, s3 = zeros, zeros, zeros, zeros
    if IS_UNROLLED:
        for i in tl.static_range(KH):
            s0, s1, s2, s3 = _strip_row(
                s0, s1, s2, s3, x_row_ptr + i * XH, taps_ptr + i * KW * C + c, top + i, left, is_strip, is_c, H, W, C, XW,
                KW, BEFORE,
            )  # fmt: skip
    else:
        for i in range(KH):
            s0, s1, s2, s3 = _strip_row(
                s0, s1, s2, s3, x_row_ptr + i * XH, taps_ptr + i * KW * C + c, top + i, left, is_strip, is_c, H, W, C, XW,
                KW, BEFORE,
            )  # fmt: skip
    let_consumers_launch(IS_EARLY)
    bias = tl.full((CHANNELS,), 0.0, tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + c, mask=is_c, other=0.0).to(tl.float32)
    place = out_ptr + (sample * ON + row * OH + column * OW)[:, None] + c[None, :] * OC
    _store(place, s0, bias, is_strip & (column < WIDTH), is_c, AFTER)
    _store(place + OW, s1, bias, is_strip & (column + 1 < WIDTH), is_c, AFTER)
    _store(place + 2 * OW, s2, bias, is_strip & (column + 2 < WIDTH), is_c, AFTER)
    _store(place + 3 * OW, s3, bias, is_strip & (column + 3 < WIDTH), is_c, AFTER)


@triton.jit
def _strip_row(
    s0, s1, s2, s3, x_ptr, taps_c_ptr, y, left, is_strip, is_c, H, W, C, XW, KW: tl.constexpr, BEFORE: tl.constexpr
):  # fmt: skip
    """The sums of four columns with what a row of their windows adds. x_ptr: of each strip's first value."""
    is_inside = is_strip & (y >= 0) & (y < H)
    t0 = tl.load(taps_c_ptr, mask=is_c, other=0.0).to(tl.float32)[None, :]
    t1, t2, t3 = t0, t0, t0  # taps of columns, each that of the one to its left a step before
    for j in tl.static_range(KW + 3):
        x = left + j
        mask = (is_inside & (x >= 0) & (x < W))[:, None] & is_c[None, :]
        values = tl.load(x_ptr + j * XW, mask=mask, other=0.0).to(tl.float32)
        if BEFORE != "none":  # of which some make no zero of a zero
            values = tl.where(mask, activated(values, BEFORE), 0.0)
        if j < KW:
            t0 = tl.load(taps_c_ptr + j * C, mask=is_c, other=0.0).to(tl.float32)[None, :]
            s0 += values * t0
        if j >= 1 and j < KW + 1:
            s1 += values * t1
        if j >= 2 and j < KW + 2:
            s2 += values * t2
        if j >= 3:
            s3 += values * t3
        t1, t2, t3 = t0, t1, t2
    return s0, s1, s2, s3


@triton.jit
def _store(place, sums, bias, is_pixel, is_c, AFTER: tl.constexpr):
    sums = activated(sums + bias[None, :], AFTER)
    tl.store(place, sums.to(place.dtype.element_ty), mask=is_pixel[:, None] & is_c[None, :])
