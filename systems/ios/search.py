"""IOS's dynamic programme over the stages of one block (IOS, Section 4, Algorithm 1)."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import inf
from statistics import median

import numpy as np

from .endings import MAX_TRANSITIONS, Array, Endings, enumerate_endings

LEAST_RATIOS = 16  # stages measured, before bounds follow them
Groups = tuple[int, ...]  # of a stage, each a bit mask of operators
StageCost = Callable[[int, Groups], float]


@dataclass
class Counts:
    """The size of a search.

    Args:
        states: sets of operators that were scheduled.
        transitions: pairs of a state and an ending of it.
        schedules: different schedules that these cover.
    """

    states: int = 0
    transitions: int = 0
    schedules: int = 0


@dataclass
class BlockSchedule:
    """The best schedule of a block.

    Args:
        stages: first to last.
        cost: of all stages together.
        counts: the size of the search.
    """

    stages: list[Groups]
    cost: float
    counts: Counts = field(default_factory=Counts)


@dataclass
class Estimates:
    """What stages cost by something that measures none of them.

    Args:
        of: gives the estimate of a stage, by its groups.
        margin: share of an estimate by which it may lie above the cost.
        ratios: cost over estimate of each stage that was measured, over all searches of a model. Estimates err alike: bounds
            follow the median.
    """

    of: Callable[[Groups], float]
    margin: float = 0.0
    ratios: list[float] = field(default_factory=list)

    @property
    def factor(self) -> float:
        """That makes a bound of an estimate."""
        return (1 - self.margin) * (median(self.ratios) if len(self.ratios) >= LEAST_RATIOS else 1.0)


def find_schedule(
    predecessors: Sequence[Sequence[int]],
    cost: StageCost,
    r: int | None = None,
    s: int | None = None,
    measure_eagerly: Callable[[Groups], bool] | None = None,
    cost_class: Callable[[Groups], Hashable] = lambda groups: groups,
    max_transitions: int = MAX_TRANSITIONS,
    estimates: Estimates | None = None,
    one_head: bool = False,
) -> BlockSchedule:
    """The stages of least total cost, exactly: cost[S] = min over endings S' of S of cost[S - S'] + cost(S').

    Invariant: `least` is a lower bound of every stage's cost, and exact for a stage that was measured. The programme runs
    over lower bounds, and measures the stages of the schedule that wins. It ends when all of them were measured before:
    no other schedule can cost less, since every other cost is a lower bound too.

    Args:
        predecessors: of each operator of the block, within the block; topological.
        cost: of a stage, by the bit mask of its operators and its groups; infinite where the stage must not be.
        r: most operators of a group (Section 4.3); None for no limit.
        s: most groups of a stage; None for no limit.
        measure_eagerly: enables pruning. A stage is assumed to take at least as long as any part of it whose groups lie in
            different groups of the stage. So a stage is measured only if its lower bound could still win. Return True for
            stages that break this assumption, such as merged convolutions. The result does not change. None: every stage is
            measured.
        cost_class: equal for stages of equal cost, of which one is measured.
        max_transitions: of a block that is searched.
        estimates: of stages' costs. Each, times the factor, stands for a lower bound until its stage is measured. Nothing is
            measured eagerly then, and the result is too long by no more than the share by which a bound exceeds its cost.
        one_head: only stages whose groups each start from one operator (`enumerate_endings`).

    Raises:
        ValueError: no schedule has a finite cost.
        TooManyTransitions: the block has more than `max_transitions`.
    """
    endings = enumerate_endings(tuple(tuple(p) for p in predecessors), r, s, max_transitions, one_head)
    costs = _Costs(endings, cost)
    if estimates is not None:
        costs.classify(cost_class)
        costs.estimate(estimates)
    elif measure_eagerly is None:
        costs.measure_all()
    else:
        costs.classify(cost_class)
        costs.measure(i for i, groups in enumerate(endings.groups) if len(groups) == 1 or measure_eagerly(groups))
    while True:
        stages, total = _best(endings, costs.least)
        if total == inf:
            raise ValueError("no schedule has a finite cost")
        unmeasured = [i for i in stages if not costs.is_measured[i]]
        if not unmeasured:
            break
        costs.measure(unmeasured)
    counts = Counts(len(endings.states) - 1, len(endings.rest), endings.schedules)
    return BlockSchedule([endings.groups[i] for i in stages], total, counts)


class _Costs:
    """Lower bounds of what the endings of a block cost, by their places in `endings`."""

    def __init__(self, endings: Endings, cost: StageCost):
        self.endings, self.cost = endings, cost
        self.least = np.zeros(len(endings.groups))
        self.is_measured = np.zeros(len(endings.groups), dtype=bool)
        self.class_members: list[list[int]] = []  # of each ending, the endings of equal cost
        self.estimates: Estimates | None = None
        self.estimated = np.zeros(0)  # what they give, of each ending

    @cached_property
    def _groups(self) -> Array:
        """A row for each ending: its groups, and 0 up to the most groups of any."""
        most = max(map(len, self.endings.groups))
        rows = [groups + (0,) * (most - len(groups)) for groups in self.endings.groups]
        return np.array(rows, self.endings.endings.dtype)

    def measure_all(self) -> None:
        stages = zip(self.endings.endings.tolist(), self.endings.groups, strict=True)
        self.least[:] = [self.cost(ending, groups) for ending, groups in stages]
        self.is_measured[:] = True

    def classify(self, cost_class: Callable[[Groups], Hashable]) -> None:
        classes: dict[Hashable, list[int]] = {}
        self.class_members = [classes.setdefault(cost_class(groups), []) for groups in self.endings.groups]
        for i, members in enumerate(self.class_members):
            members.append(i)

    def estimate(self, estimates: Estimates) -> None:
        """Take estimates for lower bounds."""
        self.estimates = estimates
        self.estimated = np.array([estimates.of(groups) for groups in self.endings.groups])
        self.least = self.estimated * estimates.factor

    def measure(self, places: Iterable[int]) -> None:
        """Measure some endings, and raise the bounds of all endings that hold one of them with its groups apart."""
        for i in places:
            if self.is_measured[i]:
                continue
            measured = self.cost(int(self.endings.endings[i]), self.endings.groups[i])
            equal = self.class_members[i]
            self.least[equal], self.is_measured[equal] = measured, True
            if self.estimates is not None:
                if 0 < self.estimated[i] < inf and measured < inf:
                    self.estimates.ratios.append(measured / float(self.estimated[i]))
                continue
            for ending in self.endings.endings[equal]:
                holds = ((self.endings.endings & ending) == ending) & ~self.is_measured
                holding = np.flatnonzero(holds & (self.least < measured))
                are_apart = ((self._groups[holding] & ending) != 0).sum(axis=1) == len(self.endings.groups[i])
                self.least[holding[are_apart]] = measured
        if self.estimates is not None:
            self.least[~self.is_measured] = self.estimated[~self.is_measured] * self.estimates.factor


def _best(endings: Endings, costs: Array) -> tuple[list[int], float]:
    """The endings (by place) that make the cheapest schedule, first to last, and what it costs.

    Invariant: `best[i]` is the least cost of state i once its size has had its turn. All states of one size are solved at
    once, since what an ending leaves of a state is smaller.
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
