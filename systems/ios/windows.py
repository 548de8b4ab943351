"""Stages of a block that is too large to be searched whole, searched for in windows of it that overlap."""

from collections.abc import Callable, Sequence

WINDOW_TRANSITIONS = 60_000  # of one search at most: there are many
SMALLER = 0.75  # of the units of a window that is too much to search
Staged = tuple[list[list[int]], bool]  # the groups of a stage, of units by their numbers, and whether they are merged


def improve(
    stages: Sequence[Staged],
    most: int,
    cost: Callable[[Sequence[Staged]], float],
    solve: Callable[[tuple[int, ...]], list[Staged] | None],
) -> list[Staged]:
    """Stages that take no longer than `stages`, and in which no window can be done better. Not in IOS's paper.

    A window is a run of stages of at most `most` units together, as many as can be searched. cost: of a run of stages.
    solve: the best stages of the units of a window, ascending; None where they are too much to search. Each window begins
    half a window after the last; what improves one is looked at again with its neighbours, until nothing does.
    """
    found = list(stages)
    seen: set[tuple[int, ...]] = set()
    improved = True
    while improved:
        improved, first = False, 0
        while first < len(found):
            last, window = first, 0
            while last < len(found) and window + size(found[last]) <= most:
                window += size(found[last])
                last += 1
            while last - first > 1:
                units = tuple(sorted(i for stage in found[first:last] for i in members(stage)))
                if units in seen:
                    break
                better = solve(units)
                if better is not None:
                    seen.add(units)
                    if cost(better) < cost(found[first:last]):
                        found[first:last] = better
                        last = first + len(better)
                        improved = True
                    break
                fits = SMALLER * window
                while last - first > 1 and window > fits:
                    last -= 1
                    window -= size(found[last])
            if last == len(found):
                break
            half = first + 1
            while half < last and 2 * sum(map(size, found[first:half])) < window:
                half += 1
            first = half
    return found


def members(stage: Staged) -> list[int]:
    """The units of a stage."""
    return [i for group in stage[0] for i in group]


def size(stage: Staged) -> int:
    """The number of units of a stage."""
    return sum(map(len, stage[0]))
