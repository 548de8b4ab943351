"""Which runners there are that keep no record."""

from functools import cache

from results.cell import Choice
from runners.discovery import classes_of

from .base import Showing

PACKAGE = __package__


@cache
def showings() -> dict[str, type[Showing]]:
    """All of them by name."""
    return classes_of(PACKAGE, Showing)  # type: ignore[type-abstract]


def is_showing(runner: Choice) -> bool:
    """Does this runner keep no record?"""
    return runner.name in showings()


def showing(runner: Choice) -> Showing:
    """The one of this name, with its options. Raises BadRequest as the options do, KeyError for another runner."""
    return showings()[runner.name](runner)
