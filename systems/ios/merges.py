"""The merges that a search may choose by IOS's default units and groups, so that somebody can profile them before."""

from collections.abc import Iterator
from itertools import combinations

from systems.scheduling.graph.part import part, together
from systems.scheduling.graph.patterns import CONVOLUTIONS
from systems.scheduling.graph.program import Input, Output, Program
from systems.scheduling.graph.rewrite import replace
from systems.scheduling.plans.merge import merge, mergeable

from .units import find_units

Unit = tuple[int, ...]
MOST_UNITS = 8  # of a merge: as many as a stage has groups by default


def merge_candidates(program: Program) -> Iterator[tuple[Unit, ...]]:
    """All sets of 2 to MOST_UNITS units of convolutions that read one input and can run as one operator.

    A stage of more groups, as system.s=0 or one above MOST_UNITS allows, may merge others.
    """
    by_input: dict[object, list[Unit]] = {}
    for unit in find_units(program):
        first = program.calls[unit[0]]
        if first.function in CONVOLUTIONS:
            by_input.setdefault(first_input(program, unit[0]), []).append(unit)
    for units in by_input.values():
        for size in range(2, min(MOST_UNITS, len(units)) + 1):
            yield from (group for group in combinations(units, size) if mergeable(program, group))


def merged_operators(program: Program) -> Program | None:
    """One program of all distinct operators that merges of this program would make; None where there are none.

    Its operators read random inputs, and do not depend on each other.
    """
    distinct: dict[str, Program] = {}
    for units in merge_candidates(program):
        replacement = merge(program, units)
        assert replacement is not None, "units are mergeable"
        whole, place = replace(program, [replacement])
        v = place[replacement.operators[0]]
        distinct.setdefault(whole.signature(v), part(whole, [v]))
    return together(list(distinct.values())) if distinct else None


def first_input(program: Program, operator: int) -> object:
    """What the operator reads first, which units must share to be merged; the operator itself where it reads nothing."""
    return next((a for a in program.calls[operator].leaves() if isinstance(a, Output | Input)), operator)
