"""IOS's dynamic programme over the stages of one block (IOS, Section 4, Algorithm 1)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

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
    its operators and those of its groups; infinite where it must not be. r, s: an ending has at most s groups of at most r
    operators each (Section 4.3), None for no such limit. Raises ValueError where no schedule has a finite cost.
    """
    search = _Search(predecessors, cost, r, s)
    whole = (1 << len(predecessors)) - 1
    least = search.solve(whole)
    if least == inf:
        raise ValueError("no schedule has a finite cost")
    stages = []
    remaining = whole
    while remaining:
        stages.append(search.last[remaining])
        remaining &= ~_union(stages[-1])
    counts = Counts(len(search.best) - 1, search.transitions, search.schedules[whole])
    return Found(stages[::-1], least, counts)


class _Search:
    def __init__(self, predecessors: Sequence[Sequence[int]], cost: StageCost, r: int | None, s: int | None):
        n = len(predecessors)
        self.cost = cost
        self.r, self.s = min(r or n, n), min(s or n, n)
        self.successors = [0] * n
        self.before = [0] * n  # all that an operator depends on, directly or not
        self.linked = [0] * n  # direct neighbours
        for v, producers in enumerate(predecessors):
            for u in producers:
                self.successors[u] |= 1 << v
                self.before[v] |= self.before[u] | 1 << u
                self.linked[u] |= 1 << v
                self.linked[v] |= 1 << u
        self.limited = r is not None or s is not None
        if self.limited:
            groups = sorted(self._connected())
            outside = [self._after(g) & ~g for g in groups]
            self.many = n > 64  # beyond what a machine word holds
            kind = object if self.many else np.uint64
            self.groups, self.outside = np.array(groups, dtype=kind), np.array(outside, dtype=kind)
        self.best: dict[int, float] = {0: 0.0}
        self.last: dict[int, tuple[int, ...]] = {}
        self.schedules: dict[int, int] = {0: 1}
        self.transitions = 0
        self.kept: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # endings of states that wait for smaller ones

    def solve(self, state: int) -> float:
        """The least cost of `state`, a set of operators that holds all that they depend on."""
        # No recursion: a block may be a chain of any length.
        waiting = [state]
        while waiting:
            at = waiting[-1]
            if at in self.best:
                waiting.pop()
                continue
            endings = self._endings_of(at)
            missing = [at & ~e for e, _ in endings if at & ~e not in self.best]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            least, schedules = inf, 0
            last: tuple[int, ...] = ()
            for ending, groups in endings:
                total = self.best[at & ~ending] + self.cost(ending, groups)
                schedules += self.schedules[at & ~ending]
                if total < least:
                    least, last = total, groups
            self.transitions += len(endings)
            self.best[at], self.last[at], self.schedules[at] = least, last, schedules
            self.kept.pop(at, None)
        return self.best[state]

    def _endings_of(self, state: int) -> list[tuple[int, tuple[int, ...]]]:
        if state not in self.kept:
            self.kept[state] = list(self._limited(state) if self.limited else self._unlimited(state))
        return self.kept[state]

    def _limited(self, state: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Endings of at most s groups of at most r.

        A group of an ending holds every successor of its operators in the state, and so is an ending by itself; and groups
        that are endings and share no operator are not linked. So the endings are the sets of disjoint connected ones.
        """
        if self.many:
            inside = [not g & ~state and not o & state for g, o in zip(self.groups, self.outside, strict=True)]
        else:
            word = np.uint64(state)
            inside = ((self.groups & ~word) == 0) & ((self.outside & word) == 0)
        groups: list[int] = self.groups[inside].tolist()
        count, most = len(groups), self.s
        stack: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
        while stack:
            start, taken, chosen = stack.pop()
            for i in range(start, count):
                g = groups[i]
                if g & taken:
                    continue
                more = (*chosen, g)
                yield taken | g, more
                if len(more) < most:
                    stack.append((i + 1, taken | g, more))

    def _unlimited(self, state: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Every ending, each once: an operator is taken, or left with all that it depends on."""
        stack = [(state, 0)]
        while stack:
            open_, taken = stack.pop()
            # The last in the order of capture: whatever reads it has been taken or is not in the state.
            while open_:
                v = open_.bit_length() - 1
                open_ &= ~(1 << v)
                if self.successors[v] & state & ~taken:
                    continue
                stack.append((open_ & ~self.before[v], taken))
                taken |= 1 << v
            if taken:
                yield taken, self._components(taken)

    def _components(self, operators: int) -> tuple[int, ...]:
        groups = []
        while operators:
            group = operators & -operators
            frontier = group
            while frontier:
                v = frontier.bit_length() - 1
                frontier &= ~(1 << v)
                new = self.linked[v] & operators & ~group
                group |= new
                frontier |= new
            groups.append(group)
            operators &= ~group
        return tuple(groups)

    def _connected(self) -> set[int]:
        """Every connected set of at most r operators that can be a group: it holds all that lies between its operators."""
        found: set[int] = set()
        layer = {1 << v for v in range(len(self.successors))}
        for _ in range(self.r):
            found |= layer
            layer = {g | 1 << v for g in layer for v in _bits(self._around(g) & ~g)}
        return {g for g in found if not self._between(g)}

    def _around(self, group: int) -> int:
        return _union(self.linked[v] for v in _bits(group))

    def _after(self, group: int) -> int:
        return _union(self.successors[v] for v in _bits(group))

    def _between(self, group: int) -> int:
        """What lies on a path out of the group and back into it."""
        outside = self._after(group) & ~group
        return outside & _union(self.before[v] for v in _bits(group))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        v = (mask & -mask).bit_length() - 1
        mask &= mask - 1
        yield v


def _union(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union
