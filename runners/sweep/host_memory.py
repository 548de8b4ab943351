"""How much of the host's memory processes take, and what the kernel has killed for want of it."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

GIB = 2**30


def host_memory(processes: Sequence[psutil.Process], limit: float) -> int:
    """Bytes of host memory that these processes take: the sum of their resident sets, where it is within `limit`.

    That counts a page once for each process that has it. Where it is above the limit, a page is divided among those that
    have it (Linux's proportional set size). Only then, since reading it goes through all page tables, which takes tens of
    milliseconds and holds up what the process would map meanwhile. What is swapped out is not counted.
    """

    def total(bytes_of: Callable[[psutil.Process], int]) -> int:
        total_bytes = 0
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
                total_bytes += bytes_of(process)
        return total_bytes

    def proportional(process: psutil.Process) -> int:
        try:
            return getattr(process.memory_full_info(), "pss", resident(process))
        except psutil.AccessDenied:  # another user's
            return resident(process)

    def resident(process: psutil.Process) -> int:
        return process.memory_info().rss

    resident_bytes = total(resident)
    return total(proportional) if resident_bytes > limit else resident_bytes


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed for want of memory since the machine started; 0 where it does not say."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(counters.get("oom_kill", 0))
