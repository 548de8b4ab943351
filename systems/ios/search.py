"""IOS's dynamic programme over the stages of one block (IOS, Section 4, Algorithm 1)."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

import numpy as np

from .endings import MOST_TRANSITIONS, Array, Endings, enumerate_endings

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
    predecessors: Sequence[Sequence[int]],
    cost: StageCost,
    r: int | None = None,
    s: int | None = None,
    at_once: Callable[[tuple[int, ...]], bool] | None = None,
    alike: Callable[[tuple[int, ...]], Hashable] = lambda groups: groups,
    most: int = MOST_TRANSITIONS,
) -> Found:
    """The stages of least total cost, exactly (IOS, Algorithm 1): cost[S] = min over endings S' of cost[S - S'] + cost(S').

    predecessors: of each operator of the block, within it; topological. cost(ending, groups): of a stage, as the bit mask of
    its operators and those of its groups; asked at most once for each; infinite where it must not be. r, s: an ending has at
    most s groups of at most r operators each (Section 4.3), None for no such limit.

    at_once: given where no stage costs less than a part of it, but for stages whose groups it says yes to. Those, and all of
    one group, are asked for; of the others only the ones that may be a part of the best schedule, which stays the same.
    alike: stages whose groups it gives the same for cost the same, so that one of them tells of all.

    Raises ValueError where no schedule has a finite cost, and TooManyTransitions for a block that has more than `most`.
    """
    endings = enumerate_endings(tuple(tuple(p) for p in predecessors), r, s, most)
    costs = _Costs(endings, cost)
    if at_once is None:
        costs.ask_all()
    else:
        costs.compare(alike)
        costs.ask(i for i, groups in enumerate(endings.groups) if len(groups) == 1 or at_once(groups))
    while True:
        stages, least = _best(endings, costs.least)
        if least == inf:
            raise ValueError("no schedule has a finite cost")
        if not (unknown := [i for i in stages if not costs.known[i]]):
            break
        costs.ask(unknown)
    counts = Counts(len(endings.states) - 1, len(endings.rest), endings.schedules)
    return Found([endings.groups[i] for i in stages], least, counts)


class _Costs:
    """What the endings of a block cost at least. What is known of one is known of those like it, and bounds all that hold
    one of them.
    """

    def __init__(self, endings: Endings, cost: StageCost):
        self.endings, self.cost = endings, cost
        self.least = np.zeros(len(endings.groups))
        self.known = np.zeros(len(endings.groups), dtype=bool)

    def ask_all(self) -> None:
        given = zip(self.endings.endings.tolist(), self.endings.groups, strict=True)
        self.least[:] = [self.cost(ending, groups) for ending, groups in given]
        self.known[:] = True

    def compare(self, alike: Callable[[tuple[int, ...]], Hashable]) -> None:
        classes: dict[Hashable, list[int]] = {}
        self.like = [classes.setdefault(alike(groups), []) for groups in self.endings.groups]
        for i, members in enumerate(self.like):
            members.append(i)

    def ask(self, places: Iterable[int]) -> None:
        """Ask for some, and with each raise what it bounds."""
        for i in places:
            if self.known[i]:
                continue
            found = self.cost(int(self.endings.endings[i]), self.endings.groups[i])
            self.least[self.like[i]], self.known[self.like[i]] = found, True
            for ending in self.endings.endings[self.like[i]]:
                holding = ((self.endings.endings & ending) == ending) & ~self.known
                self.least[holding] = np.maximum(self.least[holding], found)


def _best(endings: Endings, costs: Array) -> tuple[list[int], float]:
    """The endings (their places) that make the cheapest schedule, first to last, and what it costs.

    All states of one size at once: what remains of a state is smaller, and solved by then.
    """
    best = np.zeros(len(endings.states))
    for start, end in pairwise(endings.levels[1:]):
        a, b = endings.first[start], endings.first[end]
        totals = best[endings.rest[a:b]] + costs[endings.ending[a:b]]
        best[start:end] = np.minimum.reduceat(totals, endings.first[start:end] - a)
    stages: list[int] = []
    state = len(endings.states) - 1
    while state:
        a, b = endings.first[state], endings.first[state + 1]
        last = a + int(np.argmin(best[endings.rest[a:b]] + costs[endings.ending[a:b]]))
        stages.append(int(endings.ending[last]))
        state = int(endings.rest[last])
    return stages[::-1], float(best[-1])
