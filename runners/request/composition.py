"""Where what Hydra composes is gathered. Hydra returns nothing of its task's and its sweeper's to the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .request import Request

NULL = "null_alone"  # tags a sweep over null and nothing else: Hydra's choice(null) is an error


@dataclass
class Composition:
    """What one command line asks for.

    Args:
        requests: one a cell, in their order; none where Hydra was asked for something else.
        run_elsewhere: runs all of them through a launcher and returns the exit status; None where they run here.
    """

    requests: list[Request] = field(default_factory=list)
    run_elsewhere: Callable[[], int] | None = None


_open: list[Composition] = []


@contextmanager
def composing() -> Iterator[Composition]:
    """A composition that is open within."""
    _open.append(Composition())
    try:
        yield _open[-1]
    finally:
        _open.pop()


def current() -> Composition:
    """The one that is open."""
    return _open[-1]
