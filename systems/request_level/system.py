"""What Orca is compared with: static batches, on the same engine and the same kernels."""

from __future__ import annotations

from systems.base import BadOption, Unsupported
from systems.serving.engine import DecoderShape, Engine
from systems.serving.parts import CONTROLS, REDUCTIONS, Parts
from systems.serving.request_level import BATCHINGS, RequestLevel
from systems.serving.system import AUTO, Server, ServingSystem, not_below, one_of


class StaticBatching(ServingSystem):
    """Serves a batch at a time.

    Args:
        attention, cuda_graphs, slots, max_batch_size: as ServingSystem has them.
        batching: one of BATCHINGS.
        early_return: a finished request is answered at once.
        microbatch_size: requests that go through a pipeline together; 0: all of a batch.
        pipeline_parallel, tensor_parallel: stages, and parts of each, in a process each.
        control: one of CONTROLS.
        reductions: one of REDUCTIONS.
    """

    name = "request_level"

    def __init__(
        self,
        attention: str = AUTO,
        cuda_graphs: bool = True,
        slots: int = 0,
        max_batch_size: int = 8,
        batching: str = "shortest_prompt",
        early_return: bool = False,
        microbatch_size: int = 0,
        pipeline_parallel: int = 1,
        tensor_parallel: int = 1,
        control: str = CONTROLS[0],
        reductions: str = REDUCTIONS[0],
    ):
        parts = Parts(pipeline_parallel, tensor_parallel)
        super().__init__(attention, cuda_graphs, slots, max_batch_size, parts, control, reductions)
        one_of("batching", batching, BATCHINGS)
        not_below("microbatch_size", microbatch_size, 0)
        self.batching, self.early_return, self.microbatch_size = batching, early_return, microbatch_size

    def server_of(self, engine: Engine, num_slots: int, shape: DecoderShape, start_token: int | None = None) -> Server:
        if start_token is not None and self.batching != "ragged":
            raise Unsupported(f"an encoder takes whole prompts, which batching={self.batching} does not feed; ragged does")
        if self.batching == "shortest_prompt" and num_slots < shape.positions:
            lack = f"with batching={self.batching} a request holds {shape.positions} K/V slots, and {num_slots} are there"
            raise BadOption(f"system.slots={num_slots}: {lack}") if self.slots else MemoryError(lack)
        scheduler = RequestLevel(
            num_slots,
            shape.positions,
            self.max_batch_size,
            self.batching,
            self.early_return,
            num_workers=engine.num_workers,
            microbatch_size=self.microbatch_size,
        )
        return Server.of(shape, start_token, scheduler, engine, num_slots)
