"""The events of one replay. Numba compiles this loop where it is installed; Python runs the same code elsewhere, and slower.

Both do the same IEEE operations in the same order, so their results are equal to the last bit.
"""

from collections.abc import Callable, Sequence
from functools import cache
from heapq import heappop, heappush
from importlib.util import find_spec
from itertools import chain
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np

from .gpu import Gpu
from .kernels import Kernels, Node
from .timeline import Column

NOTHING_US = 1e-7  # by which rounding may part batches that end together
Replayed: TypeAlias = tuple[list[float], list[float], tuple[Column, ...]]


class Costs(NamedTuple):
    """What the loop reads of a `Gpu`."""

    multiprocessors: int
    launch_us: float
    edge_us: float
    branch_us: float
    join_us: float
    dispatch_us: float
    sharing: float


def events(kernels: Kernels, before: Sequence[tuple[int, ...]], gpu: Gpu) -> Replayed:
    """What `loop` returns for a graph of kernels.

    Args:
        before: For each node those that it comes after.
    """
    costs = Costs(gpu.multiprocessors, *(float(getattr(gpu, name)) for name in Costs._fields[1:]))
    num_before, all_before = [*map(len, before)], [*chain.from_iterable(before)]
    if (machine_code := compiled()) is None:
        return loop(kernels.nodes, num_before, all_before, costs)
    return machine_code(kernels.numbers, np.array(num_before, np.int64), np.array(all_before, np.int64), costs)


@cache
def compiled() -> Callable[..., Replayed] | None:
    """The loop as machine code, which stays on disk where there is room for it; None where Numba is not installed."""
    if find_spec("numba") is None:
        return None
    from numba import njit
    from numba.extending import register_jitable

    register_jitable(demand)
    try:
        return njit(cache=True)(loop)  # type: ignore[no-any-return]
    except RuntimeError:  # no folder for it can be written: each process compiles
        return njit(loop)  # type: ignore[no-any-return]


def demand(node: Node, resident: int) -> float:
    """What blocks of one kernel that run want of memory's bandwidth, as a share."""
    return node.bandwidth * resident / node.most_blocks if node.most_blocks else node.bandwidth


def loop(nodes: Sequence[Node], num_before: Sequence[int], before: Sequence[int], costs: Costs) -> Replayed:
    """When each kernel begins and ends.

    The blocks of a kernel run at one pace, so a batch has its end on the kernel's own clock. That clock shows the time
    that the blocks would have taken alone, and goes slower than time by the kernel's slowdown.

    Invariants of contention: none of n kernels takes more than n times as long as alone, so together they make at least as
    much progress as one alone. A kernel with blocks that found no room slows no other down: else those would wait for room
    that its own slower blocks hold, and both would lose.

    Args:
        nodes: The kernels; the rows of `Kernels.numbers` where the loop is compiled.
        num_before: How many kernels each one comes after.
        before: Those, one kernel's after the other's.

    Returns:
        When each kernel begins, when it ends, and the columns of a `Timeline`.
    """
    n, sms = len(nodes), costs.multiprocessors
    # What comes after kernel v: after[first_after[v] : first_after[v + 1]].
    num_after = [0] * n
    for u in before:
        num_after[u] += 1
    first_after = [0] * (n + 1)
    for v in range(n):
        first_after[v + 1] = first_after[v] + num_after[v]
    after, next_after, i = [0] * len(before), first_after[:n], 0
    for v in range(n):
        for u in before[i : i + num_before[v]]:
            after[next_after[u]] = v
            next_after[u] += 1
        i += num_before[v]

    # Of each kernel.
    missing = [int(count) for count in num_before]  # of those that it comes after, how many have not ended
    begins_us, ends_us = [-1.0] * n, [0.0] * n
    unplaced, resident, num_sms = [0] * n, [0] * n, [0] * n  # blocks without room yet; blocks that run; SMs that these fill
    clock_us = [0.0] * n  # what its clock shows when its first batch ends
    end_us = [inf] * n  # when that is, unless its slowdown changes before
    slowdown = [1.0] * n
    memory = [0.0] * n  # share of bandwidth that its blocks want
    head = [-1] * n  # its batch that ends first; `following` leads on to the next one

    # Of each batch: lists that are empty, but typed.
    owner, blocks, waves, following, end_order = [0][:0], [0][:0], [0][:0], [0][:0], [0][:0]
    batch_clock_us, batch_begin_us, batch_end_us = [0.0][:0], [0.0][:0], [0.0][:0]

    coming = [(costs.launch_us, v) for v in range(n) if not missing[v]]  # a heap of (when it is ready, kernel)
    queue, first = [0][:0], 0  # kernels in the order of their dispatch; of these the first with unplaced blocks
    running = [0][:0]
    free = sms
    memory_wanted = 0.0  # by all that run but `waiting`
    waiting, is_slow = -1, False  # the kernel that runs and has blocks without room; is any kernel slowed down?
    dispatcher_free_us, next_end_us = 0.0, inf

    while len(coming) or len(running):
        # To the next moment at which something ends or is dispatched.
        now = next_end_us
        if len(coming) and dispatcher_free_us < now and coming[0][0] < now:
            now = max(dispatcher_free_us, coming[0][0])
        has_changed = next_end_us <= now  # have blocks begun or ended?
        # 1. What comes after a kernel that has ended may be ready.
        if has_changed:
            num_running = 0
            for v in running:
                if end_us[v] <= now + NOTHING_US:
                    while end_us[v] <= now + NOTHING_US:
                        batch = head[v]
                        head[v] = following[batch]
                        resident[v] -= blocks[batch]
                        batch_end_us[batch] = now
                        end_order.append(batch)
                        if head[v] < 0:
                            end_us[v] = inf
                        else:
                            end_us[v] += (batch_clock_us[head[v]] - clock_us[v]) * slowdown[v]
                            clock_us[v] = batch_clock_us[head[v]]
                    if nodes[v].blocks:
                        filled = -(-resident[v] // nodes[v].on_one)
                        free += num_sms[v] - filled
                        num_sms[v] = filled
                    if v == waiting:
                        waiting = -1
                    else:
                        memory_wanted -= memory[v]
                    memory[v] = 0.0
                    if head[v] >= 0:
                        memory[v] = demand(nodes[v], resident[v])
                        if unplaced[v]:
                            waiting = v
                        else:
                            memory_wanted += memory[v]
                    elif not unplaced[v]:
                        ends_us[v] = now
                        for s in after[first_after[v] : first_after[v + 1]]:
                            missing[s] -= 1
                            if not missing[s]:
                                is_chain = num_after[v] == num_before[s] == 1
                                heappush(coming, (now + (costs.edge_us if is_chain else costs.branch_us), s))
                        continue
                running[num_running] = v
                num_running += 1
            del running[num_running:]
        while len(coming) and dispatcher_free_us <= now and coming[0][0] <= now:
            v = heappop(coming)[1]
            dispatcher_free_us = now + costs.dispatch_us
            if num_before[v] > 1:
                dispatcher_free_us += costs.join_us * (num_before[v] - 1)
            unplaced[v] = nodes[v].blocks
            queue.append(v)
        # 2. Blocks of the first in the queue.
        while first < len(queue):
            v = queue[first]
            node = nodes[v]
            num_blocks, num_waves = unplaced[v], 1
            if num_blocks:
                num_blocks = min(num_blocks, free * node.on_one)  # SMs that it has are full, as long as blocks are left
                if not num_blocks:
                    break
                if unplaced[v] > node.most_blocks:  # each slot runs at least so many waves, whatever becomes free meanwhile
                    num_waves = unplaced[v] // node.most_blocks
                unplaced[v] -= num_blocks * num_waves
                resident[v] += num_blocks
                filled = -(-resident[v] // node.on_one)
                free += num_sms[v] - filled
                num_sms[v] = filled
            if begins_us[v] < 0:
                begins_us[v] = now
                running.append(v)
            # The batch goes behind those of its kernel that end before it.
            begin_clock_us = clock_us[v]
            if head[v] >= 0:
                begin_clock_us -= (end_us[v] - now) / slowdown[v]
            end_clock_us = begin_clock_us + node.wave_us * num_waves
            earlier, later = -1, head[v]
            while later >= 0 and batch_clock_us[later] <= end_clock_us:
                earlier, later = later, following[later]
            if earlier < 0:
                head[v] = len(owner)
            else:
                following[earlier] = len(owner)
            owner.append(v)
            blocks.append(num_blocks)
            waves.append(num_waves)
            following.append(later)
            batch_clock_us.append(end_clock_us)
            batch_begin_us.append(now)
            batch_end_us.append(inf)
            clock_us[v] = batch_clock_us[head[v]]
            end_us[v] = now + (clock_us[v] - begin_clock_us) * slowdown[v]
            if v == waiting:
                waiting = -1
            else:
                memory_wanted -= memory[v]
            memory[v] = demand(node, resident[v])
            has_changed = True
            if unplaced[v]:
                waiting = v
                break
            memory_wanted += memory[v]
            first += 1
        # 3. Each of those that run together is slowed down by its own share of what all want of memory beyond what there is,
        #    and by the levels of all blocks over its own.
        if has_changed:
            next_end_us = inf
            if not len(running):
                memory_wanted = 0.0  # without what rounding leaves
            num_kernels, num_blocks = 0, 0  # of all that run but `waiting`
            for v in running:
                if v != waiting:
                    num_kernels += 1
                    num_blocks += resident[v]
            was_slow = is_slow
            is_slow = memory_wanted > 1 or num_blocks > sms or waiting >= 0
            for v in running:
                if is_slow or was_slow:
                    beyond_memory, others, all_blocks = memory_wanted - 1, num_kernels - 1, num_blocks
                    if v == waiting:
                        beyond_memory, others, all_blocks = beyond_memory + memory[v], others + 1, all_blocks + resident[v]
                    beyond_level = 0.0
                    if resident[v]:
                        beyond_level = costs.sharing * (-(-all_blocks // sms) / -(-resident[v] // sms) - 1)
                    pace = 1 + max(0.0, memory[v] * beyond_memory, min(float(others), beyond_level))
                    if pace != slowdown[v]:
                        end_us[v] = now + (end_us[v] - now) * (pace / slowdown[v])
                        slowdown[v] = pace
                next_end_us = min(next_end_us, end_us[v])
    of_batches = np.array(owner, np.int64), np.array(blocks, np.int64), np.array(waves, np.int64)
    times_us = np.array(batch_begin_us, np.float64), np.array(batch_end_us, np.float64)
    return begins_us, ends_us, (*of_batches, *times_us, np.array(end_order, np.int64))
