"""Better stages for a block that is too large to be searched whole, from windows of it that overlap. Not in IOS's paper."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

WINDOW_TRANSITIONS = 60_000  # of one search at most: there are many searches
SMALLER = 0.75  # of the units of a window that has too many transitions


@dataclass(frozen=True)
class UnitStage:
    """A stage of schedule units.

    Args:
        groups: of units by their numbers, ascending; the groups run at once.
        is_merged: all units run as one operator instead; each is a group.
    """

    groups: tuple[tuple[int, ...], ...]
    is_merged: bool = False

    @property
    def units(self) -> tuple[int, ...]:
        return tuple(i for group in self.groups for i in group)

    def __len__(self) -> int:
        """The number of its units."""
        return sum(map(len, self.groups))


def improve(
    stages: Sequence[UnitStage],
    max_units: int,
    cost: Callable[[Sequence[UnitStage]], float],
    solve: Callable[[tuple[int, ...]], list[UnitStage] | None],
) -> list[UnitStage]:
    """Stages in which no window can be done better.

    Invariant: the total cost never rises. A window is a run of stages of at most `max_units` units together, as many as can
    be searched; the best stages of its units take its place if they cost less. Each window begins half a window after the
    last one. Rounds go on until one changes nothing; no window is searched twice.

    Args:
        stages: to begin with.
        max_units: of a window.
        cost: of a run of stages.
        solve: the best stages of a window's units, which are ascending; None where they have too many transitions.
    """
    result = list(stages)
    solved: set[tuple[int, ...]] = set()  # units of the windows that were searched
    has_improved = True
    while has_improved:
        has_improved, first = False, 0
        while first < len(result):
            last, window = first, 0  # stages first:last hold `window` units
            while last < len(result) and window + len(result[last]) <= max_units:
                window += len(result[last])
                last += 1
            while last - first > 1:
                units = tuple(sorted(i for stage in result[first:last] for i in stage.units))
                if units in solved:
                    break
                better = solve(units)
                if better is not None:
                    solved.add(units)
                    if cost(better) < cost(result[first:last]):
                        result[first:last] = better
                        last = first + len(better)
                        has_improved = True
                    break
                smaller = SMALLER * window
                while last - first > 1 and window > smaller:
                    last -= 1
                    window -= len(result[last])
            if last == len(result):
                break
            half = first + 1
            while half < last and 2 * sum(map(len, result[first:half])) < window:
                half += 1
            first = half
    return result
