"""A tensor, or a sum of two, activated and written into a part of another: of a concatenation, say."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .kernel import Kernel, Launch
from .tile import activated, check_activations, let_consumers_launch, strides_of, wait_for_producers

ELEMENTS = 512  # of a block
WARPS = 4


@dataclass(frozen=True)
class Placed(Kernel):
    """out = after(x + addend).

    Args:
        after: one of ACTIVATIONS. Raises ValueError for another.
        is_channels_last: the order in which neighbouring threads go through the output.
    """

    after: str
    is_channels_last: bool

    def __post_init__(self) -> None:
        check_activations(self.after)

    def __str__(self) -> str:
        words = [f"after {self.after}"] * (self.after != "none") + ["channels_last"] * self.is_channels_last
        return ", ".join(words)

    def launch(self, x: Tensor, addend: Tensor | None, out: Tensor) -> Launch:  # type: ignore[override]
        """Args:
        x: [N, C, H, W], of any strides.
        addend: as x.
        out: as x.
        """
        _, c, h, w = out.shape
        total = out.numel()
        arguments = (
            x, addend, out, total, c, h, w, *x.stride(), *strides_of(addend), *out.stride(),
            self.after, self.is_channels_last, ELEMENTS, self.is_early,
        )  # fmt: skip
        options = {"num_warps": WARPS, "launch_pdl": self.is_early}
        return Launch(_placed, (triton.cdiv(total, ELEMENTS),), arguments, options, out)


@triton.jit(do_not_specialize=["TOTAL", "C", "H", "W"])
def _placed(
    x_ptr, addend_ptr, out_ptr, TOTAL, C, H, W, XN, XC, XH, XW, AN, AC, AH, AW, ON, OC, OH, OW,
    AFTER: tl.constexpr, IS_LAST: tl.constexpr, ELEMENTS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_producers(IS_EARLY)
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    mask = at < TOTAL
    if IS_LAST:
        c, pixel = at % C, at // C
        column, row, sample = pixel % W, pixel // W % H, pixel // (W * H)
    else:
        column, row, c, sample = at % W, at // W % H, at // (W * H) % C, at // (W * H * C)
    sums = tl.load(x_ptr + sample * XN + c * XC + row * XH + column * XW, mask=mask, other=0.0).to(tl.float32)
    if addend_ptr is not None:
        sums += tl.load(addend_ptr + sample * AN + c * AC + row * AH + column * AW, mask=mask, other=0.0).to(tl.float32)
    let_consumers_launch(IS_EARLY)
    place = sample * ON + c * OC + row * OH + column * OW
    tl.store(out_ptr + place, activated(sums, AFTER).to(out_ptr.dtype.element_ty), mask=mask)
