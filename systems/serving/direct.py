"""Sums over the GPUs of a host that reach each other's memory: each reads all parts by itself, in one kernel.

A library's sum goes around a ring, and takes many times as long as the few numbers of an increment need on their way. Here
few numbers go into the others' memory with a count beside each, by which whoever waits for them sees that they have come.
More numbers a GPU puts where others reach them, tells them, waits for theirs, and reads.

Memory has two halves, used in turn: whoever has put the next part there has read the last.
"""

from __future__ import annotations

import ctypes
import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
import triton
import triton.language as tl
from torch import Tensor

from systems.kernels.kernel import launches_early
from systems.kernels.tile import let_consumers_launch, wait_for_producers

FEW_BYTES = 64 * 2**10  # that go with a count beside each word
MOST_BYTES = 5 * 2**20  # that a GPU reads of others for a sum; the ring is as fast beyond it
BLOCKS = 128  # thread blocks of the largest grid: all run at once, since they wait for each other
WIDTH = 1024  # numbers that a thread block takes at a time; of words with counts half as many
WORD_BYTES = 4
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


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
        counts: of each GPU, [BLOCKS, DEGREE] int32: how many sums each GPU has put its part for.
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


@triton.jit
def _sum_words(
    x, addend, words, counts, size,
    RANK: tl.constexpr, DEGREE: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, TYPE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """A word of 32 bits and its sum's count are one store of 64 bits, which comes whole.

    Args:
        x: [size] int32, of numbers of a TYPE, one or two a word; the sum takes its place.
        addend: as x, added once, or None.
        words: of each GPU, [2, DEGREE, HALF] int64: what each of all has put there.
        counts: [blocks] int32, of this GPU's sums.
    """
    let_consumers_launch(IS_EARLY)
    wait_for_producers(IS_EARLY)
    block = tl.program_id(0)
    count = tl.load(counts + block) + 1
    half = (count & 1) * (DEGREE * HALF)
    at = block * WIDTH + tl.arange(0, WIDTH)
    is_there = at < size
    own = tl.load(x + at, mask=is_there, other=0)
    tag = count.to(tl.int64) << 32
    for other in tl.static_range(DEGREE):
        if other != RANK:
            tl.store(words[other] + half + RANK * HALF + at, tag | (own.to(tl.int64) & 0xFFFFFFFF), mask=is_there)
    low, high = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for other in tl.static_range(DEGREE):  # in the same order on every GPU
        word = own
        if other != RANK:
            come = tl.load(words[RANK] + half + other * HALF + at, mask=is_there, other=tag, volatile=True)
            while tl.max(((come >> 32).to(tl.int32) != count).to(tl.int32), axis=0) > 0:
                come = tl.load(words[RANK] + half + other * HALF + at, mask=is_there, other=tag, volatile=True)
            word = come.to(tl.int32)
        one, two = _numbers(word, TYPE)
        low += one
        high += two
    if addend is not None:
        one, two = _numbers(tl.load(addend + at, mask=is_there, other=0), TYPE)
        low += one
        high += two
    if tl.float32 == TYPE:
        tl.store(x + at, low.to(tl.int32, bitcast=True), mask=is_there)
    else:
        lower = low.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        tl.store(x + at, lower | (high.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16), mask=is_there)
    tl.store(counts + block, count)


@triton.jit
def _numbers(word, TYPE: tl.constexpr):
    """Both numbers of a word, in fp32; of one of 32 bits, it and zero."""
    if tl.float32 == TYPE:
        return word.to(tl.float32, bitcast=True), tl.zeros_like(word).to(tl.float32)
    else:
        low = (word & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True)
        return low.to(tl.float32), (word >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)


class DirectSums:
    """Of one GPU. All GPUs of a group make theirs together, and sum the same sizes in the same order.

    Args:
        group: of processes on one host, a GPU each.
        dtype: of what is summed.
        device: this process's.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device):
        self.rank, self.degree = dist.get_rank(group), dist.get_world_size(group)
        self.dtype, self.is_early = dtype, launches_early(device)
        sizes = [  # in bytes, by type
            (2 * MOST_BYTES, dtype),
            (2 * self.degree * FEW_BYTES // WORD_BYTES * 8, torch.int64),
            (BLOCKS * self.degree * 4, torch.int32),
        ]
        self.memory = symmetric.empty(sum(size for size, _ in sizes), dtype=torch.uint8, device=device).zero_()
        torch.cuda.synchronize(device)
        self.handle = symmetric.rendezvous(self.memory, group.group_name)
        dist.barrier(group)  # all counts are zero
        begin, views = 0, []
        for size, kind in sizes:
            shape, offset = (size // kind.itemsize,), begin // kind.itemsize
            views.append(tuple(self.handle.get_buffer(rank, shape, kind, offset) for rank in range(self.degree)))
            begin += size
        self.parts, self.words, self.counts = views
        self.own_counts = torch.zeros(BLOCKS, dtype=torch.int32, device=device)

    def takes(self, x: Tensor) -> bool:
        is_of_type = x.dtype == self.dtype and x.dtype in TYPES
        return is_of_type and x.is_contiguous() and x.nbytes * (self.degree - 1) <= MOST_BYTES

    def sum(self, x: Tensor, addend: Tensor | None = None) -> None:
        """Over the GPUs, in place, of what it takes; the addend, of the same size and type, is added to it once."""
        addend = None if addend is None else addend.contiguous()
        are_words = all(y is None or _are_words(y) for y in (x, addend))
        if x.nbytes * (self.degree - 1) <= FEW_BYTES and are_words:
            launch_sum_of_words(x, addend, self.words, self.own_counts, self.rank, self.is_early)
        else:
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


def launch_sum_of_words(
    x: Tensor,
    addend: Tensor | None,
    words: tuple[Tensor, ...],
    counts: Tensor,
    rank: int,
    is_early: bool = False,
) -> None:
    """As `launch_sum`, of few numbers, of which x has whole words.

    Args:
        x, addend, rank, is_early: as there.
        words: of each GPU, [2 * GPUs * half] int64, zeros before the first sum; x has at most half.
        counts: of this GPU, [BLOCKS] int32, zeros before the first sum.
    """
    size, width = x.nbytes // WORD_BYTES, WIDTH // 2
    bits, more = (None if each is None else each.view(-1).view(torch.int32) for each in (x, addend))
    half = words[rank].numel() // (2 * len(words))
    _sum_words[(triton.cdiv(size, width),)](
        bits, more, words, counts, size,
        RANK=rank, DEGREE=len(words), HALF=half, WIDTH=width, TYPE=TYPES[x.dtype], IS_EARLY=is_early,
        num_warps=4, launch_pdl=is_early,
    )  # fmt: skip


def _are_words(x: Tensor) -> bool:
    """Does it begin and end with a word of 32 bits?"""
    return not (x.nbytes % WORD_BYTES or int(x.storage_offset()) * x.itemsize % WORD_BYTES)


def reach_each_other(ranks: list[int]) -> bool:
    """Do the GPUs of these numbers reach each other's memory, by atomic operations too, and may they?"""
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":  # where a host's connections are broken
        return False
    pairs = [(one, other) for one in ranks for other in ranks if one != other]
    return all(torch.cuda.can_device_access_peer(*pair) and _has_atomics(*pair) for pair in pairs)


def _has_atomics(one: int, other: int) -> bool:
    """Over PCIe they may be missing. Raises RuntimeError."""
    value = ctypes.c_int(0)
    if error := ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(ctypes.byref(value), NATIVE_ATOMICS, one, other):
        raise RuntimeError(f"CUDA error {error}: whether GPU {one} has atomic operations on GPU {other}")
    return bool(value.value)
