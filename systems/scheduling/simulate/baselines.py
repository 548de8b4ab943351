"""What is said of a schedule without a simulation: three figures that need no model of what runs together."""

from dataclasses import dataclass

from systems.profiling.limits import held_share
from systems.scheduling.plans.schedule import Schedule

from .edges import predecessors
from .simulator import Simulator


@dataclass(frozen=True)
class Baselines:
    """Microseconds.

    Args:
        sum_us: Of all kernels alone, one after the other, without launches and edges.
        critical_path_us: The longest chain of kernels along the schedule's edges, each alone.
        bound_us: The larger of the critical path and the area: the sum over kernels of the share of multiprocessors that
            each one holds (`held_share`), at its time alone. No simulation is below it.
    """

    sum_us: float
    critical_path_us: float
    bound_us: float


def baselines(schedule: Schedule, simulator: Simulator) -> Baselines:
    """Those of one schedule of the simulator's program."""
    nodes = simulator.kernels.nodes
    ends: list[float] = [0.0] * len(nodes)
    before = predecessors(schedule, simulator.kernels)
    first = simulator.kernels.first
    for v in schedule.order:
        for i in range(first[v], first[v + 1]):
            ends[i] = nodes[i].alone_us + max((ends[u] for u in before[i]), default=0.0)
    sms = simulator.gpu.multiprocessors
    area = sum(node.alone_us * held_share(node.blocks, node.on_one, sms) for node in nodes if node.blocks)
    longest = max(ends, default=0.0)
    return Baselines(sum(node.alone_us for node in nodes), longest, max(longest, area))
