"""The largest of few numbers, the order of few integers, and how many of them are no larger: what routes rows to experts.

A library's sort has a kernel for each step of a radix, its top-k one for a threshold and one for an order. Each of these is
one, which compares numbers with each other: of so few there are threads for all comparisons.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernel import Kernel, Launch
from .tile import let_consumers_launch, wait_for_producers

MOST_COLUMNS = 1024  # of a row, of which a block compares all
MOST_COUNT = 32  # of its largest, which are found one after the other
MOST_SORTED = 8192  # integers, each of which is compared with all
COMPARED = 1024  # numbers of a tile
LOWEST = tl.constexpr(-(2**31))  # below the key of any number
HIGHEST = tl.constexpr(2**31 - 1)  # of what is no number


@dataclass(frozen=True)
class Top(Kernel):
    """The largest of each row in descending order, and their columns: of equal ones the first, NaN before all.

    Args:
        count: of them, MOST_COUNT at most.
    """

    count: int

    def __str__(self) -> str:
        return str(self.count)

    def launch(self, x: Tensor) -> Launch:  # type: ignore[override]
        """Args:
        x: [..., columns], contiguous, of 32 bits at most; MOST_COLUMNS at most.
        """
        columns = x.shape[-1]
        sizes = (*x.shape[:-1], self.count)
        values = torch.empty(sizes, dtype=x.dtype, device=x.device)
        places = torch.empty(sizes, dtype=torch.int64, device=x.device)
        padded = triton.next_power_of_2(columns)
        num_rows, rows = x.numel() // columns, max(1, min(4, 128 // padded))
        arguments = (x, values, places, num_rows, columns, self.count, padded, rows, self.is_early)
        options = {"num_warps": 1 if padded <= 128 else 4, "launch_pdl": self.is_early}
        return Launch(_top, (triton.cdiv(num_rows, rows),), arguments, options, (values, places))


@dataclass(frozen=True)
class Sort(Kernel):
    """Integers in ascending order, equal ones as they stood, with the places where they stood, [N] each.

    Args:
        is_inverted: a third output says where each stands now.
    """

    is_inverted: bool

    def __str__(self) -> str:
        return "inverted" if self.is_inverted else ""

    def launch(self, x: Tensor) -> Launch:  # type: ignore[override]
        """Args:
        x: [N], contiguous, of integers; MOST_SORTED at most.
        """
        values = torch.empty_like(x)
        places, *ranks = (torch.empty(len(x), dtype=torch.int64, device=x.device) for _ in range(1 + self.is_inverted))
        items = 8 if len(x) > COMPARED else 4
        arguments = (x, values, places, ranks[0] if ranks else None, len(x), items, COMPARED, self.is_early)
        options = {"num_warps": 4, "launch_pdl": self.is_early}
        return Launch(_sort, (triton.cdiv(len(x), items),), arguments, options, (values, places, *ranks))


@dataclass(frozen=True)
class GroupEnds(Kernel):
    """out[i]: how many integers are from 0 to i, int32: where the groups of sorted ones end.

    Args:
        count: of groups.
    """

    count: int

    def __str__(self) -> str:
        return str(self.count)

    def launch(self, x: Tensor) -> Launch:  # type: ignore[override]
        """Args:
        x: [N], contiguous, of integers.
        """
        out = torch.empty(self.count, dtype=torch.int32, device=x.device)
        arguments = (x, out, x.numel(), COMPARED, self.is_early)
        return Launch(_ends, (self.count,), arguments, {"num_warps": 4, "launch_pdl": self.is_early}, out)


@triton.jit
def _key(x):
    """Of a float in fp32: integers with the same order, NaN above all."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, tl.where(bits < 0, bits ^ HIGHEST, bits), HIGHEST)


@triton.jit(do_not_specialize=["NUM_ROWS", "COLUMNS"])
def _top(
    x_ptr, values_ptr, places_ptr, NUM_ROWS, COLUMNS,
    COUNT: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_producers(IS_EARLY)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    is_row = row < NUM_ROWS
    is_read = is_row[:, None] & (column < COLUMNS)[None, :]
    x = tl.load(x_ptr + row[:, None] * COLUMNS + column[None, :], mask=is_read, other=0.0).to(tl.float32)
    # A key, and behind it the column, counted so that the first is the largest of equal ones.
    lowest = tl.full((ROWS, PADDED), LOWEST, tl.int32).to(tl.int64) << 32
    packed = (_key(x).to(tl.int64) << 32) + (PADDED - 1 - column)[None, :]
    packed = tl.where(is_read, packed, lowest)
    for i in range(COUNT):
        best = tl.max(packed, axis=1)
        key = (best >> 32).to(tl.int32)
        value = tl.where(key < 0, key ^ HIGHEST, key).to(tl.float32, bitcast=True)
        tl.store(values_ptr + row * COUNT + i, value.to(values_ptr.dtype.element_ty), mask=is_row)
        tl.store(places_ptr + row * COUNT + i, PADDED - 1 - (best & (PADDED - 1)), mask=is_row)
        packed = tl.where(packed == best[:, None], lowest, packed)
    let_consumers_launch(IS_EARLY)


@triton.jit(do_not_specialize=["N"])
def _sort(
    x_ptr, values_ptr, places_ptr, ranks_ptr, N,
    ITEMS: tl.constexpr, COMPARED: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_producers(IS_EARLY)
    first, at = tl.program_id(0) * ITEMS, tl.arange(0, COMPARED)
    i = first + tl.arange(0, ITEMS)
    is_item = i < N
    own = tl.load(x_ptr + i, mask=is_item, other=0)[:, None]
    before = tl.full((ITEMS, COMPARED), 0, tl.int32)
    middle = (
        first // COMPARED * COMPARED
    )  # the items lie in the tile from there on: of equal ones, all tiles before it count
    for begin in range(0, middle, COMPARED):
        other = tl.load(x_ptr + begin + at)[None, :]
        before += (other <= own).to(tl.int32)
    other = tl.load(x_ptr + middle + at, mask=middle + at < N, other=0)[None, :]
    is_equal_before = (other == own) & ((middle + at)[None, :] < i[:, None])
    before += (((other < own) | is_equal_before) & (middle + at < N)[None, :]).to(tl.int32)
    for begin in range(middle + COMPARED, N, COMPARED):
        is_other = begin + at < N
        other = tl.load(x_ptr + begin + at, mask=is_other, other=0)[None, :]
        before += ((other < own) & is_other[None, :]).to(tl.int32)
    rank = tl.sum(before, axis=1)
    let_consumers_launch(IS_EARLY)
    tl.store(values_ptr + rank[:, None], own, mask=is_item[:, None])
    tl.store(places_ptr + rank, i.to(tl.int64), mask=is_item)
    if ranks_ptr is not None:
        tl.store(ranks_ptr + i, rank.to(tl.int64), mask=is_item)


@triton.jit(do_not_specialize=["N"])
def _ends(x_ptr, out_ptr, N, COMPARED: tl.constexpr, IS_EARLY: tl.constexpr):
    wait_for_producers(IS_EARLY)
    group = tl.program_id(0)
    count = tl.full((COMPARED,), 0, tl.int32)
    for begin in range(0, N, COMPARED):
        j = begin + tl.arange(0, COMPARED)
        x = tl.load(x_ptr + j, mask=j < N, other=-1)
        count += ((x >= 0) & (x <= group)).to(tl.int32)
    let_consumers_launch(IS_EARLY)
    tl.store(out_ptr + group, tl.sum(count, axis=0))
