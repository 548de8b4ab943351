"""How long a schedule takes: a discrete-event simulation of a GPU that runs a captured graph.

1. A kernel becomes ready when all before it have ended and the edge from the last of them has taken its time. They
   are dispatched in the order in which they became ready, one by one: a kernel that had to wait for more takes longer.
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
from heapq import heappop, heappush
from math import inf

from systems.profiling.profile import Profile
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans.schedule import Schedule

from .alone import STATES
from .edges import predecessors
from .gpu import Gpu
from .kernels import Kernels, Node
from .timeline import Batch, Timeline

NOTHING_US = 1e-7  # by which rounding may part batches that end together


@dataclass(slots=True, eq=False)
class _Running:
    """A batch that runs.

    Args:
        end_us: When it ends, unless its slowdown changes before.
        slowdown: By which it takes longer than alone.
    """

    node: int
    blocks: int
    waves: int
    begin_us: float
    end_us: float
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

    An event costs as much as kernels run at once, and nothing where none slows another down.

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
    queue: deque[int] = deque()
    threads, registers, shared_memory, slots = kernels.limits  # that nobody holds
    unplaced = [node.blocks for node in nodes]
    num_running = [0] * n  # batches of each node
    begins, ends = [-1.0] * n, [0.0] * n
    contention = _Contention(nodes, gpu)
    resident = contention.resident
    running: list[_Running] = []
    batches: list[Batch] = []
    dispatcher_free_us, next_end_us = 0.0, inf

    while coming or running:
        # To the next moment at which something ends or is dispatched.
        now = next_end_us
        if coming and dispatcher_free_us < now and coming[0][0] < now:
            now = max(dispatcher_free_us, coming[0][0])
        changed: list[int] = []  # nodes of which blocks have begun or ended
        if next_end_us <= now:
            until = now + NOTHING_US
            ended = [batch for batch in running if batch.end_us <= until]
            running = [batch for batch in running if batch.end_us > until]
            for batch in ended:
                v, blocks = batch.node, batch.blocks
                needs = nodes[v].needs
                threads += blocks * needs[0]
                registers += blocks * needs[1]
                shared_memory += blocks * needs[2]
                slots += blocks
                batches.append(Batch(v, blocks, batch.waves, batch.begin_us, now))
                num_running[v] -= 1
                resident[v] -= blocks
                changed.append(v)
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
        while coming and dispatcher_free_us <= now and coming[0][0] <= now:
            v = heappop(coming)[1]
            dispatcher_free_us = now + gpu.dispatch_us + gpu.join_us * max(0, len(before[v]) - 1)
            queue.append(v)
        # 2. Blocks of the first in the queue.
        while queue:
            v = queue[0]
            node = nodes[v]
            blocks, waves = unplaced[v], 1
            if blocks:
                left, most, needs = blocks, node.most_blocks, node.needs
                if left + resident[v] > most:
                    blocks = most - resident[v]
                if blocks > slots:
                    blocks = slots
                if blocks * needs[0] > threads:
                    blocks = threads // needs[0]
                if blocks * needs[1] > registers:
                    blocks = registers // needs[1]
                if blocks * needs[2] > shared_memory:
                    blocks = shared_memory // needs[2]
                if not blocks:
                    break
                if left > most:  # each slot will run at least so many waves, whatever becomes free meanwhile
                    waves = left // most
                unplaced[v] = left - blocks * waves
                threads -= blocks * needs[0]
                registers -= blocks * needs[1]
                shared_memory -= blocks * needs[2]
                slots -= blocks
            if begins[v] < 0:
                begins[v] = now
            num_running[v] += 1
            resident[v] += blocks
            changed.append(v)
            running.append(_Running(v, blocks, waves, now, now + node.wave_us * waves))
            if unplaced[v]:
                break
            queue.popleft()
        # 3. What runs together shares.
        if changed:
            for v in changed:
                contention.update(v, num_running[v] > 0, unplaced[v] > 0)
            contention.slow_down(running, now)
            next_end_us = min([batch.end_us for batch in running], default=inf)
    latency_us = max(ends, default=gpu.launch_us) + gpu.finish_us
    return Timeline(kernels, tuple(begins), tuple(ends), latency_us, tuple(batches))


class _Contention:
    """What kernels that run want of memory's bandwidth and of the multiprocessors, in shares of what there is.

    Each is slowed down by its own share of what all want beyond what there is.

    Invariants: a share is at most 1, so n kernels want at most n times what there is, and together make at least as much
    progress as one alone. A kernel with blocks that found no room slows no other down: else those would wait for
    room that its own slower blocks hold, and both would lose. `memory` and `multiprocessors` are sums over the others.

    Attributes:
        resident: Blocks of each node.
    """

    def __init__(self, nodes: Sequence[Node], gpu: Gpu):
        self.nodes, self.sharing, self.sms = nodes, gpu.sharing, gpu.multiprocessors
        self.resident = [0] * len(nodes)
        self.shares: dict[int, tuple[float, float]] = {}  # of each node that runs
        self.waiting = -1  # the node that runs and has blocks without room
        self.memory = self.multiprocessors = 0.0
        self.is_slow = False

    def update(self, v: int, is_running: bool, is_waiting: bool) -> None:
        """Note that other blocks of node v run than before."""
        if v == self.waiting:
            self.waiting = -1
        elif v in self.shares:
            bandwidth, own = self.shares[v]
            self.memory -= bandwidth
            self.multiprocessors -= own
        if not is_running:
            self.shares.pop(v, None)
            if not self.shares:
                self.memory = self.multiprocessors = 0.0  # without what rounding leaves
            return
        node, blocks = self.nodes[v], self.resident[v]
        bandwidth = node.bandwidth * blocks / node.most_blocks if node.most_blocks else node.bandwidth
        own = self.sharing * min(1.0, blocks / self.sms)
        self.shares[v] = bandwidth, own
        if is_waiting:
            self.waiting = v
        else:
            self.memory += bandwidth
            self.multiprocessors += own

    def slow_down(self, running: Sequence[_Running], now: float) -> None:
        """Give each batch its slowdown from now on."""
        memory, multiprocessors = self.memory - 1.0, self.multiprocessors - 1.0
        if memory <= 0 and multiprocessors <= 0 and not self.is_slow and self.waiting < 0:
            return
        self.is_slow = False
        for batch in running:
            bandwidth, own = self.shares[batch.node]
            slowdown = 1.0 + bandwidth * memory
            by_multiprocessors = 1.0 + own * multiprocessors
            if batch.node == self.waiting:
                slowdown += bandwidth * bandwidth
                by_multiprocessors += own * own
            if by_multiprocessors > slowdown:
                slowdown = by_multiprocessors
            if slowdown > 1.0:
                self.is_slow = True
            else:
                slowdown = 1.0
            if slowdown != batch.slowdown:
                batch.end_us = now + (batch.end_us - now) * (slowdown / batch.slowdown)
                batch.slowdown = slowdown


def simulate(schedule: Schedule, profile: Profile, gpu: Gpu) -> Timeline:
    """The timeline of one replay of a schedule. A `Simulator` does this for many schedules of one program.

    Raises:
        ValueError: The profile is of another program.
    """
    return Simulator(schedule.graph, profile, gpu)(schedule)
