"""runner=cache: what compilers and profilers have left on disk, and a way to be rid of it."""

from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from runners.request.bad_request import BadRequest
from systems.cache import Cache

KINDS = {
    "onnx": "ONNX file",
    "tensorrt": "TensorRT engine",
    "tensorrt-timing": "TensorRT timings",
    "tvm": "TVM library",
    "tvm-log": "TVM tuning log",
    "torch_compile": "Inductor's cache",
}


def run(cell: dict[str, Any]) -> int:
    """Show the cache, or empty it; returns the exit status. Raises BadRequest."""
    console = Console(markup=False)
    try:
        cache = Cache()
    except ValueError as error:
        raise BadRequest(str(error)) from error
    if cell["runner"]["empty"]:
        count, size = cache.empty()
        left = len(cache.entries())
        in_use = f"; {left} in use and left there" if left else ""
        console.print(f"{cache.folder}: dropped {count}, {_mebibytes(size)} MiB{in_use}", highlight=False, soft_wrap=True)
        return 0
    table = Table(title="Artefacts and measurements")
    for heading in ("what", "of", "MiB", "last used (UTC)"):
        table.add_column(heading, justify="right" if heading == "MiB" else "left", overflow="fold")
    entries, files = cache.entries(), cache.measurements()
    for entry in entries:
        table.add_row(KINDS.get(entry.kind, entry.kind), entry.label, _mebibytes(entry.bytes), _when(entry.used / 1e9))
    for file in files:
        table.add_row("measured costs", file.stem, _mebibytes(file.stat().st_size), _when(file.stat().st_mtime))
    console.print(table)
    held = sum(entry.bytes for entry in entries)
    console.print(
        f"{cache.folder}: {_mebibytes(held)} of {_mebibytes(cache.bound)} MiB of artefacts (OPWEAVE_CACHE_GIB); "
        "python run.py runner=cache runner.empty=true drops them and the measured costs",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
