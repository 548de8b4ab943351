"""How long a schedule takes: a discrete-event simulation of a GPU that runs a captured graph.

1. A kernel becomes ready when all before it have ended and the edge from the last of them has taken its time. They
   are dispatched in the order in which they became ready, one by one: a kernel that had to wait for more takes longer.
2. Dispatched kernels stand in one queue. Blocks of the first one go to the multiprocessors (SMs) as far as registers, shared
   memory, threads and slots allow; the next one's turn comes when it has none left. A kernel alone runs in waves of equal
   length, whose sum is its time alone. Room is counted in SMs: a kernel takes as many as its blocks fill.
3. Kernels that run together slow each other down: each one by its own share of what they want of memory's bandwidth beyond
   what there is, and where their blocks, spread over all SMs, are more on the fullest one than its own would be.

Invariants: nothing is faster than alone, so no schedule takes less than its critical path. Kernels together make as much
progress as one of them would alone, so no schedule takes more than the sum of its kernels, launches and edges. Every block
runs once, for no less than a wave of its kernel takes alone. Room is what its limits allow, each SM for one kernel: that
GPUs spread and mix blocks instead is what rule 3 counts.
"""

from collections.abc import Sequence

from systems.profiling.profile import Profile
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans.schedule import Schedule

from .alone import STATES
from .edges import predecessors
from .events import events
from .gpu import Gpu
from .kernels import Kernels
from .timeline import Timeline


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
    begins_us, ends_us, columns = events(kernels, before, gpu)
    latency_us = max(ends_us, default=gpu.launch_us) + gpu.finish_us
    return Timeline(kernels, tuple(begins_us), tuple(ends_us), latency_us, columns)


def simulate(schedule: Schedule, profile: Profile, gpu: Gpu) -> Timeline:
    """The timeline of one replay of a schedule. A `Simulator` does this for many schedules of one program.

    Raises:
        ValueError: The profile is of another program.
    """
    return Simulator(schedule.graph, profile, gpu)(schedule)
