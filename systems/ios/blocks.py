"""Blocks: parts of a model that are scheduled one after the other, found from the graph itself (IOS, Section 4.2)."""

from collections.abc import Sequence
from dataclasses import dataclass

from systems.scheduling.graph.operator_graph import OperatorGraph


@dataclass(frozen=True)
class Blocks:
    """parts: the units of each block, in the order of execution, covering all units. cuts: articulation points. splits: how
    many times a block was split where there is no such point, for being larger than `max_part_size`.
    """

    parts: tuple[tuple[int, ...], ...]
    cuts: tuple[int, ...]
    splits: int

    @property
    def blocks(self) -> list[list[tuple[int, ...]]]:
        """The parts of each block, one where it was not split."""
        found: list[list[tuple[int, ...]]] = [[]]
        for part in self.parts:
            found[-1].append(part)
            if not set(part).isdisjoint(self.cuts):  # a cut is the last unit of its block
                found.append([])
        return [block for block in found if block]


def unit_graph(graph: OperatorGraph, units: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """For each unit those that it depends on directly, by their places in `units`. Raises ValueError for a forward one."""
    place = {v: i for i, unit in enumerate(units) for v in unit}
    predecessors = []
    for i, unit in enumerate(units):
        before = sorted({place[u] for v in unit for u in graph.predecessors[v]} - {i})
        if before and before[-1] > i:
            raise ValueError(f"unit {i} depends on unit {before[-1]}, which comes after it")
        predecessors.append(tuple(before))
    return predecessors


def find_blocks(predecessors: Sequence[Sequence[int]], max_part_size: int) -> Blocks:
    """Cut a DAG of units, given by the direct predecessors of each in topological order, into blocks.

    A cut is a unit that depends on, or is needed by, every other one: all paths lead through it, so no unit before it can
    run beside one after it, and cutting there loses nothing. It ends the block before it. A block of more than
    `max_part_size` units without a cut inside is split at the unit that the fewest of the block can run beside, the most
    even split of those: the unit and all that it depends on come first.
    """
    n = len(predecessors)
    before = [0] * n
    for v, producers in enumerate(predecessors):
        for u in producers:
            before[v] |= before[u] | 1 << u
    after = [0] * n
    for v in reversed(range(n)):
        for u in predecessors[v]:
            after[u] |= after[v] | 1 << v
    cuts = [v for v in range(n) if before[v].bit_count() + after[v].bit_count() == n - 1]
    parts, left = [], (1 << n) - 1
    for v in sorted(cuts, key=lambda v: before[v].bit_count()):
        block = (before[v] | 1 << v) & left
        parts.append(block)
        left &= ~block
    if left:
        parts.append(left)
    finished, splits = [], 0
    while parts:
        part = parts.pop(0)
        if part.bit_count() <= max_part_size:
            finished.append(_units(part))
            continue
        size = part.bit_count()

        def price(v: int, part: int = part, size: int = size) -> tuple[int, int]:
            first = (before[v] & part).bit_count() + 1
            beside = size - first - (after[v] & part).bit_count()
            return beside, abs(size - 2 * first)

        candidates = [v for v in _units(part) if 0 < (before[v] & part).bit_count() + 1 < size]
        v = min(candidates, key=price)
        first = (before[v] | 1 << v) & part
        parts[:0] = [first, part & ~first]
        splits += 1
    return Blocks(tuple(finished), tuple(cuts), splits)


def _units(part: int) -> tuple[int, ...]:
    return tuple(v for v in range(part.bit_length()) if part >> v & 1)
