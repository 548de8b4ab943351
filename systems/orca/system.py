"""Orca (dissertation, chapter 4): iteration-level scheduling with selective batching."""

from __future__ import annotations

from systems.base import BadOption, Unsupported
from systems.serving.engine import DecoderShape, Engine
from systems.serving.iteration_level import IterationLevel
from systems.serving.parts import CONTROLS, REDUCTIONS, Parts
from systems.serving.prefix_cache import CachedSlots
from systems.serving.slots import ContiguousSlots, PagedSlots, Slots
from systems.serving.system import AUTO, ENGINE, Server, ServingSystem, not_below, one_of

PREEMPTIONS = ("none", "recompute")


class Orca(ServingSystem):
    """Serves an iteration at a time.

    Args:
        attention, cuda_graphs, slots, max_batch_size: as ServingSystem has them.
        block_size: slots of a block of K/V; 0 reserves one run of slots a request.
        prefetch: one batch more than workers is in flight.
        max_num_batched_tokens: of an iteration; longer prompts go in chunks. 0: no limit.
        prefix_caching: prompts that begin alike share blocks.
        preemption: one of PREEMPTIONS; `recompute` reserves slots as tokens come, and the youngest give up theirs.
        asynchronous: the next iteration is selected and submitted while the last one runs.
        increments_by: the choice of a system that schedules the operators of iterations without prompts, or ENGINE.
        pipeline_parallel, tensor_parallel: stages, and parts of each, in a process each.
        control: one of CONTROLS.
        reductions: one of REDUCTIONS.
    """

    name = "orca"

    def __init__(
        self,
        attention: str = AUTO,
        cuda_graphs: bool = True,
        slots: int = 0,
        max_batch_size: int = 64,
        block_size: int = 0,
        prefetch: bool = False,
        max_num_batched_tokens: int = 0,
        prefix_caching: bool = False,
        preemption: str = "none",
        asynchronous: bool = False,
        increments_by: str = ENGINE,
        pipeline_parallel: int = 1,
        tensor_parallel: int = 1,
        control: str = CONTROLS[0],
        reductions: str = REDUCTIONS[0],
    ):
        parts = Parts(pipeline_parallel, tensor_parallel)
        super().__init__(attention, cuda_graphs, slots, max_batch_size, parts, control, reductions)
        not_below("block_size", block_size, 0)
        not_below("max_num_batched_tokens", max_num_batched_tokens, 0)
        self.block_size, self.prefetch, self.max_num_batched_tokens = block_size, prefetch, max_num_batched_tokens
        one_of("preemption", preemption, PREEMPTIONS)
        self.prefix_caching, self.preemption, self.asynchronous = prefix_caching, preemption, asynchronous
        self.execute_increments_by(increments_by)
        for value, is_on in (("prefix_caching=true", prefix_caching), (f"preemption={preemption}", preemption != "none")):
            if is_on and not block_size:
                raise BadOption(f"system.{value} needs system.block_size above 0: runs of slots neither share nor grow")
        if prefetch and asynchronous:
            raise BadOption("system.prefetch and system.asynchronous are two ways to the same end: choose one")
        if asynchronous and self.parts.num_ranks > 1:
            raise BadOption(
                "system.asynchronous needs the last tokens on its own GPU: of several processes there is system.prefetch"
            )

    def most_tokens(self, num_positions: int) -> int:
        return self.max_num_batched_tokens or super().most_tokens(num_positions)

    def server_of(self, engine: Engine, num_slots: int, shape: DecoderShape, start_token: int | None = None) -> Server:
        if start_token is not None and (self.max_num_batched_tokens or self.prefix_caching):
            raise Unsupported("an encoder takes whole prompts: neither in chunks, nor from another's blocks")
        if num_slots < self.block_size:
            raise BadOption(f"system.block_size={self.block_size} is more than the {num_slots} K/V slots")
        slots: Slots = ContiguousSlots.all_free(num_slots)
        if self.block_size:
            slots = (CachedSlots if self.prefix_caching else PagedSlots).all_free(num_slots, self.block_size)
        scheduler = IterationLevel(
            slots,
            self.max_batch_size,
            engine.num_workers,
            is_prefetching=self.prefetch,
            max_num_batched_tokens=self.max_num_batched_tokens,
            is_preempting=self.preemption == "recompute",
            is_asynchronous=self.asynchronous,
        )
        return Server.of(shape, start_token, scheduler, engine, slots.num_slots)
