"""What a rewriting pass is run with."""

from collections.abc import Callable
from dataclasses import dataclass

from systems.scheduling.decision import Decision
from systems.scheduling.graph.program import Program

Cost = Callable[[Program], float]  # milliseconds of a program
Rewritten = tuple[Program, list[Decision]]  # what a pass returns


def unchanged(program: Program) -> Program:
    return program


@dataclass(frozen=True)
class Context:
    """How a pass measures, and what else is switched on.

    Args:
        cost: milliseconds of a program, its operators one after the other.
        cost_at_once: milliseconds of a program of independent operators, each on a stream of its own.
        later: makes of a part of the program what the later passes will, as far as they measure nothing. A pass that fuses
            operators compares with that, since a later one may fuse what it leaves separate.
        switches: those that are on.
    """

    cost: Cost
    cost_at_once: Cost
    later: Callable[[Program], Program] = unchanged
    switches: frozenset[str] = frozenset()


def fastest(milliseconds: dict[str, float]) -> str:
    """The alternative that takes least; of equal ones the first, which is what is done without the pass."""
    return min(milliseconds, key=milliseconds.__getitem__)
