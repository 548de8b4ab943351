"""How busy other processes keep the CPU cores that a sweep may use."""

import os
from time import monotonic, sleep

import psutil

LEAST_S = 0.5  # to count over, since the kernel counts in ticks of 10 ms
MOST_OTHER_LOAD = 0.1  # of the cores; more makes a CPU's times doubtful


class CpuLoad:
    """Counts from its making on.

    Threads of one operator wait for each other at a barrier. One of them that has no core makes all of them wait, so that a
    system with many threads an operator loses far more to a load than one with a single thread.

    Args:
        root: A process; it and its descendants are no others.
    """

    def __init__(self, root: int):
        self.root = root
        self.begin = monotonic()
        self.busy_s, self.own_s = _busy_seconds(), _tree_seconds(root)

    def share_of_others(self) -> float:
        """The mean since the making, as a share of the cores' time, 0 to 1. It may wait, until LEAST_S have passed."""
        sleep(max(0.0, self.begin + LEAST_S - monotonic()))
        elapsed_s = monotonic() - self.begin
        others_s = _busy_seconds() - self.busy_s - (_tree_seconds(self.root) - self.own_s)
        return min(max(others_s / (elapsed_s * len(_cores())), 0.0), 1.0)


def _cores() -> list[int]:
    every = range(psutil.cpu_count() or 1)
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(every)


def _busy_seconds() -> float:
    """Of the cores, in any process and in the machine beneath."""
    times_by_core = psutil.cpu_times(percpu=True)
    busy_s = 0.0
    for core in _cores():
        times = times_by_core[core]
        busy_s += sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
    return busy_s


def _tree_seconds(root: int) -> float:
    """Of a process, its descendants, and those of them that have ended and were waited for."""
    try:
        process = psutil.Process(root)
        tree = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    seconds = 0.0
    for member in tree:
        try:
            times = member.cpu_times()
        except psutil.NoSuchProcess:  # it ended meanwhile
            continue
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds
