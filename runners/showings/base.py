"""What a runner without records is. Adding one is a file in this folder and a file in conf/runner/.

A file of this folder imports torch within `show` alone, since only that runs in a cell's process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from results.cell import Cell, Choice
from runners.measurements.base import RunnerOptions, options_of
from runners.request.request import Request


class Showing(ABC):
    """Shows or writes something, and keeps no record.

    name: that of its file in conf/runner/.
    Options: a frozen dataclass. Its fields are keys of that file; it raises BadRequest for a wrong value.
    writes_output: it writes to the file output=...
    takes: the keys beside runner that it goes by; None for all. Another one would change nothing, and is refused.
    """

    name: ClassVar[str] = ""
    Options: ClassVar[type] = RunnerOptions
    writes_output: ClassVar[bool] = False
    takes: ClassVar[tuple[str, ...] | None] = None

    def __init__(self, runner: Choice):
        """Take the options from the runner's. Raises BadRequest for a wrong value."""
        self.options: object = options_of(self.Options, runner)

    @abstractmethod
    def run(self, request: Request) -> int:
        """Show what is asked for; returns the exit status. Runs in the process of the command line. Raises BadRequest."""

    def show(self, cell: Cell, visible_device: str, report: Callable[[str], None]) -> object:
        """Data for JSON, from a process of the cell's own; runners.cell.messages.Failed where there is none.

        Args:
            cell: what was asked for.
            visible_device: the device as NVML names it.
            report: told what is being done now.
        """
        raise NotImplementedError(f"runner={self.name} asks no cell's process")
