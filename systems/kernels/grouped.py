"""A product of rows that lie in groups, one behind another, each group with a weight of its own: a layer of experts.

How long groups are is known on the GPU alone. So there are as many blocks as the most tiles that any groups have, and each
block counts which tile is its own. It may fetch its rows by their numbers, and gate one half of the outputs by the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dense import PRECISIONS
from .kernel import Kernel, Launch
from .tile import activated, check_activations, let_consumers_launch, power_of_two, rounded, wait_for_producers


@dataclass(frozen=True)
class GroupedTile:
    """How the output [rows, outputs] of a group is cut, and the sum of each element.

    Args:
        rows, outputs: of a block; powers of two, 16 at least.
        depth: products that it adds at a time; as those.
        warps: of a block.
        stages: of the software pipeline.
    """

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.outputs}x{self.depth}, {self.warps} warps, {self.stages} stages"


# Few rows: a block's time is that of its weights, so that many loads are on their way. Many: tensor cores take 64 at a time.
FEW = (
    GroupedTile(16, 32, 128, 4, 4),
    GroupedTile(16, 64, 64, 4, 5),
    GroupedTile(16, 64, 128, 4, 4),
    GroupedTile(16, 128, 64, 4, 4),
    GroupedTile(32, 32, 128, 4, 4),
    GroupedTile(32, 64, 64, 4, 5),
    GroupedTile(32, 64, 128, 4, 4),
    GroupedTile(32, 128, 64, 4, 4),
    GroupedTile(64, 64, 64, 4, 4),
    GroupedTile(64, 64, 128, 4, 3),
)
MANY = (
    GroupedTile(64, 128, 64, 4, 4),
    GroupedTile(64, 256, 64, 8, 3),
    GroupedTile(128, 64, 64, 4, 4),
    GroupedTile(128, 128, 64, 8, 3),
    GroupedTile(128, 128, 64, 4, 4),
    GroupedTile(128, 256, 64, 8, 3),
)
FEW_ROWS = 48  # of a group, on average, from which on tiles of many rows are tried


@dataclass(frozen=True)
class Grouped(Kernel):
    """out[i] = x[rows[i]] @ weight[g], i in group g; gated: act(the first half of its columns) * the second half.

    Args:
        gate: one of ACTIVATIONS, or "" where nothing is gated. Raises ValueError for another.
        precision: of the product of fp32 tensors, one of PRECISIONS. Raises ValueError for another.
        tile: how the output is cut.
    """

    gate: str
    precision: str
    tile: GroupedTile

    def __post_init__(self) -> None:
        check_activations(self.gate or "none")
        if self.precision not in PRECISIONS:
            raise ValueError(f"there is no precision {self.precision}")

    @property
    def is_grouped(self) -> bool:
        return True

    def __str__(self) -> str:
        return ", ".join([f"gated by {self.gate}"] * bool(self.gate) + [self.precision, str(self.tile)])

    def launch(self, x: Tensor, weight: Tensor, ends: Tensor, rows: Tensor | None) -> Launch:  # type: ignore[override]
        """Args:
        x: [M or any, features], whose last stride is 1.
        weight: [groups, features, outputs], of any strides. A gate halves the outputs, of which there is an even number.
        ends: [groups] int32, ascending: the row behind each group's last. Rows behind the last group's are left as they are.
        rows: [M] int32 or int64, the rows of x, negative ones from behind; None for all in their order.
        """
        groups, features, columns = weight.shape
        m = len(x if rows is None else rows)
        outputs = columns // 2 if self.gate else columns
        out = torch.empty(m, outputs, dtype=x.dtype, device=x.device)
        tile = self.tile
        # Each group has less than one tile that is not full, and none has a tile without a row.
        grid = (m // tile.rows + min(groups, m), triton.cdiv(outputs, tile.outputs))
        arguments = (
            x, rows, weight, ends, out, len(x), groups, features, outputs, x.stride(0), *weight.stride(),
            self.gate, self.precision, features % tile.depth == 0, triton.next_power_of_2(groups),
            tile.rows, tile.outputs, tile.depth, self.is_early,
        )  # fmt: skip
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": self.is_early}
        return Launch(_grouped, grid, arguments, options, out)


def tiles_of(num_rows: int, num_groups: int, outputs: int, features: int) -> list[GroupedTile]:
    """The tiles worth a trial.

    Args:
        num_rows: of all groups.
        outputs: of the kernel; a gate has halved them.
    """
    widest = power_of_two(outputs), power_of_two(features)
    candidates = (*FEW, *MANY) if num_rows >= FEW_ROWS * num_groups else FEW
    fitting = [tile for tile in candidates if tile.outputs <= widest[0] and tile.depth <= widest[1]]
    return fitting or [GroupedTile(16, 16, 16, 4, 3)]


@triton.jit
def _added(values, weights, sums, PRECISION: tl.constexpr):
    if PRECISION == "tf32" and values.dtype == tl.float32:
        values, weights = rounded(values), rounded(weights)
    return tl.dot(values, weights, sums, input_precision=PRECISION)


@triton.jit(do_not_specialize=["LENGTH", "GROUPS"])
def _grouped(
    x_ptr, rows_ptr, weight_ptr, ends_ptr, out_ptr, LENGTH, GROUPS, FEATURES, OUTPUTS, XM, WG, WK, WN,
    GATE: tl.constexpr, PRECISION: tl.constexpr, IS_EVEN: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_producers(IS_EARLY)
    g = tl.arange(0, PADDED)
    is_group = g < GROUPS
    ends = tl.load(ends_ptr + g, mask=is_group, other=0)
    begins = tl.load(ends_ptr + g - 1, mask=is_group & (g > 0), other=0)
    num_tiles = (tl.maximum(ends - begins, 0) + ROWS - 1) // ROWS
    last = tl.cumsum(num_tiles, axis=0)
    slot = tl.program_id(0)
    is_own = (last > slot) & (last - num_tiles <= slot)  # of at most one group
    if slot < tl.sum(num_tiles, axis=0):
        group = tl.sum(tl.where(is_own, g, 0), axis=0)
        begin = tl.sum(tl.where(is_own, begins + (slot - (last - num_tiles)) * ROWS, 0), axis=0)
        end = tl.sum(tl.where(is_own, ends, 0), axis=0)
        row, column = begin + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_row, is_column = row < end, column < OUTPUTS
        source = row
        if rows_ptr is not None:
            source = tl.load(rows_ptr + row, mask=is_row, other=0)
            source = tl.where(source < 0, source + LENGTH, source)
        at = tl.arange(0, DEPTH)
        value_ptr = x_ptr + source[:, None] * XM + at[None, :]
        column_ptr = weight_ptr + group * WG + at[:, None] * WK + column[None, :] * WN
        sums = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        others = tl.full((ROWS, COLUMNS), 0.0, tl.float32)  # of the second half
        for step in range(0, FEATURES, DEPTH):
            is_inside = IS_EVEN | (step + at < FEATURES)
            values = tl.load(value_ptr, mask=is_row[:, None] & is_inside[None, :], other=0.0)
            is_weight = is_inside[:, None] & is_column[None, :]
            weights = tl.load(column_ptr, mask=is_weight, other=0.0)
            sums = _added(values, weights, sums, PRECISION)
            if GATE != "":
                gated = tl.load(column_ptr + OUTPUTS * WN, mask=is_weight, other=0.0)
                others = _added(values, gated, others, PRECISION)
            value_ptr += DEPTH
            column_ptr += DEPTH * WK
        let_consumers_launch(IS_EARLY)
        if GATE != "":
            sums = activated(sums, GATE) * others
        place = row[:, None] * OUTPUTS + column[None, :]
        tl.store(out_ptr + place, sums.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
