"""The runners that measure nothing: `schedule` writes a schedule file, `list` shows what there is."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from results.store import write_json

from . import environment
from .bad_request import BadRequest
from .cell_process import CellProcess
from .device import visible
from .requests import check_writable, print_json

CATALOGUE = environment.ROOT / "results" / "cache"


def run_schedule(cell: dict[str, Any], output: str | None, timeout: float) -> int:
    """Write the cell's schedule to the file `output`, or to standard output. Raises BadRequest."""
    if output is not None:
        path = Path(output)
        if path.exists() and not path.is_file():
            raise BadRequest(f"output={output} is {'a folder' if path.is_dir() else 'a device'}, not a file")
        if not path.parent.exists():
            raise BadRequest(f"output={output} is in a folder that is not there")
        check_writable(path.parent, "output")
    answer = _ask("schedule", cell, timeout)
    if answer.get("status") == "unsupported":
        print(f"opweave: {cell['system']['name']} on {cell['model']['name']}: {answer['reason']}", file=sys.stderr)
        return 0
    if "schedule" not in answer:
        print(f"opweave: {answer['status']}: {answer['reason']}", file=sys.stderr)
        return 1
    if output is None:
        print_json(answer["schedule"])
        return 0
    try:
        write_json(Path(output), answer["schedule"])
    except OSError as error:
        raise BadRequest(f"output={output} cannot be written: {error.strerror or error}") from error
    schedule = answer["schedule"]
    print(
        f"{output}: {len(schedule['operators'])} operators, width {schedule['width']}, {schedule['streams']} streams, "
        f"{len(schedule['waits'])} waits, found in {schedule['search']['seconds'] * 1e3:.1f} ms"
    )
    return 0


def run_list(cell: dict[str, Any], timeout: float) -> int:
    """Print every model and every system. What it takes minutes to find out is kept for as long as the code is the same."""
    known = environment.identity(cell, visible(0))
    file = CATALOGUE / f"catalogue-{cell['device']}.json"
    catalogue = _read(file)
    if catalogue is None or catalogue.get("of") != known:
        answer = _ask("list", cell, max(timeout, 1800.0))
        if "models" not in answer:
            print(f"opweave: {answer['status']}: {answer['reason']}", file=sys.stderr)
            return 1
        catalogue = {"of": known, **answer}
        try:
            CATALOGUE.mkdir(parents=True, exist_ok=True)
            write_json(file, catalogue)
        except OSError as error:
            print(f"opweave: {file} cannot be written, so this is found out anew each time: {error}", file=sys.stderr)
    console = Console()
    table = Table(title="Models (batch 1)")
    for column in ("model", "inputs", "parameters M", "MACs G", "operators", "width"):
        left = column in ("model", "inputs")
        table.add_column(column, justify="left" if left else "right", no_wrap=column == "model")
    for row in catalogue["models"]:
        shapes = " ".join("x".join(map(str, shape)) for shape in row["inputs"])
        size = f"{row['parameters'] / 1e6:.2f}", f"{row['macs'] / 1e9:.3f}"
        table.add_row(row["model"], shapes, *size, str(row["operators"] or "–"), str(row["width"] or "–"))
    console.print(table)
    table = Table(title=f"Systems on {cell['device']}")
    table.add_column("system")
    table.add_column("runs here")
    for row in catalogue["systems"]:
        table.add_row(row["system"], "yes" if row["reason"] is None else f"no: {row['reason']}")
    console.print(table)
    return 0


def _ask(command: str, cell: dict[str, Any], timeout: float) -> dict[str, Any]:
    console = Console(stderr=True)
    process = CellProcess(cell["device"], visible(0))
    try:
        with console.status("starting") as status:
            answer = process.ask({"do": command, "cell": cell}, timeout, lambda phase: status.update(phase))
    finally:
        process.close()
    if "bad_request" in answer:
        raise BadRequest(answer["bad_request"])
    return answer


def _read(file: Path) -> dict[str, Any] | None:
    """What a cache file holds, or None where there is none that can be read: it is then made anew."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
