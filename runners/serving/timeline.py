"""What goes through each stage of a pipeline when, as figure 4.6 of the dissertation draws it: by the real scheduler.

Every iteration takes a millisecond a stage under a virtual clock. Requests A, B, ... come at once, of three tokens each.
"""

from __future__ import annotations

from models.decoders import decoder_size
from results.cell import Cell
from results.timeline import UNKNOWN, Bar, Timeline
from systems.base import Unsupported
from systems.serving.batch import Batch
from systems.serving.loop import Listed
from systems.serving.request import Request
from systems.serving.simulated import LinearCost, SimulatedEngine, VirtualClock
from systems.serving.system import ServingSystem

from .session import system_of

NAMES = "ABCDEF"  # of requests
PROMPT, NEW = 4, 3  # tokens of each
STAGE_S = 1e-3
SOURCE = "virtual clock, a millisecond a stage"


class Watched(SimulatedEngine):
    """Notes when each stage has which batch. bars: of all stages."""

    def __init__(self, clock: VirtualClock, num_workers: int):
        super().__init__(clock, LinearCost(STAGE_S), num_workers)
        self.bars: list[Bar] = []

    def submit(self, batch: Batch) -> None:
        super().submit(batch)
        name = "".join(f"{NAMES[row.request_id]}{row.draw + 1}" for row in batch.rows)
        for stage, end_s in enumerate(self.free_s):
            begin_ms = (end_s - STAGE_S) * 1e3
            self.bars.append(Bar(stage, name, round(begin_ms, 6), STAGE_S * 1e3, UNKNOWN, {"requests": len(batch.rows)}))


def of_cell(cell: Cell) -> Timeline:
    """The timeline of a cell whose system serves. Raises BadModel, BadOption, Unsupported."""
    system = system_of(cell)
    if not isinstance(system, ServingSystem):
        raise Unsupported(f"{cell.system.choice} schedules by itself: system=orca shows what it does")
    shape = decoder_size(cell.model.name, **cell.model.options).shape
    clock = VirtualClock()
    engine = Watched(clock, system.parts.pipeline)
    server = system.server_of(engine, len(NAMES) * shape.positions, shape)
    requests = [Request(number, (number,) * PROMPT, NEW) for number in range(len(NAMES))]
    server.serve(Listed(requests), lambda deliveries, now_s: None, clock)
    return Timeline(cell, SOURCE, tuple(engine.bars), system.parts.pipeline)
