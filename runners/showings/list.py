"""runner=list: every model with its size, every system with whether it runs here."""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar

from rich.table import Table

from results.cell import Cell, choose
from results.document import JSON, NotARecord, part_from_json, part_to_json
from results.files import read_json, write_json
from results.terminal import Terminal
from runners.cell.messages import Failed
from runners.machine import environment
from runners.machine.device import visible
from runners.machine.installation import PREFIX, ROOT
from runners.request.request import Request
from runners.roots import roots

from .asking import ask
from .base import Showing

CATALOGUE = (Path.cwd() if PREFIX else ROOT) / "results" / "cache"  # not among installed packages
LEAST_SECONDS = 1800.0  # for all models, whatever a cell may take
DASH = "–"


@dataclass(frozen=True)
class ModelRow:
    """A model at batch 1. inputs: their shapes. operators, width: None where it cannot be captured, for this reason."""

    model: str
    parameters: int
    macs: int
    inputs: tuple[tuple[int, ...], ...]
    operators: int | None = None
    width: int | None = None
    reason: str | None = None


@dataclass(frozen=True)
class SystemRow:
    """A system. reason: why it does not run here, None where it does."""

    system: str
    reason: str | None = None


@dataclass(frozen=True)
class Catalogue:
    """All there is."""

    models: tuple[ModelRow, ...]
    systems: tuple[SystemRow, ...]


class List(Showing):
    """Prints the catalogue. What it takes minutes to find out is kept for as long as the code is the same."""

    name: ClassVar[str] = "list"
    takes: ClassVar[tuple[str, ...] | None] = ("device", "gpus", "memory_gib", "timeout")

    def run(self, request: Request) -> int:
        cell = request.cells[0]
        where = environment.identity(cell, roots(cell), visible(0)).identity
        file = CATALOGUE / f"catalogue-{cell.device}.json"
        catalogue = _read(file, where)
        if catalogue is None:
            answer = ask(cell, request.options, max(request.options.timeout, LEAST_SECONDS))
            if isinstance(answer, Failed):
                print(f"opweave: {answer.status}: {answer.reason}", file=sys.stderr)
                return 1
            catalogue = part_from_json(answer.document, Catalogue)
            _keep(file, where, answer.document)
        print_models(catalogue.models)
        print_systems(catalogue.systems, cell.device)
        return 0

    def show(self, cell: Cell, visible_device: str, report: Callable[[str], None]) -> JSON:
        """A row a model (parameters, MACs, operators and width at batch 1) and one a system."""
        import models
        import systems

        rows = _rows(models.names(), cell, report)
        here = tuple(SystemRow(name, systems.load(name).unsupported(cell.device)) for name in systems.names())
        return part_to_json(Catalogue(rows, here))


def _rows(names: Sequence[str], cell: Cell, report: Callable[[str], None]) -> tuple[ModelRow, ...]:
    """The rows of models: on a CPU a fork for each core makes them, since torch.export takes seconds a model."""
    import models  # noqa: F401 - once for all forks, as is torch
    import systems.scheduling.graph.capture  # noqa: F401

    rows: list[ModelRow] = []
    with ExitStack() as stack:
        if cell.device == "cpu":
            pool = stack.enter_context(ProcessPoolExecutor(min(environment.cores(), len(names)), get_context("fork")))
            made = pool.map(_row, names, repeat(cell))
        else:
            made = map(_row, names, repeat(cell))
        for number, name in enumerate(names, 1):
            report(f"{name} ({number} of {len(names)})")
            rows.append(next(made))
    return tuple(rows)


def _row(name: str, cell: Cell) -> ModelRow:
    import models
    from runners.cell.shape import shape_of
    from systems.base import Unsupported
    from systems.scheduling.graph.capture import capture

    model = shape_of(choose("model", name), replace(cell.conditions, batch=1), runs=False)
    counts = models.count(model.module, model.inputs)
    shapes = tuple(tuple(x.shape) for x in model.inputs)
    row = ModelRow(name, counts.parameters, counts.macs, shapes)
    try:
        graph = capture(model.module, model.inputs).graph
    except Unsupported as error:
        return replace(row, reason=str(error))
    return replace(row, operators=len(graph), width=graph.width)


def _read(file: Path, where: dict[str, object]) -> Catalogue | None:
    """The catalogue that was kept, or None where there is none of this machine and code: it is then made anew."""
    try:
        document = read_json(file)
        if document["where"] != where:
            return None
        catalogue: Catalogue = part_from_json(document["catalogue"], Catalogue)
    except (OSError, ValueError, KeyError, TypeError, NotARecord):
        return None
    return catalogue


def _keep(file: Path, where: dict[str, object], document: object) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"where": where, "catalogue": document})
    except OSError as error:
        reason = f"{file.parent} cannot be written ({error.strerror or error})"
        print(f"opweave: {reason}, so the next runner=list takes as long: make that folder writable", file=sys.stderr)


def print_models(rows: tuple[ModelRow, ...]) -> None:
    table = Table(title="Models (batch 1)", box=None)  # without lines it fits 80 columns
    for column in ("model", "inputs", "parameters M", "MACs G", "operators", "width"):
        is_word = column in ("model", "inputs")
        table.add_column(column, justify="left" if is_word else "right", no_wrap=is_word)
    for row in rows:
        shapes = "\n".join("x".join(map(str, shape)) for shape in row.inputs)
        size = f"{row.parameters / 1e6:.2f}", f"{row.macs / 1e9:.3f}"
        table.add_row(row.model, shapes, *size, str(row.operators or DASH), str(row.width or DASH))
    Terminal().print(table)


def print_systems(rows: tuple[SystemRow, ...], device: str) -> None:
    table = Table(title=f"Systems on {device}", box=None)
    table.add_column("system")
    table.add_column("runs here")
    for row in rows:
        table.add_row(row.system, "yes" if row.reason is None else f"no: {row.reason}")
    Terminal().print(table)
