"""What is asked of the runners: cells, and how to sweep over them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path

from results.cell import Cell
from runners.checks import BadRequest
from runners.machine.device import cuda_device_count

FIRST_GPU = (0,)  # where nobody names any


@dataclass(frozen=True)
class SweepOptions:
    """What holds for all cells of a request, and says nothing of what is measured.

    Args:
        results: folder of the records.
        force: measure again what has a record.
        timeout: seconds for a cell's learning, and as many for its measuring.
        memory_gib: host memory that a cell may take; None: what there is.
        rounds: interleaved rounds; 0: none.
        max_load: the share of the cores that other processes may take during the rounds of a CPU, 0 to 1.
        gpus: numbers of the GPUs that the sweep is spread over; None: every GPU.
        output: the file of a runner that writes one; None: standard output.
        margin: whether a second process of one system takes its turns in the rounds; None: on a GPU.
    """

    results: Path
    force: bool
    timeout: float
    memory_gib: float | None
    rounds: int
    max_load: float
    gpus: tuple[int, ...] | None
    output: Path | None
    margin: bool | None = None


@dataclass(frozen=True)
class Request:
    """Cells, each once, in the order in which they were asked for. Their device may be "auto" until `decided`."""

    cells: tuple[Cell, ...]
    options: SweepOptions

    @classmethod
    def joined(cls, requests: Iterable[Request]) -> Request:
        """One request of several. Raises BadRequest where they differ in what holds for a whole sweep."""
        first, *others = requests
        for field in fields(SweepOptions):
            if any(getattr(other.options, field.name) != getattr(first.options, field.name) for other in others):
                raise BadRequest(f"{field.name} holds for a whole sweep: give it one value")
        cells = (cell for request in (first, *others) for cell in request.cells)
        return cls(tuple(dict.fromkeys(cells)), first.options)

    @property
    def num_gpus(self) -> int:
        """GPUs that each cell has for itself, as the one that needs the most. Raises BadRequest for more than there are."""
        keys = ("pipeline_parallel", "tensor_parallel")
        real = [cell for cell in self.cells if cell.runner.name != "simulated"]
        needed = max((prod(int(str(cell.system.get(key, 1))) for key in keys) for cell in real), default=1)
        gpus = list(self.options.gpus or (0,))
        if needed > len(gpus) and self.cells[0].device == "cuda":
            raise BadRequest(
                f"system.pipeline_parallel and tensor_parallel need {needed} GPUs, and gpus={gpus} names {len(gpus)}"
            )
        return needed

    def decided(self) -> Request:
        """The request with the devices of this machine, which measures it. Raises BadRequest where they are not here."""
        count = cuda_device_count()
        if any(cell.device == "cuda" for cell in self.cells) and not count:
            raise BadRequest("device=cuda, but no CUDA device is visible here: use device=cpu or device=auto")
        auto = "cuda" if count else "cpu"
        cells = [
            replace(cell, conditions=replace(cell.conditions, device=auto)) if cell.device == "auto" else cell
            for cell in self.cells
        ]
        gpus = tuple(range(max(1, count))) if self.options.gpus is None else self.options.gpus
        if all(cell.device == "cpu" for cell in cells):
            if self.options.gpus not in (None, FIRST_GPU):
                raise BadRequest(f"gpus={list(gpus)} names GPUs, and device=cpu takes none: leave it out")
        elif max(gpus) >= count:
            raise BadRequest(f"gpus={list(gpus)}, but GPUs are numbered 0 to {count - 1} here")
        return Request(tuple(dict.fromkeys(cells)), replace(self.options, gpus=gpus))
