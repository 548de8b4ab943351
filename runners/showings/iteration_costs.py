"""runner=iteration_costs: what iterations cost one part of a model, which is all of it that the device has to hold.

Where `gpus` names several, what goes between parts is measured too: sums over as many as the split has, and how much later
tokens are back from as many processes, each with a few layers, than from one. runner=simulated takes the file.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from math import prod
from typing import TYPE_CHECKING, ClassVar

from results.cell import Cell
from runners.cell.messages import Failed
from runners.checks import BadRequest
from runners.machine.device import visible
from runners.machine.manifest import code_state
from runners.request.request import Request

from .asking import ask, check_output, exit_status, tell, write
from .base import Showing

if TYPE_CHECKING:  # they load PyTorch
    from runners.serving.parted import Parted
    from systems.serving.costs import CostTable
    from systems.serving.parts import Parts
    from systems.serving.system import ServingSystem

FEW_LAYERS = 4  # of a stage, where processes are timed: enough to keep a device busy while the host goes on
NUM_ON_CPU = 2  # processes that are timed


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
        num_ranks = prod(int(str(cell.system.get(key, 1))) for key in ("pipeline_parallel", "tensor_parallel"))
        gpus = ",".join(visible(gpu) for gpu in (request.options.gpus or (0,))[:num_ranks])
        answer = ask(cell, request.options, gpus=gpus)
        if isinstance(answer, Failed):
            tell(answer, cell)
            return exit_status([answer], output is not None)
        if write(output, answer.document):
            print(f"{output}: iteration costs of a part of {cell.model.label}")
        return 0

    def show(self, cell: Cell, visible_device: str, report: Callable[[str], None]) -> object:
        """Raises BadModel, BadOption, Unsupported, MemoryError."""
        import json

        import psutil
        import torch

        from runners.cell.arithmetic import set_arithmetic
        from runners.serving.parted import parted, shallow
        from runners.serving.session import system_of
        from systems.base import Unsupported
        from systems.serving import costs, reductions
        from systems.serving.stage_costs import StageCosts
        from systems.serving.system import ServingSystem

        system = system_of(cell)
        if not isinstance(system, ServingSystem):
            raise Unsupported(f"{cell.system.choice} splits its model itself: system=orca has parts")
        model, parts = parted(cell, system.parts), system.parts
        set_arithmetic(cell.conditions.precision, cell.conditions.algorithms)
        on_gpu = cell.device == "cuda"
        block_size = int(cell.system.options.get("block_size") or 0)
        count = torch.cuda.device_count() if on_gpu else NUM_ON_CPU
        sums, few_parts, of_few = None, None, None
        if parts.tensor > 1 and count > 1:
            degree = min(parts.tensor, count)
            report(f"measuring sums over {degree} processes")
            sums = reductions.measured(cell.device, degree, system.reductions)
        if parts.num_ranks > 1 and count > 1:
            few_parts = parts.within(count)
            few = shallow(model, parts, few_parts, FEW_LAYERS)
            report(f"measuring what goes between {few_parts.num_ranks} processes")
            of_few = self._in_processes(system, few, few_parts, block_size), self._in_one(system, few, few_parts, block_size)
        report("measuring iterations of a part of the model")
        table = self._in_one(system, model, parts, block_size, costs.LOAD_S[cell.device])
        if of_few is not None:
            table = table.delayed_by(*of_few)
        shape, state = model.shape, code_state()
        document = StageCosts(
            device=torch.cuda.get_device_name() if on_gpu else "cpu",
            gpu_bytes=torch.cuda.get_device_properties(0).total_memory if on_gpu else psutil.virtual_memory().total,
            precision=cell.conditions.precision,
            shape=(shape.layers, shape.hidden, shape.heads, shape.positions, shape.vocabulary),
            parts=parts,
            token_bytes=shape.hidden * model.dtype.itemsize,
            table=table,
            reductions=sums,
            delay_parts=few_parts,
            commit=None if state.modified else state.commit,
        )
        return json.loads(document.to_json())

    def _in_one(self, system: ServingSystem, model: Parted, parts: Parts, block_size: int, load_s: float = 0.0) -> CostTable:
        """The costs of the last stage's first part, in this process."""
        from models.gpt_part import Part, made_part
        from systems.serving import costs
        from systems.serving.stage_costs import Alone

        last = Part(parts.pipeline - 1, parts.pipeline, 0, parts.tensor)
        part = made_part(model.shape, last, model.device, model.dtype)
        part.join(Alone(parts.tensor))
        engine, num_slots = system.local_engine(part, block_size)
        try:
            server = system.server_of(engine, num_slots, model.shape)
            return costs.of_server(server, system.max_batch_size, block_size, load_s)
        finally:
            engine.close()

    def _in_processes(self, system: ServingSystem, model: Parted, parts: Parts, block_size: int) -> CostTable:
        """The costs of all parts, in processes of their own."""
        from systems.serving import costs

        system = copy(system)
        system.parts = parts
        server = system.prepare_serving(model)
        try:
            return costs.of_server(server, system.max_batch_size, block_size)
        finally:
            server.engine.close()
