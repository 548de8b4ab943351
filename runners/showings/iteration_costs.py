"""runner=iteration_costs: what iterations cost one part of a model, which is all of it that the device has to hold.

Where `gpus` names several, sums over as many as the split has are measured too. runner=simulated takes the file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ClassVar

from results.cell import Cell
from runners.cell.messages import Failed
from runners.checks import BadRequest
from runners.machine.device import visible
from runners.request.request import Request

from .asking import ask, check_output, write
from .base import Showing


class IterationCosts(Showing):
    """Writes `StageCosts`."""

    name: ClassVar[str] = "iteration_costs"
    writes_output: ClassVar[bool] = True

    def run(self, request: Request) -> int:
        output = request.options.output
        check_output(output)
        if len(request.cells) > 1:
            raise BadRequest("runner=iteration_costs measures one model under one system: ask for no sweep")
        (cell,) = request.cells
        degree = int(str(cell.system.get("tensor_parallel", 1)))  # sums are measured over as many as `gpus` names
        gpus = ",".join(visible(gpu) for gpu in (request.options.gpus or (0,))[:degree])
        answer = ask(cell, request.options, gpus=gpus)
        if isinstance(answer, Failed):
            print(f"opweave: {answer.status}: {answer.reason}", file=sys.stderr)
            return 0 if answer.status == "unsupported" else 1
        if write(output, answer.document):
            print(f"{output}: iteration costs of a part of {cell.model.label}")
        return 0

    def show(self, cell: Cell, visible_device: str, report: Callable[[str], None]) -> object:
        """Raises BadModel, BadOption, Unsupported, MemoryError."""
        import json

        import psutil
        import torch

        from models.gpt_part import Part, made_part
        from runners.cell.arithmetic import set_arithmetic
        from runners.serving.parted import parted
        from runners.serving.session import system_of
        from systems.base import Unsupported
        from systems.serving import costs, reductions
        from systems.serving.stage_costs import Alone, StageCosts
        from systems.serving.system import ServingSystem

        system = system_of(cell)
        if not isinstance(system, ServingSystem):
            raise Unsupported(f"{cell.system.choice} splits its model itself: system=orca has parts")
        model, parts = parted(cell, system.parts), system.parts
        set_arithmetic(cell.conditions.precision, cell.conditions.algorithms)
        on_gpu = cell.device == "cuda"
        sums = None
        if parts.tensor > 1 and (not on_gpu or torch.cuda.device_count() > 1):
            degree = min(parts.tensor, torch.cuda.device_count()) if on_gpu else 2
            report(f"measuring sums over {degree} processes")
            sums = reductions.measured(cell.device, degree, system.reductions)
        report("making a part of the model")
        last = Part(parts.pipeline - 1, parts.pipeline, 0, parts.tensor)
        part = made_part(model.shape, last, model.device, model.dtype)
        part.join(Alone(parts.tensor))
        block_size = int(cell.system.options.get("block_size") or 0)
        engine, num_slots = system.local_engine(part, block_size)
        report("measuring iterations")
        table = costs.of_server(system.server_of(engine, num_slots, model.shape), system.max_batch_size, block_size)
        shape = model.shape
        document = StageCosts(
            device=torch.cuda.get_device_name() if on_gpu else "cpu",
            gpu_bytes=torch.cuda.get_device_properties(0).total_memory if on_gpu else psutil.virtual_memory().total,
            precision=cell.conditions.precision,
            shape=(shape.layers, shape.hidden, shape.heads, shape.positions, shape.vocabulary),
            parts=parts,
            token_bytes=shape.hidden * model.dtype.itemsize,
            table=table,
            reductions=sums,
        )
        return json.loads(document.to_json())
