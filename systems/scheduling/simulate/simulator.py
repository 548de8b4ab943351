"""How long a schedule takes: a discrete-event simulation of a GPU that runs a captured graph.

1. A kernel becomes ready when all before it have ended and the edge from the last of them has taken its time. Ready kernels
   are dispatched one after the other, which takes longer the more kernels each one had to wait for.
2. Dispatched kernels stand in one queue. Blocks of the first one go to the multiprocessors as far as registers, shared
   memory, threads and slots allow, all multiprocessors taken together; the next one's turn comes when it has none left. A
   kernel alone runs in waves of equal length, whose sum is its time alone.
3. Kernels that run together slow each other down where they want more than there is, of memory's bandwidth or of the
   multiprocessors: each one by its own share of it.

Invariants: nothing is faster than alone, so no schedule takes less than its critical path. Kernels together make as much
progress as one of them would alone, so no schedule takes more than the sum of its kernels, launches and edges. Every block
runs once, for no less than a wave of its kernel takes alone.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from systems.profiling.profile import Profile
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans.schedule import Schedule

from .alone import STATES
from .edges import predecessors
from .gpu import Gpu
from .kernels import Kernels
from .timeline import Batch, Timeline

NOTHING_US = 1e-7  # what rounding leaves of a batch


@dataclass(slots=True)
class _Running:
    """A batch that runs.

    Args:
        left_us: Of it, as if its kernel were alone from now on.
        slowdown: By which that takes longer.
    """

    node: int
    blocks: int
    waves: int
    begin_us: float
    left_us: float
    slowdown: float = 1.0


class Simulator:
    """Simulates schedules of one profiled program on one GPU.

    Args:
        graph: Of the program.
        profile: Each operator alone on this GPU, in the order of the graph.
        gpu: On which it runs.
        state: One of STATES, in which L2 is before each kernel.

    Raises:
        ValueError: The profile is of another program.
    """

    def __init__(self, graph: OperatorGraph, profile: Profile, gpu: Gpu, state: str = STATES[0]):
        self.gpu, self.kernels = gpu, Kernels.of(graph, profile, gpu, state)

    def __call__(self, schedule: Schedule) -> Timeline:
        """The timeline of one replay.

        Args:
            schedule: Of the profiled program, its merges carried out (`lower`).
        """
        return replay(self.kernels, predecessors(schedule, self.kernels), self.gpu)


def replay(kernels: Kernels, before: Sequence[tuple[int, ...]], gpu: Gpu) -> Timeline:
    """The timeline of one replay of a graph of kernels.

    Args:
        kernels: The nodes of the graph.
        before: For each node those that it comes after.
    """
    nodes, n = kernels.nodes, len(kernels.nodes)
    successors: list[list[int]] = [[] for _ in nodes]
    for v, earlier in enumerate(before):
        for u in earlier:
            successors[u].append(v)
    missing = [len(earlier) for earlier in before]
    coming = [(gpu.launch_us, v) for v in range(n) if not missing[v]]  # a heap of (when it is ready, node)
    heapify(coming)
    threads, registers, shared_memory, slots = kernels.limits  # that nobody holds
    unplaced = [node.blocks for node in nodes]
    num_running = [0] * n  # batches of each node
    resident = [0] * n  # blocks of each node
    begins, ends = [-1.0] * n, [0.0] * n
    queue: deque[int] = deque()
    running: list[_Running] = []
    batches: list[Batch] = []
    now = dispatcher_free_at = 0.0

    while coming or running:
        # 3. To the next moment at which something ends or becomes ready.
        step_us = min([batch.left_us * batch.slowdown for batch in running], default=float("inf"))
        if coming and coming[0][0] - now < step_us:
            step_us = max(0.0, coming[0][0] - now)
        now += step_us
        still = []
        for batch in running:
            batch.left_us -= step_us / batch.slowdown
            if batch.left_us > NOTHING_US:
                still.append(batch)
                continue
            v = batch.node
            node, blocks = nodes[v], batch.blocks
            needs = node.needs
            threads += blocks * needs[0]
            registers += blocks * needs[1]
            shared_memory += blocks * needs[2]
            slots += blocks
            batches.append(Batch(v, blocks, batch.waves, batch.begin_us, now))
            num_running[v] -= 1
            resident[v] -= blocks
            if num_running[v] or unplaced[v]:
                continue
            # 1. The kernel has ended: what comes after it may be ready.
            ends[v] = now
            after = successors[v]
            for s in after:
                missing[s] -= 1
                if not missing[s]:
                    is_chain = len(after) == len(before[s]) == 1
                    heappush(coming, (now + (gpu.edge_us if is_chain else gpu.branch_us), s))
        has_changed = len(still) < len(running)
        running = still
        while coming and coming[0][0] <= now:
            v = heappop(coming)[1]
            if now < dispatcher_free_at:
                heappush(coming, (dispatcher_free_at, v))
                break
            dispatcher_free_at = now + gpu.dispatch_us + gpu.join_us * max(0, len(before[v]) - 1)
            queue.append(v)
        # 2. Blocks of the first in the queue.
        while queue:
            v = queue[0]
            node = nodes[v]
            left, most = unplaced[v], node.most_blocks
            blocks, waves = 0, 1
            if left:
                needs = node.needs
                blocks = min(
                    left, most - resident[v], slots, threads // needs[0], shared_memory // needs[2] if needs[2] else left
                )
                if needs[1]:
                    blocks = min(blocks, registers // needs[1])
                if not blocks:
                    break
                # Each slot will run at least so many waves, whatever becomes free meanwhile.
                waves = max(1, left // most)
                unplaced[v] = left - blocks * waves
                threads -= blocks * needs[0]
                registers -= blocks * needs[1]
                shared_memory -= blocks * needs[2]
                slots -= blocks
            if begins[v] < 0:
                begins[v] = now
            num_running[v] += 1
            resident[v] += blocks
            running.append(_Running(v, blocks, waves, now, node.wave_us * waves))
            has_changed = True
            if unplaced[v]:
                break
            queue.popleft()
        if has_changed and running:
            _slow_down(running, resident, unplaced, kernels, gpu)
    latency_us = max(ends, default=gpu.launch_us) + gpu.finish_us
    return Timeline(kernels, tuple(begins), tuple(ends), latency_us, tuple(batches))


def _slow_down(running: list[_Running], resident: list[int], unplaced: list[int], kernels: Kernels, gpu: Gpu) -> None:
    """Each kernel by its own share of what all want of bandwidth or of multiprocessors beyond what there is.

    Invariant: a share is at most 1, so n kernels want at most n times what there is, and together make at least as much
    progress as one alone. A kernel with blocks that found no room slows no other down: else those would wait for
    room that its own slower blocks hold, and both would lose.
    """
    if len(running) == 1:
        running[0].slowdown = 1.0
        return
    sms, sharing, nodes = gpu.multiprocessors, gpu.sharing, kernels.nodes
    shares: dict[int, tuple[float, float]] = {}  # of each kernel
    memory = multiprocessors = -1.0  # what all placed ones want beyond what there is
    for batch in running:
        v = batch.node
        if v not in shares:
            node, blocks = nodes[v], resident[v]
            bandwidth = node.bandwidth * blocks / node.most_blocks if node.most_blocks else node.bandwidth
            own = sharing * min(1.0, blocks / sms)
            shares[v] = bandwidth, own
            if not unplaced[v]:
                memory += bandwidth
                multiprocessors += own
    for batch in running:
        bandwidth, own = shares[batch.node]
        of_memory, of_multiprocessors = memory, multiprocessors
        if unplaced[batch.node]:  # it is not among those yet
            of_memory, of_multiprocessors = memory + bandwidth, multiprocessors + own
        batch.slowdown = 1.0 + max(0.0, bandwidth * of_memory, own * of_multiprocessors)


def simulate(schedule: Schedule, profile: Profile, gpu: Gpu) -> Timeline:
    """The timeline of one replay of a schedule. A `Simulator` does this for many schedules of one program.

    Raises:
        ValueError: The profile is of another program.
    """
    return Simulator(schedule.graph, profile, gpu)(schedule)
