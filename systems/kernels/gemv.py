"""A row times a weight, by a kernel that reads the weight as fast as copies go.

Such a product waits for memory alone. A thread block has a few rows of the weight, and reads long runs of each. A norm
before the product is computed by every thread block again, which takes less time than a kernel of its own. An activation and
an addition come last.

A weight depends on no kernel. Where a kernel is launched before the one before it has ended (programmatic dependent launch),
its thread blocks read their first weights while they wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel import Kernel, Launch
from .tile import activated, check_activations, let_consumers_launch, wait_for_producers


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


@triton.jit
def gemv(
    x, weight, bias, addend, out, norm_weight, norm_bias, num_rows, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AFTER: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """out = addend + after(norm(x) @ weight.T + bias) of one row; sums are in fp32.

    Args:
        x, norm_weight, norm_bias: [WIDTH], the last two of a norm before the product, or None.
        weight: [num_rows, WIDTH], contiguous.
        bias, addend, out: [num_rows]; the first two may be None.
        eps: of the norm.
        PADDED: the least power of two that is no smaller than WIDTH.
        ROWS, COLUMNS: of a Strip.
        AFTER: one of ACTIVATIONS.
        IS_EARLY: launched while the kernel before it ends.
    """
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
    sums = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
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
    result = activated(result, AFTER)
    if addend is not None:
        result += tl.load(addend + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=is_row)


@dataclass(frozen=True)
class Gemv(Kernel):
    """out = after(x @ weight.T + bias), of one row; sums are in fp32.

    Args:
        strip: what a thread block reads.
        after: one of ACTIVATIONS. Raises ValueError for another.
    """

    strip: Strip
    after: str = "none"

    def __post_init__(self) -> None:
        check_activations(self.after)

    def __str__(self) -> str:
        return ", ".join([f"after {self.after}"] * (self.after != "none") + [str(self.strip)])

    def launch(  # type: ignore[override]
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None
    ) -> Launch:
        """Args:
        x: [..., features] of one row, contiguous.
        weight: [outputs, features], contiguous; no operator writes it.
        bias: [outputs], contiguous.
        out: [..., outputs], contiguous, where it writes; a new tensor where there is none.

        Raises ValueError for more rows than one.
        """
        outputs, features = weight.shape
        if x.numel() != features:
            raise ValueError(f"a row of {features} is asked for, and x is {list(x.shape)}")
        if out is None:
            out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
        sizes = (features, triton.next_power_of_2(features), self.strip.rows, self.strip.columns)
        arguments = (x, weight, bias, None, out, None, None, outputs, 0.0, *sizes, self.after, self.is_early)
        options = {"num_warps": self.strip.warps, "launch_pdl": self.is_early}
        return Launch(gemv, (triton.cdiv(outputs, self.strip.rows),), arguments, options, out)


STRIPS = tuple(Strip(*cut) for cut in ((1, 1024, 4), (2, 512, 1), (2, 1024, 2), (4, 512, 2), (4, 1024, 4), (2, 2048, 8)))
MOST_STEPS = 64  # along a row, each of which is code of its own


def strips_of(features: int) -> list[Strip]:
    """Those worth a trial for a weight [outputs, features]: no wider than it, but for the narrowest."""
    narrowest = min(strip.columns for strip in STRIPS)
    return [
        strip for strip in STRIPS if strip.columns <= max(features, narrowest) and features <= MOST_STEPS * strip.columns
    ]
