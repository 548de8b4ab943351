"""Products of one token with weights: a decoder's block in five kernels, each of which reads weights as fast as copies go.

A token's product waits for memory alone. A thread block has a few rows of the weight, and reads long runs of each. Norms are
computed by every thread block again, which takes less time than a kernel of their own; activations and additions come last.

Weights depend on no kernel. So a kernel is launched before the one before it has ended (programmatic dependent launch), and
its thread blocks read their first weights while they wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from systems.kernels.tile import let_consumers_launch, wait_for_producers


@dataclass(frozen=True)
class Strip:
    """What a thread block reads.

    Args:
        rows: of the weight; a power of two.
        columns: of each row at a time; a power of two.
        warps: of a block.
    """

    rows: int
    columns: int
    warps: int

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.columns} columns, {self.warps} warps"


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


@triton.jit
def _gemv(
    x, weight, bias, addend, out, norm_weight, norm_bias, num_rows, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IS_GELU: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    column = tl.arange(0, COLUMNS)
    lines = weight + row.to(tl.int64)[:, None] * WIDTH
    is_first = is_row[:, None] & (column < WIDTH)[None, :]
    first = tl.load(lines + column[None, :], mask=is_first, other=0.0, eviction_policy="evict_first")
    let_consumers_launch(IS_EARLY)
    wait_for_producers(IS_EARLY)
    mean, scale = 0.0, 1.0
    if norm_weight is not None:
        every = tl.arange(0, PADDED)
        values = tl.load(x + every, mask=every < WIDTH, other=0.0).to(tl.float32)
        mean = tl.sum(values, axis=0) / WIDTH
        centred = tl.where(every < WIDTH, values - mean, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / WIDTH + eps)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        at = start + column
        is_read = at < WIDTH
        if start == 0:
            strip = first
        else:
            strip = tl.load(
                lines + at[None, :], mask=is_row[:, None] & is_read[None, :], other=0.0, eviction_policy="evict_first"
            )
        part = tl.load(x + at, mask=is_read, other=0.0).to(tl.float32)
        if norm_weight is not None:
            gain = tl.load(norm_weight + at, mask=is_read, other=0.0).to(tl.float32)
            part = (part - mean) * scale * gain + tl.load(norm_bias + at, mask=is_read, other=0.0).to(tl.float32)
        sums += strip.to(tl.float32) * part[None, :]
    result = tl.sum(sums, axis=1)
    if bias is not None:
        result += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)
    if IS_GELU:  # the tanh form
        inner = 0.7978845608028654 * (result + 0.044715 * result * result * result)
        result = result / (1.0 + tl.exp(-2.0 * inner))
    if addend is not None:
        result += tl.load(addend + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=is_row)


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
    _gemv[(triton.cdiv(num_rows, strip.rows),)](
        x, linear.weight, linear.bias, addend, out, *weights[:2], num_rows, weights[2],
        WIDTH=width, PADDED=triton.next_power_of_2(width), ROWS=strip.rows, COLUMNS=strip.columns, IS_GELU=is_gelu,
        IS_EARLY=is_early, num_warps=strip.warps, launch_pdl=is_early,
    )  # fmt: skip
    return out
