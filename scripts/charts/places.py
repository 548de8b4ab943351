"""Which systems get a place of their own beside a model, where many were not measured."""

from collections.abc import Callable, Sequence

from conf.text import counted
from results.cell import Choice
from results.selection import NOT_MEASURED

FEW = 3  # systems that were not measured and have a place all the same
ABSENT = "Beside a model, a system without a {} was not measured."  # under a narrow chart, which has no room for words


def places(systems: Sequence[Choice], empty: Callable[[Choice], bool], few: int = FEW) -> tuple[list[Choice], str]:
    """The systems with a place, in their order, and words for the others; "" where all have one.

    In the records of several sweeps most systems can be empty beside a model, and would leave no room for the others.

    Args:
        systems: all of a chart.
        empty: whether a system has nothing to show but that it was not measured.
        few: so many of these have a place all the same.
    """
    lacking = [system for system in systems if empty(system)]
    if len(lacking) <= few:
        return list(systems), ""
    return [system for system in systems if system not in lacking], f"{counted(len(lacking), 'other')} {NOT_MEASURED}"
