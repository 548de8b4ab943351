"""What each kernel takes alone where it stands in a program that is replayed again and again.

A kernel finds in L2 what was written shortly before it. Weights are read once a replay: they are still there from the last
one only where all weights of the program fit. So the time of an operator lies between its time warm and its time cold, at
the share that weights have of the bytes it moves:

    t = warm + share * (cold - warm),   share = 0 where all weights fit into L2, else weights / (read + written).

Of a table that it looks up, an operator reads some rows: as many bytes as it writes.
"""

from systems.profiling.intensity import LOOKUPS
from systems.profiling.profile import Kernel, Profile
from systems.scheduling.graph.operator_graph import OperatorGraph

from .gpu import Gpu

STATES = ("mixed", "warm", "cold", "sequence")


def alone_us(graph: OperatorGraph, profile: Profile, gpu: Gpu, state: str = "mixed") -> list[list[float]]:
    """Microseconds of each kernel of each operator.

    Args:
        state: One of STATES: `mixed` by the rule above; `sequence` as the profile says of its own sequence.
    """
    weights = weight_bytes(graph, profile)
    fit = sum(weights) <= gpu.l2_bytes
    times = []
    for operator, own, read in zip(profile.operators, weights, read_bytes(graph, profile), strict=True):
        moved = read + operator.bytes_written
        share = {"warm": 0.0, "cold": 1.0, "mixed": 0.0 if fit or not moved else own / moved}.get(state)
        times.append([_us(kernel, share) for kernel in operator.kernels])
    return times


def read_bytes(graph: OperatorGraph, profile: Profile) -> list[int]:
    """What each operator reads: of a table no more than it writes, else whole tensors."""
    return [
        min(alone.bytes_read, alone.bytes_written) if operator.name in LOOKUPS else alone.bytes_read
        for operator, alone in zip(graph.operators, profile.operators, strict=True)
    ]


def weight_bytes(graph: OperatorGraph, profile: Profile) -> list[int]:
    """What each operator reads and no other operator has written: weights, and the model's inputs.

    An operator that writes nothing is a view; who reads it reads what its producers have written.
    """
    written_by: list[set[int]] = []
    weights = []
    for v, (operator, read) in enumerate(zip(profile.operators, read_bytes(graph, profile), strict=True)):
        sources = set[int]().union(*(written_by[u] for u in graph.producers[v]))
        weights.append(max(0, read - sum(profile.operators[u].bytes_written for u in sources)))
        written_by.append({v} if operator.bytes_written else sources)
    return weights


def _us(kernel: Kernel, share: float | None) -> float:
    """At a share of the way from warm to cold; None for the time in sequence, which stands too where nobody looked."""
    if share is None or kernel.warm_ms is None or kernel.cold_ms is None:
        return kernel.milliseconds * 1e3
    return (kernel.warm_ms + share * (kernel.cold_ms - kernel.warm_ms)) * 1e3
