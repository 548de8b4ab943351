"""runner=cache: what compilers and profilers have left on disk, and a way to be rid of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar

from rich.console import Console
from rich.table import Table

from results.terminal import Terminal
from runners.checks import BadRequest, not_writable
from runners.request.request import Request
from systems.cache import Cache as Artefacts

from .base import Showing

KINDS = {
    "onnx": "ONNX file",
    "tensorrt": "TensorRT engine",
    "tensorrt-timing": "TensorRT timings",
    "tvm": "TVM library",
    "tvm-log": "TVM tuning log",
    "torch_compile": "Inductor's cache",
}


@dataclass(frozen=True)
class CacheOptions:
    """empty: drop it all, in place of showing it."""

    empty: bool


class Cache(Showing):
    """Shows the cache, or empties it."""

    name: ClassVar[str] = "cache"
    Options: ClassVar[type] = CacheOptions
    takes: ClassVar[tuple[str, ...] | None] = ()
    options: CacheOptions

    def run(self, request: Request) -> int:
        try:
            artefacts = Artefacts()
        except ValueError as error:
            raise BadRequest(str(error)) from error
        console = Terminal()
        if self.options.empty:
            _empty(artefacts, console)
        else:
            _show(artefacts, console)
        return 0


def _empty(artefacts: Artefacts, console: Console) -> None:
    """Raises BadRequest where the folder cannot be written."""
    try:
        count, size = artefacts.empty()
    except OSError as error:
        raise not_writable("OPWEAVE_CACHE", artefacts.folder, error) from error
    num_left = len(artefacts.entries())
    in_use = f"; {num_left} in use and left there" if num_left else ""
    console.print(f"{artefacts.folder}: dropped {count}, {_mebibytes(size)} MiB{in_use}", highlight=False, soft_wrap=True)


def _show(artefacts: Artefacts, console: Console) -> None:
    table = Table(title="Artefacts and measurements")
    for heading in ("what", "of", "MiB", "last used (UTC)"):
        table.add_column(heading, justify="right" if heading == "MiB" else "left", overflow="fold")
    entries, files = artefacts.entries(), artefacts.measurements()
    for entry in entries:
        table.add_row(KINDS.get(entry.kind, entry.kind), entry.label, _mebibytes(entry.bytes), _when(entry.used_ns / 1e9))
    for file in files:
        table.add_row("measured costs", file.stem, _mebibytes(file.stat().st_size), _when(file.stat().st_mtime))
    console.print(table)
    total = _mebibytes(sum(entry.bytes for entry in entries))
    console.print(
        f"{artefacts.folder}: {total} of {_mebibytes(artefacts.bound)} MiB of artefacts (OPWEAVE_CACHE_GIB); "
        "python run.py runner=cache runner.empty=true drops them and the measured costs",
        highlight=False,
        soft_wrap=True,
    )


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f}"


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")
