"""Which of the machine's cores each GPU's cells may use."""

import os
import re
from itertools import pairwise
from pathlib import Path

CORES = Path("/sys/devices/system/cpu")


def shares(count: int) -> list[list[int]]:
    """The cores for each of `count` GPUs measured at once: what is compiled for one must not hold up launches on another.

    Empty ones, which stand for every core, for one GPU and where there is less than a core for each. Threads of one physical
    core, which many machines number far apart, slow each other, so they go to one GPU.
    """
    cores = sorted(os.sched_getaffinity(0), key=_physical) if hasattr(os, "sched_getaffinity") else []
    if count == 1 or len(cores) < count:
        return [[] for _ in range(count)]
    bounds = [i * len(cores) // count for i in range(count + 1)]
    return [sorted(cores[begin:end]) for begin, end in pairwise(bounds)]


def _physical(core: int) -> tuple[int, int]:
    """The first thread of the physical core that a core (as Linux counts them) is a thread of, and itself."""
    siblings = CORES / f"cpu{core}" / "topology" / "thread_siblings_list"  # "3", "3,35" or "6-7"
    first = re.match(r"\d+", siblings.read_text()) if siblings.exists() else None
    return int(first[0]) if first else core, core
