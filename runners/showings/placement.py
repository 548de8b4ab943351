"""runner=placement: which GPU of a host has which part of a model, and how many K/V slots fit; nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rich.table import Table

from results.terminal import Terminal
from runners.checks import BadRequest, is_positive, positive_integer
from runners.request.request import Request

from .base import Showing

GIB = 2**30


@dataclass(frozen=True)
class PlacementOptions:
    """memory_gib: of a GPU. gpus: of the host."""

    memory_gib: float
    gpus: int

    def __post_init__(self) -> None:
        positive_integer("runner.gpus", self.gpus)
        if not is_positive(self.memory_gib):
            raise BadRequest(f"runner.memory_gib={self.memory_gib} is not a positive number")


class Placement(Showing):
    """Prints a table for each cell. What does not fit is refused in one line."""

    name: ClassVar[str] = "placement"
    Options: ClassVar[type] = PlacementOptions
    options: PlacementOptions

    def run(self, request: Request) -> int:
        from models import BadModel
        from runners.serving.parted import parted
        from runners.serving.session import own_system_of
        from systems.base import BadOption, Unsupported
        from systems.serving.simulated import LinearCost, SimulatedEngine, VirtualClock

        for cell in request.cells:
            try:
                system = own_system_of(cell, "places its model itself: system=orca has parts")
                model, parts = parted(cell, system.parts), system.parts
                if parts.num_ranks > self.options.gpus:
                    raise BadOption(f"{parts} needs {parts.num_ranks} GPUs, and runner.gpus={self.options.gpus}")
                rooms = system.rooms(model, int(self.options.memory_gib * GIB))
                engine = SimulatedEngine(VirtualClock(), LinearCost(0.0), parts.pipeline)
                server = system.server_of(engine, system.slots_on(rooms), model.shape)
            except (BadModel, BadOption, Unsupported) as error:
                raise BadRequest(str(error)) from error
            except MemoryError as error:
                raise BadRequest(f"{cell.model.choice} does not fit: {error} (runner.memory_gib)") from error
            table = Table(title=f"{cell.model.label} under {cell.system.label}, {cell.conditions.precision}")
            for column in ("GPU", "stage", "layers", "heads", "weights GiB", "spare GiB", "K/V KiB a token", "K/V slots"):
                table.add_column(column, justify="right", no_wrap=column == "K/V slots")
            num_heads, num_layers = model.shape.heads // parts.tensor, model.shape.layers // parts.pipeline
            for rank, room in enumerate(rooms):
                stage, part = parts.place(rank)
                layers = f"{stage * num_layers} to {(stage + 1) * num_layers - 1}"
                heads = f"{part * num_heads} to {(part + 1) * num_heads - 1}"
                sizes = f"{room.weights / GIB:.1f}", f"{room.spare / GIB:.1f}", f"{room.slot / 1024:.0f}"
                table.add_row(str(rank), str(stage), layers, heads, *sizes, f"{room.num_slots:,}")
            console = Terminal()
            console.print(table)
            fewest = "the fewest of all GPUs, since each has a part of every slot"
            why = "as many as are asked for" if system.slots else fewest
            console.print(f"{server.num_slots:,} K/V slots: {why}", soft_wrap=True)
        return 0
