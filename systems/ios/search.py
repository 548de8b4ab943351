"""IOS's dynamic programme over the stages of one block (IOS, Section 4, Algorithm 1)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from .endings import enumerate_endings

StageCost = Callable[[int, tuple[int, ...]], float]


@dataclass
class Counts:
    """states: the sets of operators that were scheduled. transitions: pairs of such a set and an ending of it. schedules:
    how many different ones that covers.
    """

    states: int = 0
    transitions: int = 0
    schedules: int = 0


@dataclass
class Found:
    """The best schedule of a block: its stages, first to last, each a tuple of groups as bit masks; its cost."""

    stages: list[tuple[int, ...]]
    cost: float
    counts: Counts = field(default_factory=Counts)


def find_schedule(
    predecessors: Sequence[Sequence[int]], cost: StageCost, r: int | None = None, s: int | None = None
) -> Found:
    """The stages of least total cost, exactly (IOS, Algorithm 1): cost[S] = min over endings S' of cost[S - S'] + cost(S').

    predecessors: of each operator of the block, within it; topological. cost(ending, groups): of a stage, as the bit mask of
    its operators and those of its groups; asked once for each; infinite where it must not be. r, s: an ending has at most s
    groups of at most r operators each (Section 4.3), None for no such limit. Raises ValueError where no schedule has a
    finite cost, and TooManyTransitions for a block that is too wide.
    """
    endings = enumerate_endings(tuple(tuple(p) for p in predecessors), r, s)
    costs = np.array([cost(e, groups) for e, groups in zip(endings.endings, endings.groups, strict=True)], dtype=float)
    count = len(endings.states)
    best, last, schedules = np.zeros(count), np.zeros(count, np.int64), [1] + [0] * (count - 1)
    # What remains of a state has a smaller place, so that it is solved by now and nothing has to be looked up by recursion.
    for state in range(1, count):
        ending, rest = endings.of(state)
        totals = best[rest] + costs[ending]
        least = int(totals.argmin())
        best[state], last[state] = totals[least], endings.first[state] + least
        schedules[state] = sum(map(schedules.__getitem__, rest.tolist()))
    if best[-1] == inf:
        raise ValueError("no schedule has a finite cost")
    stages = []
    state = count - 1
    while state:
        stages.append(endings.groups[endings.ending[last[state]]])
        state = int(endings.rest[last[state]])
    return Found(stages[::-1], float(best[-1]), Counts(count - 1, len(endings.rest), schedules[-1]))
