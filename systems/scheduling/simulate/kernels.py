"""The kernels of a profiled program as the simulator sees them: what each one asks of a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, TypeAlias

import numpy as np

from systems.profiling.profile import Kernel, OperatorProfile, Profile
from systems.scheduling.graph.operator_graph import OperatorGraph

from .alone import STATES, alone_us, read_bytes
from .gpu import Gpu

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.void]]
NUMBERS = np.dtype([("blocks", "i8"), ("on_one", "i8"), ("most_blocks", "i8"), ("wave_us", "f8"), ("bandwidth", "f8")])


@dataclass(frozen=True, slots=True)
class Node:
    """One kernel or copy of an operator, which runs alone in waves of equal length.

    Args:
        operator: That launches it, by its place in the order of capture.
        kernel: As profiled. What a profile knows as an operator alone, without kernels, stands as a copy.
        alone_us: That it takes alone, where it stands.
        blocks: Of its grid; 0 of a copy, which takes no multiprocessor.
        on_one: Blocks that one multiprocessor holds at once by its limits.
        most_blocks: That are resident at once where it is alone.
        wave_us: Of a wave.
        bandwidth: Share of memory's bandwidth that it uses alone, 0 to 1.
    """

    operator: int
    kernel: Kernel
    alone_us: float
    blocks: int
    on_one: int
    most_blocks: int
    wave_us: float
    bandwidth: float


@dataclass(frozen=True)
class Kernels:
    """All nodes of a program.

    Args:
        nodes: Those of an operator follow each other; operators are in the order of capture.
        first: Of operator v are nodes[first[v] : first[v + 1]].
        numbers: Of each node what the simulation reads, as one array for compiled code.
    """

    nodes: tuple[Node, ...]
    first: tuple[int, ...]
    numbers: Numbers = field(compare=False, repr=False)

    def part(self, places: Sequence[int]) -> "Kernels":
        """Some of the nodes, without the operators that launch them."""
        return Kernels(tuple(self.nodes[i] for i in places), (), self.numbers[places])

    @classmethod
    def of(cls, graph: OperatorGraph, profile: Profile, gpu: Gpu, state: str = STATES[0]) -> "Kernels":
        """Those of a profiled program.

        Args:
            graph: Of the program.
            profile: In the order of the graph.
            state: One of STATES, in which L2 is before each kernel.

        Raises:
            ValueError: The profile is of another program.
        """
        if len(profile.operators) != len(graph):
            raise ValueError(f"a profile of {len(profile.operators)} operators, for a program of {len(graph)}")
        nodes: list[Node] = []
        first = [0]
        read, times = read_bytes(graph, profile), alone_us(graph, profile, gpu, state)
        for v, (operator, times_us) in enumerate(zip(profile.operators, times, strict=True)):
            nodes += _nodes(v, operator, read[v] + operator.bytes_written, times_us, gpu)
            first.append(len(nodes))
        assert NUMBERS.names is not None
        numbers = np.array([tuple(getattr(node, name) for name in NUMBERS.names) for node in nodes], NUMBERS)
        return cls(tuple(nodes), tuple(first), numbers)


def _nodes(v: int, operator: OperatorProfile, moved: int, times_us: Sequence[float], gpu: Gpu) -> list[Node]:
    kernels = operator.kernels
    if not kernels and operator.milliseconds:
        kernels = (Kernel("call", operator.milliseconds, (0, 0, 0), (0, 0, 0), 0, 0),)
        times_us = [operator.milliseconds * 1e3]
    # Nothing says which kernel of an operator moves its bytes: each gets a share by its time, so all use the same bandwidth.
    total_us = sum(times_us)
    bandwidth = min(1.0, moved / (total_us * gpu.bandwidth_gb_s * 1e3)) if total_us else 0.0
    return [_node(v, kernel, us, bandwidth, gpu) for kernel, us in zip(kernels, times_us, strict=True)]


def _node(v: int, kernel: Kernel, us: float, bandwidth: float, gpu: Gpu) -> Node:
    blocks = kernel.num_blocks
    if not blocks:
        return Node(v, kernel, us, 0, 0, 0, us, bandwidth)
    # A kernel of another GPU may ask for more than this one's multiprocessor has: it then holds one block.
    on_one = max(1, gpu.capacity.resident_blocks(kernel))
    most = min(blocks, on_one * gpu.multiprocessors)
    return Node(v, kernel, us, blocks, on_one, most, us / ceil(blocks / most), bandwidth)
