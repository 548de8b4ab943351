"""Standard output, as tables are printed to it."""

from typing import Any

from rich.console import Console


class Terminal(Console):
    """Prints texts as they stand, and raises BrokenPipeError where nobody reads them, as `print` does.

    Rich's own would end the program there, with the status of a cell that failed.
    """

    def __init__(self, **settings: Any):
        super().__init__(markup=False, **settings)

    def on_broken_pipe(self) -> None:
        raise
