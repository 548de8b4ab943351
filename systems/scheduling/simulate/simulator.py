"""How long a schedule takes: a discrete-event simulation of a GPU that runs a captured graph.

1. A kernel becomes ready when all before it have ended and the edge from the last of them has taken its time. They
   are dispatched in the order in which they became ready, one by one: a kernel that had to wait for more takes longer.
2. Dispatched kernels stand in one queue. Blocks of the first one go to the multiprocessors (SMs) as far as registers, shared
   memory, threads and slots allow; the next one's turn comes when it has none left. A kernel alone runs in waves of equal
   length, whose sum is its time alone. Room is counted in SMs: a kernel takes as many as its blocks fill.
3. Kernels that run together slow each other down where they want more than there is, of memory's bandwidth or of the
   multiprocessors: each one by its own share of it.

Invariants: nothing is faster than alone, so no schedule takes less than its critical path. Kernels together make as much
progress as one of them would alone, so no schedule takes more than the sum of its kernels, launches and edges. Every block
runs once, for no less than a wave of its kernel takes alone. Each SM holds blocks of one kernel, as many as its limits
allow: where GPUs mix them instead, rule 3 makes up for it.
"""

from collections import deque
from collections.abc import Sequence
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


class _Running:
    """A kernel that has begun. Its blocks run at one pace, so each batch has its end on the kernel's own clock.

    That clock shows the time that its blocks would have taken alone.

    Attributes:
        node: Its place.
        kernel: What it asks for.
        unplaced: Blocks that no multiprocessor has taken yet.
        resident: Blocks that run.
        sms: Multiprocessors that these fill.
        batches: A heap of (clock at the end, number, blocks, waves, begin).
        clock_us: What the clock shows when the first batch ends.
        end_us: When that is, unless the slowdown changes before; infinite without a batch.
        slowdown: By which the clock goes slower than time.
        bandwidth, share: Of memory's bandwidth and of the multiprocessors, that its blocks want.
    """

    __slots__ = (
        "bandwidth",
        "batches",
        "clock_us",
        "end_us",
        "kernel",
        "node",
        "resident",
        "share",
        "slowdown",
        "sms",
        "unplaced",
    )

    def __init__(self, node: int, kernel: Node):
        self.node, self.kernel, self.unplaced, self.resident, self.sms = node, kernel, kernel.blocks, 0, 0
        self.batches: list[tuple[float, int, int, int, float]] = []
        self.clock_us = self.bandwidth = self.share = 0.0
        self.end_us, self.slowdown = inf, 1.0

    def begin(self, blocks: int, waves: int, number: int, now: float) -> None:
        """Add a batch."""
        clock_us = self.clock_us
        if self.batches:
            clock_us -= (self.end_us - now) / self.slowdown
        heappush(self.batches, (clock_us + self.kernel.wave_us * waves, number, blocks, waves, now))
        self.clock_us = self.batches[0][0]
        self.end_us = now + (self.clock_us - clock_us) * self.slowdown

    def end(self, now: float) -> Batch:
        """Take the first batch away."""
        _, _, blocks, waves, begin_us = heappop(self.batches)
        if self.batches:
            clock_us = self.batches[0][0]
            self.end_us += (clock_us - self.clock_us) * self.slowdown
            self.clock_us = clock_us
        else:
            self.end_us = inf
        return Batch(self.node, blocks, waves, begin_us, now)


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

    An event costs as much as kernels run at once.

    Args:
        kernels: The nodes of the graph.
        before: For each node those that it comes after.
    """
    nodes, n = kernels.nodes, len(kernels.nodes)
    edge_us, branch_us, dispatch_us, join_us = gpu.edge_us, gpu.branch_us, gpu.dispatch_us, gpu.join_us
    successors: list[list[int]] = [[] for _ in nodes]
    for v, earlier in enumerate(before):
        for u in earlier:
            successors[u].append(v)
    missing = [len(earlier) for earlier in before]
    coming = [(gpu.launch_us, v) for v in range(n) if not missing[v]]  # a heap of (when it is ready, node)
    queue: deque[_Running] = deque()
    free_sms = gpu.multiprocessors
    contention = _Contention(gpu)
    begins, ends = [-1.0] * n, [0.0] * n
    running: list[_Running] = []
    batches: list[Batch] = []
    number = 0  # of batches that have begun
    dispatcher_free_us, next_end_us = 0.0, inf

    while coming or running:
        # To the next moment at which something ends or is dispatched.
        now = next_end_us
        if coming and dispatcher_free_us < now and coming[0][0] < now:
            now = max(dispatcher_free_us, coming[0][0])
        has_changed = False  # have blocks begun or ended?
        if next_end_us <= now:
            has_changed, until, num_ended = True, now + NOTHING_US, 0
            for kernel in running:
                if kernel.end_us > until:
                    continue
                v, gone = kernel.node, 0
                while kernel.end_us <= until:
                    batch = kernel.end(now)
                    batches.append(batch)
                    gone += batch.blocks
                if gone:
                    kernel.resident -= gone
                    sms = -(-kernel.resident // kernel.kernel.on_one)
                    free_sms += kernel.sms - sms
                    kernel.sms = sms
                contention.update(kernel)
                if kernel.batches or kernel.unplaced:
                    continue
                # 1. The kernel has ended: what comes after it may be ready.
                ends[v] = now
                num_ended += 1
                after = successors[v]
                for s in after:
                    missing[s] -= 1
                    if not missing[s]:
                        is_chain = len(after) == len(before[s]) == 1
                        heappush(coming, (now + (edge_us if is_chain else branch_us), s))
            if num_ended:
                running = [kernel for kernel in running if kernel.batches or kernel.unplaced]
        while coming and dispatcher_free_us <= now and coming[0][0] <= now:
            v = heappop(coming)[1]
            dispatcher_free_us = now + dispatch_us
            if len(before[v]) > 1:
                dispatcher_free_us += join_us * (len(before[v]) - 1)
            queue.append(_Running(v, nodes[v]))
        # 2. Blocks of the first in the queue.
        while queue:
            kernel = queue[0]
            node, blocks, waves = kernel.kernel, kernel.unplaced, 1
            if blocks:
                left, on_one = blocks, node.on_one
                room = (kernel.sms + free_sms) * on_one - kernel.resident
                if blocks > room:
                    blocks = room
                if not blocks:
                    break
                if left > node.most_blocks:  # each slot will run at least so many waves, whatever becomes free meanwhile
                    waves = left // node.most_blocks
                kernel.unplaced = left - blocks * waves
                kernel.resident += blocks
                sms = -(-kernel.resident // on_one)
                free_sms -= sms - kernel.sms
                kernel.sms = sms
            if begins[kernel.node] < 0:
                begins[kernel.node] = now
                running.append(kernel)
            kernel.begin(blocks, waves, number, now)
            contention.update(kernel)
            number += 1
            has_changed = True
            if kernel.unplaced:
                break
            queue.popleft()
        # 3. What runs together shares.
        if has_changed:
            next_end_us = contention.slow_down(running, now)
    latency_us = max(ends, default=gpu.launch_us) + gpu.finish_us
    return Timeline(kernels, tuple(begins), tuple(ends), latency_us, tuple(batches))


class _Contention:
    """What kernels that run want of memory's bandwidth and of the multiprocessors, in shares of what there is.

    Each is slowed down by its own share of what all want beyond what there is.

    Invariants: a share is at most 1, so n kernels want at most n times what there is, and together make at least as much
    progress as one alone. A kernel with blocks that found no room slows no other down: else those would wait for
    room that its own slower blocks hold, and both would lose.
    """

    def __init__(self, gpu: Gpu):
        self.sharing, self.sms = gpu.sharing, gpu.multiprocessors
        self.memory = self.multiprocessors = 0.0  # that all but a waiting kernel want
        self.waiting: _Running | None = None  # the kernel that runs and has blocks without room
        self.is_slow = False

    def update(self, kernel: _Running) -> None:
        """Note that other blocks of a kernel run than before, or that it has ended."""
        if kernel is self.waiting:
            self.waiting = None
        else:
            self.memory -= kernel.bandwidth
            self.multiprocessors -= kernel.share
        if not kernel.batches:
            kernel.bandwidth = kernel.share = 0.0
            return
        blocks, most = kernel.resident, kernel.kernel.most_blocks
        kernel.bandwidth = kernel.kernel.bandwidth * blocks / most if most else kernel.kernel.bandwidth
        kernel.share = self.sharing * (blocks / self.sms if blocks < self.sms else 1.0)
        if kernel.unplaced:
            self.waiting = kernel
        else:
            self.memory += kernel.bandwidth
            self.multiprocessors += kernel.share

    def slow_down(self, running: Sequence[_Running], now: float) -> float:
        """Give each kernel its slowdown from now on; returns when the first batch ends."""
        if not running:
            self.memory = self.multiprocessors = 0.0  # without what rounding leaves
            return inf
        memory, multiprocessors, waiting = self.memory - 1.0, self.multiprocessors - 1.0, self.waiting
        is_slow = memory > 0 or multiprocessors > 0 or waiting is not None
        if not is_slow and not self.is_slow:
            return min([kernel.end_us for kernel in running])
        self.is_slow, next_end_us = is_slow, inf
        for kernel in running:
            bandwidth, share = kernel.bandwidth, kernel.share
            if kernel is waiting:
                more, by_multiprocessors = bandwidth * (memory + bandwidth), share * (multiprocessors + share)
            else:
                more, by_multiprocessors = bandwidth * memory, share * multiprocessors
            if by_multiprocessors > more:
                more = by_multiprocessors
            slowdown = 1.0 + more if more > 0 else 1.0
            end_us = kernel.end_us
            if slowdown != kernel.slowdown:
                kernel.end_us = end_us = now + (end_us - now) * (slowdown / kernel.slowdown)
                kernel.slowdown = slowdown
            if end_us < next_end_us:
                next_end_us = end_us
        return next_end_us


def simulate(schedule: Schedule, profile: Profile, gpu: Gpu) -> Timeline:
    """The timeline of one replay of a schedule. A `Simulator` does this for many schedules of one program.

    Raises:
        ValueError: The profile is of another program.
    """
    return Simulator(schedule.graph, profile, gpu)(schedule)
