"""Blocks: parts of a model that are scheduled one after the other, derived from the graph itself (IOS, Section 4.2)."""

from collections.abc import Sequence
from dataclasses import dataclass

from systems.scheduling.graph.operator_graph import Operator, OperatorGraph


@dataclass(frozen=True)
class Blocks:
    """How a graph of units is cut.

    Args:
        parts: the units of each part, in the order of execution, covering all units.
        cuts: the articulation points.
        splits: how many times a block larger than `max_part_size` was split.
    """

    parts: tuple[tuple[int, ...], ...]
    cuts: tuple[int, ...]
    splits: int

    @property
    def blocks(self) -> list[list[tuple[int, ...]]]:
        """The parts of each block, one where it was not split."""
        blocks: list[list[tuple[int, ...]]] = [[]]
        for part in self.parts:
            blocks[-1].append(part)
            if not set(part).isdisjoint(self.cuts):  # a cut is the last unit of its block
                blocks.append([])
        return [block for block in blocks if block]


def unit_graph(graph: OperatorGraph, units: Sequence[Sequence[int]]) -> OperatorGraph:
    """The dependencies between units, which are numbered by their places in `units`.

    Raises:
        ValueError: a unit depends on one that comes after it.
    """
    place = {v: i for i, unit in enumerate(units) for v in unit}
    predecessors = []
    for i, unit in enumerate(units):
        before = sorted({place[u] for v in unit for u in graph.predecessors[v]} - {i})
        if before and before[-1] > i:
            raise ValueError(f"unit {i} depends on unit {before[-1]}, which comes after it")
        predecessors.append(before)
    return _graph_of_units(predecessors)


def subgraph(units: OperatorGraph, block: Sequence[int]) -> OperatorGraph:
    """The dependencies within a block of units, which are numbered by their places in it."""
    place = {v: i for i, v in enumerate(block)}
    return _graph_of_units([[place[u] for u in units.predecessors[v] if u in place] for v in block])


def find_blocks(units: OperatorGraph, max_part_size: int) -> Blocks:
    """Cut a graph of units into blocks.

    Invariant: no unit of a part depends on a unit of a later part.

    A cut is a unit that depends on, or is needed by, every other one. All paths lead through it, so no unit before it can
    run beside one after it, and cutting there loses nothing. It ends the block before it. A block of more than
    `max_part_size` units is split at the unit that the fewest units of the block can run beside; of equal ones at the unit
    that splits most evenly. That unit and all that it depends on come first.

    Args:
        units: the dependencies between units.
        max_part_size: most units of a part.
    """
    n = len(units)
    before, after = units.ancestors, units.descendants
    cuts = [v for v in range(n) if before[v].bit_count() + after[v].bit_count() == n - 1]
    parts, rest = [], (1 << n) - 1  # sets of units as bit masks
    for v in sorted(cuts, key=lambda v: before[v].bit_count()):
        block = (before[v] | 1 << v) & rest
        parts.append(block)
        rest &= ~block
    if rest:
        parts.append(rest)
    small_parts, splits = [], 0
    while parts:
        part = parts.pop(0)
        if part.bit_count() <= max_part_size:
            small_parts.append(_members(part))
            continue
        size = part.bit_count()

        def price(v: int, part: int = part, size: int = size) -> tuple[int, int]:
            """(number of units that can run beside v, how uneven the split is)"""
            first = (before[v] & part).bit_count() + 1
            beside = size - first - (after[v] & part).bit_count()
            return beside, abs(size - 2 * first)

        candidates = [v for v in _members(part) if 0 < (before[v] & part).bit_count() + 1 < size]
        v = min(candidates, key=price)
        first = (before[v] | 1 << v) & part
        parts[:0] = [first, part & ~first]
        splits += 1
    return Blocks(tuple(small_parts), tuple(cuts), splits)


def _graph_of_units(predecessors: Sequence[Sequence[int]]) -> OperatorGraph:
    return OperatorGraph([Operator(i, "unit", "unit") for i in range(len(predecessors))], predecessors)


def _members(part: int) -> tuple[int, ...]:
    return tuple(v for v in range(part.bit_length()) if part >> v & 1)
