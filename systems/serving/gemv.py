"""Products of one token with weights: a decoder's block in five kernels, which read weights as fast as copies go."""

from __future__ import annotations

import torch
import triton
from torch import Tensor, nn

from systems.kernels.gemv import Strip, gemv


def strip_of(width: int, has_norm: bool) -> Strip:
    """The one that was among the fastest on an H200; a block that computes a norm does more with it.

    width: columns of the weight; 2,560, 5,120, 10,240 and 20,480 were measured, of a layer of 13B and of its halves.
    """
    if has_norm:
        return Strip(4, 1024, 2)
    for most, strip in ((4000, Strip(2, 512, 1)), (8192, Strip(2, 1024, 2)), (16000, Strip(4, 512, 2))):
        if width <= most:
            return strip
    return Strip(2, 2048, 8)


def product(
    x: Tensor,
    linear: nn.Linear,
    norm: nn.LayerNorm | None = None,
    addend: Tensor | None = None,
    is_gelu: bool = False,
    is_early: bool = False,
    strip: Strip | None = None,
) -> Tensor:
    """addend + gelu(linear(norm(x))) of one token.

    Args:
        x: [1, in].
        linear: weight [out, in], contiguous, and a bias or none.
        norm: before the product.
        addend: [1, out].
        is_gelu: after the product, the tanh form.
        is_early: the kernel is launched while the one before it ends.
        strip: what a thread block reads; by default what `strip_of` says.

    Returns:
        [1, out].
    """
    num_rows, width = linear.weight.shape
    strip = strip or strip_of(width, norm is not None)
    out = torch.empty(1, num_rows, dtype=x.dtype, device=x.device)
    weights = (norm.weight, norm.bias, norm.eps) if norm is not None else (None, None, 0.0)
    gemv[(triton.cdiv(num_rows, strip.rows),)](
        x, linear.weight, linear.bias, addend, out, *weights[:2], num_rows, weights[2],
        WIDTH=width, PADDED=triton.next_power_of_2(width), ROWS=strip.rows, COLUMNS=strip.columns,
        AFTER="gelu_tanh" if is_gelu else "none", IS_EARLY=is_early, num_warps=strip.warps, launch_pdl=is_early,
    )  # fmt: skip
    return out
