"""A pooled tensor, or the sum of two tensors of which some are pooled first, activated, in one kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel import Kernel, Launch
from .tile import activated, check_activations, let_consumers_launch, strides_of, wait_for_producers

ELEMENTS = 256  # of a block: at batch 1 a tensor has few
WARPS = 4


@dataclass(frozen=True)
class Window:
    """What an element of the output reads of a tensor.

    Args:
        kind: "average" or "max" of a window; "same" for the element at the same place.
        kernel, stride, padding: of the window, each (height, width).
        counts_padding: an average divides by the elements of the padding too.
    """

    kind: str = "same"
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    counts_padding: bool = False

    def __str__(self) -> str:
        if self.kind == "same":
            return self.kind
        words = [f"{self.kind} {self.kernel[0]}x{self.kernel[1]}", f"stride {self.stride[0]}", f"padding {self.padding[0]}"]
        return " ".join(words + ["counted"] * self.counts_padding)


@dataclass(frozen=True)
class Pooled(Kernel):
    """out = after(first(x) + second(y)).

    Args:
        first, second: what is read of x and of y; second is None where there is no y.
        after: one of ACTIVATIONS. Raises ValueError for another.
        height, width: of the output.
        is_channels_last: the layout of the output, in whose order neighbouring threads go through it; else it is contiguous.
    """

    first: Window
    second: Window | None
    after: str
    height: int
    width: int
    is_channels_last: bool

    def __post_init__(self) -> None:
        check_activations(self.after)

    def __str__(self) -> str:
        terms = " + ".join(str(window) for window in (self.first, self.second) if window is not None)
        words = [f"after {self.after}"] * (self.after != "none") + ["channels_last"] * self.is_channels_last
        return ", ".join([f"{terms} to {self.height}x{self.width}", *words])

    def launch(self, x: Tensor, y: Tensor | None, out: Tensor | None = None) -> Launch:  # type: ignore[override]
        """Args:
        x, y: [N, C, H, W], each of its own H and W, and of any strides.
        out: [N, C, height, width] of any strides, where it writes; a new tensor where there is none.
        """
        n, c = x.shape[:2]
        if out is None:
            layout = torch.channels_last if self.is_channels_last else torch.contiguous_format
            sizes = n, c, self.height, self.width
            out = torch.empty(sizes, dtype=x.dtype, device=x.device, memory_format=layout)
        second = self.second or Window()
        sizes_of_y = (0, 0) if y is None else y.shape[2:]
        arguments = (
            x, y, out, out.numel(), c, self.height, self.width, *x.shape[2:], *sizes_of_y,
            *x.stride(), *strides_of(y), *out.stride(), *_numbers(self.first), *_numbers(second),
            self.after, self.is_channels_last, ELEMENTS, self.is_early,
        )  # fmt: skip
        options = {"num_warps": WARPS, "launch_pdl": self.is_early}
        return Launch(_pooled, (triton.cdiv(out.numel(), ELEMENTS),), arguments, options, out)


def _numbers(window: Window) -> tuple[object, ...]:
    return window.kind, *window.kernel, *window.stride, *window.padding, window.counts_padding


@triton.jit
def _read(
    x_ptr, row, column, mask, H, W, YS, XS,
    KIND: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, COUNTS_PADDING: tl.constexpr,
):  # fmt: skip
    """What the elements at row and column read, in fp32. x_ptr: of each element's sample and channel."""
    if KIND == "same":
        value = tl.load(x_ptr + row * YS + column * XS, mask=mask, other=0.0).to(tl.float32)
    else:
        top, left = row * SH - PH, column * SW - PW
        nothing: tl.constexpr = float("-inf") if KIND == "max" else 0.0
        value = tl.full(row.shape, nothing, tl.float32)
        for i in tl.static_range(KH):
            for j in tl.static_range(KW):
                y, z = top + i, left + j
                is_inside = mask & (y >= 0) & (y < H) & (z >= 0) & (z < W)
                element = tl.load(x_ptr + y * YS + z * XS, mask=is_inside, other=nothing).to(tl.float32)
                if KIND == "max":
                    value = tl.maximum(value, element, propagate_nan=tl.PropagateNan.ALL)
                else:
                    value += element
        if KIND == "average":
            if COUNTS_PADDING:  # as far as the padding goes, which a window at the end may pass
                count = (tl.minimum(top + KH, H + PH) - top) * (tl.minimum(left + KW, W + PW) - left)
            else:
                inner_height = tl.minimum(top + KH, H) - tl.maximum(top, 0)
                count = inner_height * (tl.minimum(left + KW, W) - tl.maximum(left, 0))
            value = value / tl.where(mask, count, 1).to(tl.float32)
    return value


# Sizes are arguments, so that a kernel is compiled once for windows of a kind.
@triton.jit(do_not_specialize=["TOTAL", "C", "HEIGHT", "WIDTH", "XROWS", "XCOLUMNS", "YROWS", "YCOLUMNS"])
def _pooled(
    x_ptr, y_ptr, out_ptr, TOTAL, C, HEIGHT, WIDTH, XROWS, XCOLUMNS, YROWS, YCOLUMNS,
    XN, XC, XH, XW, YN, YC, YH, YW, ON, OC, OH, OW,
    X_KIND: tl.constexpr, X_KH: tl.constexpr, X_KW: tl.constexpr, X_SH: tl.constexpr, X_SW: tl.constexpr,
    X_PH: tl.constexpr, X_PW: tl.constexpr, X_COUNTS: tl.constexpr,
    Y_KIND: tl.constexpr, Y_KH: tl.constexpr, Y_KW: tl.constexpr, Y_SH: tl.constexpr, Y_SW: tl.constexpr,
    Y_PH: tl.constexpr, Y_PW: tl.constexpr, Y_COUNTS: tl.constexpr,
    AFTER: tl.constexpr, IS_LAST: tl.constexpr, ELEMENTS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_producers(IS_EARLY)
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = at < TOTAL
    if IS_LAST:
        c, pixel = at % C, at // C
        column, row, sample = pixel % WIDTH, pixel // WIDTH % HEIGHT, pixel // (WIDTH * HEIGHT)
    else:
        column, row = at % WIDTH, at // WIDTH % HEIGHT
        c, sample = at // (WIDTH * HEIGHT) % C, at // (WIDTH * HEIGHT * C)
    sums = _read(
        x_ptr + sample * XN + c * XC, row, column, mask, XROWS, XCOLUMNS, XH, XW,
        X_KIND, X_KH, X_KW, X_SH, X_SW, X_PH, X_PW, X_COUNTS,
    )  # fmt: skip
    if y_ptr is not None:
        sums += _read(
            y_ptr + sample * YN + c * YC, row, column, mask, YROWS, YCOLUMNS, YH, YW,
            Y_KIND, Y_KH, Y_KW, Y_SH, Y_SW, Y_PH, Y_PW, Y_COUNTS,
        )  # fmt: skip
    let_consumers_launch(IS_EARLY)
    place = sample * ON + c * OC + row * OH + column * OW
    tl.store(out_ptr + place, activated(sums, AFTER).to(out_ptr.dtype.element_ty), mask=mask)
