"""Quiet on a host of several lanes: while the systems of one lane take turns, no other lane computes, compiles or loads.

A graph of many streams takes longer beside what another lane compiles, though that has cores of its own. So rounds wait
until what other lanes measure is done, and whatever learns meanwhile stands still: its time is no result.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runners.cell.messages import Command, Learn, Round

from .cell_process import CellProcess

LOOK_SECONDS = 0.5  # between two looks at whether a lane that waits must end


class Quiet:
    """Shared by the lanes of one sweep; each calls it from a thread of its own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._learning: set[CellProcess] = set()
        self._num_working = self._num_waiting = 0
        self._is_quiet = False

    @contextmanager
    def work(self, process: CellProcess, command: Command, waits: Callable[[], object]) -> Iterator[None]:
        """Around one command. It begins when no lane has rounds, or waits for its own; a turn of rounds begins at once.

        Args:
            process: that does it.
            command: what it does.
            waits: called now and then while it has not begun; what it raises ends the wait.
        """
        if isinstance(command, Round):
            yield
            return
        is_learning = isinstance(command, Learn)
        with self._changed:
            self._wait(lambda: not self._is_quiet and not self._num_waiting, waits)
            if is_learning:
                self._learning.add(process)
            else:
                self._num_working += 1
        try:
            yield
        finally:
            with self._changed:
                if is_learning:
                    self._learning.discard(process)
                else:
                    self._num_working -= 1
                self._changed.notify_all()

    @contextmanager
    def rounds(self, waits: Callable[[], object]) -> Iterator[None]:
        """Around the rounds of one lane. waits: as of work."""
        with self._changed:
            self._num_waiting += 1
            try:
                self._wait(lambda: not self._is_quiet and not self._num_working, waits)
            finally:
                self._num_waiting -= 1
                self._changed.notify_all()
            self._is_quiet = True
            paused = list(self._learning)
        try:
            for process in paused:
                process.pause()
            yield
        finally:
            for process in paused:
                process.resume()
            with self._changed:
                self._is_quiet = False
                self._changed.notify_all()

    def _wait(self, is_due: Callable[[], bool], waits: Callable[[], object]) -> None:
        while not self._changed.wait_for(is_due, LOOK_SECONDS):
            waits()
