"""What a showing asks of a cell's process, and where it writes the answer."""

import gzip
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from results.cell import Cell
from results.store import write_json
from runners.cell.messages import Failed, Refused, Show, Shown
from runners.checks import BadRequest, check_writable, existing_part, not_writable
from runners.machine.device import visible
from runners.request.request import Request, SweepOptions
from runners.sweep.cell_process import CellProcess
from runners.sweep.progress import SILENCE

BAD_REQUEST = 2
Document = Mapping[str, Any]  # as JSON has it


def ask(cell: Cell, options: SweepOptions, timeout: float | None = None, gpus: str | None = None) -> Shown | Failed:
    """What the cell's runner shows, from a process of its own.

    timeout: seconds, those of the options if None. gpus: those that it sees, the first of the options if None.

    Raises BadRequest for what only the model or the system could tell.
    """
    process = CellProcess(cell.device, gpus or visible((options.gpus or (0,))[0]))
    try:
        with _told(cell.runner.name) as phase:
            answer = process.ask(Show(cell), timeout or options.timeout, options.memory_gib, phase)
    finally:
        process.close()
    if isinstance(answer, Refused):
        raise BadRequest(answer.reason)
    assert isinstance(answer, Shown | Failed)
    return answer


@contextmanager
def _told(what: str) -> Iterator[Callable[[str], object]]:
    """What says the phase: on a terminal a line that changes, elsewhere one in ten seconds, as a sweep has it."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("starting") as status:
            yield status.update
        return
    begin, ended, phases = time.monotonic(), threading.Event(), ["starting"]

    def tell() -> None:
        while not ended.wait(SILENCE):
            line = f"{what}: {phases[-1]}, {time.monotonic() - begin:.0f} s"
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield phases.append
    finally:
        ended.set()
        teller.join()


def tell(failed: Failed, cell: Cell) -> None:
    """Print why a cell has nothing to show."""
    what = f"{cell.system.choice} on {cell.model.choice}"
    print(f"opweave: {what}: {failed.status}: {failed.reason}", file=sys.stderr)


def exit_status(failures: Sequence[Failed], is_without_file: bool) -> int:
    """1 where a cell failed; else 2 where a file was asked for and no cell had anything to write to it."""
    if any(failed.status != "unsupported" for failed in failures):
        return 1
    return BAD_REQUEST if is_without_file else 0


def check_output(output: Path | None) -> None:
    """Raise BadRequest unless the file can be written, in a folder that is there or could be made."""
    if output is None:
        return
    if existing_part("output", output) == output and not output.is_file():
        raise BadRequest(f"output={output} is {'a folder' if output.is_dir() else 'a device'}, not a file")
    check_writable(output.parent, "output")


def write_answer(request: Request, line: Callable[[Document], str]) -> int:
    """Write what the first cell's runner shows of a GPU, and print a line about the file; returns the exit status.

    Args:
        line: Of what was written.

    Raises BadRequest for a cell on a CPU, and as `ask` and `write` do.
    """
    output, cell = request.options.output, request.cells[0]
    if cell.device != "cuda":
        raise BadRequest(f"runner={cell.runner.name} measures the kernels of a GPU: device={cell.device} has none")
    check_output(output)
    answer = ask(cell, request.options)
    if isinstance(answer, Failed):
        tell(answer, cell)
        return exit_status([answer], output is not None)
    assert isinstance(answer.document, dict)
    if write(output, answer.document):
        print(f"{output}: {line(answer.document)}")
    return 0


def write(output: Path | None, document: object) -> bool:
    """Write to the file, whose folder is made, or to standard output for None; .gz at its name's end compresses it.

    Returns whether it was to the file. Raises BadRequest.
    """
    if output is None:
        json.dump(document, sys.stdout, indent=1)
        print()
        return False
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.suffix == ".gz":
            output.write_bytes(gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0))
        else:
            write_json(output, document)
    except OSError as error:
        raise not_writable("output", output, error) from error
    return True
