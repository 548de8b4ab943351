"""What the simulator says: when each kernel of a schedule ran, and on how many blocks."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .kernels import Kernels

Column: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Batch(NamedTuple):
    """Blocks of one kernel that began and ended together.

    Args:
        node: The kernel's.
        blocks: That were resident at once; 0 of a copy.
        waves: How many of that size followed each other.
        begin_us, end_us: From the beginning of the launch.
    """

    node: int
    blocks: int
    waves: int
    begin_us: float
    end_us: float


@dataclass(frozen=True)
class Timeline:
    """One replay of a schedule.

    Args:
        kernels: Of its program.
        begins_us, ends_us: Of each node, from the beginning of the launch.
        latency_us: Of the whole, the launch included.
        columns: Of all batches each field of `Batch`, in the order in which they began; and their order of ending.
    """

    kernels: Kernels
    begins_us: tuple[float, ...]
    ends_us: tuple[float, ...]
    latency_us: float
    columns: tuple[Column, ...] = field(compare=False, repr=False)

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """In the order in which they ended."""
        *columns, end_order = self.columns
        return tuple(map(Batch._make, zip(*(column[end_order].tolist() for column in columns), strict=True)))

    @cached_property
    def operator_spans_us(self) -> dict[int, tuple[float, float]]:
        """(begin, end) of each operator that launches something."""
        spans: dict[int, tuple[float, float]] = {}
        for node, begin, end in zip(self.kernels.nodes, self.begins_us, self.ends_us, strict=True):
            earliest, latest = spans.get(node.operator, (begin, end))
            spans[node.operator] = min(earliest, begin), max(latest, end)
        return spans
