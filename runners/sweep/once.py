"""The runners that keep no record: `schedule` writes a schedule file, `timeline` a trace, `list` shows what there is."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from results.store import write_json
from results.timeline import Timeline, to_trace
from results.words import counted
from runners.machine import environment
from runners.machine.device import visible
from runners.request.bad_request import BadRequest
from runners.request.requests import check_writable, print_json

from .cell_process import CellProcess

CATALOGUE = environment.ROOT / "results" / "cache"


def run_schedule(cell: dict[str, Any], output: str | None, timeout: float, memory_gib: float | None) -> int:
    """Write the cell's schedule to the file `output`, or to standard output. Raises BadRequest."""
    _check_output(output)
    answer = _ask("schedule", cell, timeout, memory_gib)
    if answer.get("status") == "unsupported":
        print(f"opweave: {cell['system']['name']} on {cell['model']['name']}: {answer['reason']}", file=sys.stderr)
        return 0
    if "schedule" not in answer:
        print(f"opweave: {answer['status']}: {answer['reason']}", file=sys.stderr)
        return 1
    schedule = answer["schedule"]
    if not _write(output, schedule):
        return 0
    numbers = {"operator": len(schedule["operators"]), "stream": schedule["streams"], "wait": len(schedule["waits"])}
    operators, streams, waits = (counted(number, thing) for thing, number in numbers.items())
    seconds = schedule["search"]["seconds"]
    print(f"{output}: {operators}, width {schedule['width']}, {streams}, {waits}, found in {seconds * 1e3:.1f} ms")
    _print_rewriting(schedule.get("rewriting", {}))
    return 0


def _print_rewriting(rewriting: dict[str, Any]) -> None:
    """What passes made of the model before it was scheduled, and by how much what was chosen won."""
    console = Console(markup=False)
    if "fold_batch_norm" in rewriting:
        console.print(f"fold_batch_norm: {rewriting['fold_batch_norm']['folded']} batch norms folded", highlight=False)
    headings = {
        "merge_linears": "separate / merged",
        "select_kernels": "gain",
        "fuse_convolution": "separate / fused",
        "fuse_reductions": "separate / fused",
    }
    for name, heading in headings.items():
        if not rewriting.get(name):
            continue
        table = Table(title=name)
        for column in ("operator", "count", "chosen", heading):
            left = column in ("operator", "chosen")
            table.add_column(column, justify="left" if left else "right", no_wrap=column != "operator", overflow="fold")
        for row in rewriting[name]:
            gain = row["gain"] if "gain" in row else _gain(row["milliseconds"])
            table.add_row(row.get("operator") or row["operators"], str(row["count"]), row["chosen"], f"{gain:.2f}x")
        console.print(table)
    if "fuse_elementwise" in rewriting:
        console.print("fuse_elementwise: {operators} operators in {kernels} kernels".format(**rewriting["fuse_elementwise"]))


def _gain(milliseconds: dict[str, float]) -> float:
    """How many times as fast one operator is as those it stands for, run in the fastest way that was measured."""
    one = next(name for name in ("fused", "merged") if name in milliseconds)
    return min(t for name, t in milliseconds.items() if name != one) / milliseconds[one]


def run_timeline(cells: list[dict[str, Any]], output: str | None, timeout: float, memory_gib: float | None) -> int:
    """Write the timelines of all cells, one trace, to the file `output`, or to standard output. Raises BadRequest."""
    _check_output(output)
    timelines, failed = [], False
    for cell in cells:
        answer = _ask("timeline", cell, timeout, memory_gib)
        if "timeline" in answer:
            timelines.append(Timeline.from_json(answer["timeline"]))
            continue
        name = f"{cell['system']['name']} on {cell['model']['name']}"
        print(f"opweave: {name}: {answer['status']}: {answer['reason']}", file=sys.stderr)
        failed |= answer["status"] != "unsupported"
    if timelines and _write(output, to_trace(timelines)):
        for timeline in timelines:
            operators, streams = counted(len(timeline.bars), "operator"), counted(len(timeline.streams), "stream")
            last = max((bar.end for bar in timeline.bars), default=0.0)
            print(f"{output}: {timeline.title}: {operators} on {streams} in {last:.3f} ms")
    return 1 if failed else 0


def run_list(cell: dict[str, Any], timeout: float, memory_gib: float | None) -> int:
    """Print every model and every system. What it takes minutes to find out is kept for as long as the code is the same."""
    known = environment.identity(cell, visible(0))
    file = CATALOGUE / f"catalogue-{cell['device']}.json"
    catalogue = _read(file)
    if catalogue is None or catalogue.get("of") != known:
        answer = _ask("list", cell, max(timeout, 1800.0), memory_gib)
        if "models" not in answer:
            print(f"opweave: {answer['status']}: {answer['reason']}", file=sys.stderr)
            return 1
        catalogue = {"of": known, **answer}
        try:
            CATALOGUE.mkdir(parents=True, exist_ok=True)
            write_json(file, catalogue)
        except OSError as error:
            print(f"opweave: {file} cannot be written, so this is found out anew each time: {error}", file=sys.stderr)
    console = Console(markup=False)
    table = Table(title="Models (batch 1)", box=None)  # without lines it fits 80 columns
    for column in ("model", "inputs", "parameters M", "MACs G", "operators", "width"):
        left = column in ("model", "inputs")
        table.add_column(column, justify="left" if left else "right", no_wrap=left)
    for row in catalogue["models"]:
        shapes = "\n".join("x".join(map(str, shape)) for shape in row["inputs"])
        size = f"{row['parameters'] / 1e6:.2f}", f"{row['macs'] / 1e9:.3f}"
        table.add_row(row["model"], shapes, *size, str(row["operators"] or "–"), str(row["width"] or "–"))
    console.print(table)
    table = Table(title=f"Systems on {cell['device']}", box=None)
    table.add_column("system")
    table.add_column("runs here")
    for row in catalogue["systems"]:
        table.add_row(row["system"], "yes" if row["reason"] is None else f"no: {row['reason']}")
    console.print(table)
    return 0


def _check_output(output: str | None) -> None:
    """Raise BadRequest unless the file `output` can be written."""
    if output is None:
        return
    path = Path(output)
    if path.exists() and not path.is_file():
        raise BadRequest(f"output={output} is {'a folder' if path.is_dir() else 'a device'}, not a file")
    if not path.parent.exists():
        raise BadRequest(f"output={output} is in a folder that is not there")
    check_writable(path.parent, "output")


def _write(output: str | None, document: dict[str, Any]) -> bool:
    """Write to the file, or to standard output; tells whether it was to the file. Raises BadRequest."""
    if output is None:
        print_json(document)
        return False
    try:
        write_json(Path(output), document)
    except OSError as error:
        raise BadRequest(f"output={output} cannot be written: {error.strerror or error}") from error
    return True


def _ask(command: str, cell: dict[str, Any], timeout: float, memory_gib: float | None) -> dict[str, Any]:
    console = Console(stderr=True)
    process = CellProcess(cell["device"], visible(0))
    try:
        with console.status("starting") as status:
            answer = process.ask({"do": command, "cell": cell}, timeout, memory_gib, status.update)
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
