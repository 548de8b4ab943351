"""Sums over the GPUs of a host that reach each other's memory: each reads all parts by itself, in one kernel.

A library's sum goes around a ring, and takes many times as long as the few numbers of an increment need on their way. Here a
GPU puts its part where others reach it, tells them, waits for theirs, and adds all up. Its memory for parts has two halves,
used in turn: who is told of the next part has read the last.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
import triton
import triton.language as tl
from torch import Tensor

from systems.kernels.kernel import launches_early
from systems.kernels.tile import let_consumers_launch, wait_for_producers

MOST_BYTES = 4 * 2**20  # that a GPU reads of others for a sum; the ring is as fast beyond it
BLOCKS = 128  # thread blocks of the largest grid: all run at once, since they wait for each other
WIDTH = 1024  # numbers that a thread block takes at a time


@triton.jit
def _sum(
    x, addend, parts, counts, size,
    RANK: tl.constexpr, DEGREE: tl.constexpr, HALF: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Thread block b of each GPU takes the same numbers, whatever the size. So it waits for block b of the others alone.

    Args:
        x: [size], a summand; the sum takes its place.
        addend: [size], added once, or None.
        parts: of each GPU, [2, HALF].
        counts: of each GPU, [BLOCKS, DEGREE] int32: the sums that each of all has put its part there for.
    """
    let_consumers_launch(IS_EARLY)
    wait_for_producers(IS_EARLY)
    block = tl.program_id(0)
    own = counts[RANK] + block * DEGREE
    count = tl.load(own + RANK) + 1
    half = (count & 1) * HALF
    within = tl.arange(0, WIDTH)
    for begin in range(block * WIDTH, size, BLOCKS * WIDTH):
        at = begin + within
        tl.store(parts[RANK] + half + at, tl.load(x + at, mask=at < size), mask=at < size)
    tl.debug_barrier()  # all threads have written before one of them says so
    for other in tl.static_range(DEGREE):
        if other != RANK:
            tl.atomic_xchg(counts[other] + block * DEGREE + RANK, count, sem="release", scope="sys")
    for other in tl.static_range(DEGREE):
        if other != RANK:
            seen = tl.atomic_add(own + other, 0, sem="acquire", scope="sys")
            while seen - count < 0:  # also where counts have begun anew from the least number
                seen = tl.atomic_add(own + other, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    for begin in range(block * WIDTH, size, BLOCKS * WIDTH):
        at = begin + within
        total = tl.zeros([WIDTH], tl.float32)
        for other in tl.static_range(DEGREE):  # in the same order on every GPU
            total += tl.load(parts[other] + half + at, mask=at < size, other=0.0, volatile=True).to(tl.float32)
        if addend is not None:
            total += tl.load(addend + at, mask=at < size, other=0.0).to(tl.float32)
        tl.store(x + at, total.to(x.dtype.element_ty), mask=at < size)
    tl.store(own + RANK, count)


class DirectSums:
    """Of one GPU. All GPUs of a group make theirs together, and sum the same sizes in the same order.

    Args:
        group: of processes on one host, a GPU each.
        dtype: of what is summed.
        device: this process's.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device):
        self.rank, self.degree = dist.get_rank(group), dist.get_world_size(group)
        self.dtype, self.half, self.is_early = dtype, MOST_BYTES // dtype.itemsize, launches_early(device)
        part_bytes, count = 2 * MOST_BYTES, BLOCKS * self.degree
        memory = symmetric.empty(part_bytes + 4 * count, dtype=torch.uint8, device=device).zero_()
        torch.cuda.synchronize(device)
        self.handle = symmetric.rendezvous(memory, group.group_name)
        dist.barrier(group)  # all counts are zero
        ranks = range(self.degree)
        self.parts = tuple(self.handle.get_buffer(rank, (2 * self.half,), dtype) for rank in ranks)
        self.counts = tuple(self.handle.get_buffer(rank, (count,), torch.int32, part_bytes // 4) for rank in ranks)

    def takes(self, x: Tensor) -> bool:
        return x.dtype == self.dtype and x.is_contiguous() and x.nbytes * (self.degree - 1) <= MOST_BYTES

    def sum(self, x: Tensor, addend: Tensor | None = None) -> None:
        """Over the GPUs, in place, of what it takes; the addend is added to it once."""
        launch_sum(x, addend, self.parts, self.counts, self.rank, self.is_early)


def launch_sum(
    x: Tensor,
    addend: Tensor | None,
    parts: tuple[Tensor, ...],
    counts: tuple[Tensor, ...],
    rank: int,
    is_early: bool = False,
) -> None:
    """One GPU's kernel of a sum: x, contiguous, becomes that of all GPUs' x, and of an addend.

    Args:
        x, addend: of the same size, at most half of `parts`.
        parts, counts: of each GPU, [2 * half] of x's type and [BLOCKS * GPUs] int32, zeros before the first sum.
        rank: which of them this one is.
        is_early: the kernel is launched while the one before it ends.
    """
    size = x.numel()
    _sum[(min(BLOCKS, triton.cdiv(size, WIDTH)),)](
        x, addend, parts, counts, size,
        RANK=rank, DEGREE=len(parts), HALF=parts[rank].numel() // 2, BLOCKS=BLOCKS, WIDTH=WIDTH, IS_EARLY=is_early,
        num_warps=4, launch_pdl=is_early,
    )  # fmt: skip


def reach_each_other(ranks: list[int]) -> bool:
    """Do the GPUs of these numbers reach each other's memory?"""
    return all(torch.cuda.can_device_access_peer(one, other) for one in ranks for other in ranks if one != other)
