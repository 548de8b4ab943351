"""What a system that serves is: it puts a scheduler and an engine together for a decoder."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import psutil
import torch
from torch import Tensor, nn

from conf import not_one_of
from systems import registry
from systems.base import BadOption, Prepared, System, Unsupported
from systems.preparing import collector_spared

from .attention.choice import ATTENTIONS
from .engine import Decoder, DecoderShape, Engine, LocalEngine
from .loop import Clock, Course, Encoded, Inbox, serve
from .parts import CONTROLS, GIB, REDUCTIONS, SHARE, PartedDecoder, Parts, Room, lack, rooms, slot_bytes
from .peer import PeerServer
from .request import Delivery
from .scheduler import Scheduler

AUTO = "auto"
ENGINE = "engine"  # what executes an engine's iterations by default: itself
INCREMENTS_BY = (ENGINE, "sequential", "nimble", "opara", "weave")
LEAST_SPARE_BYTES = 2 * GIB  # of it, for what an iteration computes
USUAL_PROMPT = 1 / 4  # of all positions: prompts of a batch are seldom longer on average
WIDTHS_OF_TOKEN = 14  # tensors as wide as the model that are alive at once, the inner ones of a block as several
CPU_SLOTS = 16384  # by default
COPIES = {"weave": 2}  # of the weights, by what executes increments: as its best plan lays them out, and one beside it
MOST = 2**31 - 1  # of any number: kernels and tensors hold them in 32 bits


@dataclass(frozen=True)
class Server:
    """Ready to serve.

    Args:
        scheduler, engine: with nothing to do.
        bounds: K/V slots, positions and vocabulary, within which requests can be served.
        start_token: what the streams of an encoder-decoder have after their prompts.
    """

    scheduler: Scheduler
    engine: Engine
    bounds: tuple[int, int, int]
    start_token: int | None = None

    @classmethod
    def of(
        cls, shape: DecoderShape, start_token: int | None, scheduler: Scheduler, engine: Engine, num_slots: int
    ) -> Server:
        """A server of a decoder; a start token takes one of a request's slots and positions."""
        num_more = int(start_token is not None)
        bounds = (num_slots - num_more, shape.positions - num_more, shape.vocabulary)
        return cls(scheduler, engine, bounds, start_token)

    @property
    def num_slots(self) -> int:
        return self.bounds[0]

    def serve(
        self,
        inbox: Inbox,
        deliver: Callable[[Sequence[Delivery], float], None],
        clock: Clock,
        course: Course | None = None,
    ) -> Course:
        """Serve until the inbox is closed and every request is finished."""
        if self.start_token is not None:
            inbox = Encoded(inbox, self.start_token)
        with collector_spared():
            return serve(self.scheduler, self.engine, inbox, deliver, clock, course)


class AnyServingSystem(System):
    """A system whose work comes as requests: `prepare_serving` in the place of `prepare`.

    max_batch_size: requests of a batch.
    needs_weights: it computes with the decoder's weights; one elsewhere needs its size alone.
    parts: of the model, each in a process of its own.
    """

    max_batch_size: int
    needs_weights: bool = True
    parts: Parts = Parts()

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        raise Unsupported(f"{self.name} serves requests and executes no module by itself: runner=serving")

    @abstractmethod
    def prepare_serving(self, decoder: Decoder) -> Server | PeerServer:
        """Make a server for a decoder that is on its device. Raises BadOption, Unsupported, MemoryError."""


class ServingSystem(AnyServingSystem):
    """One of ours, which differ in their scheduler.

    Args:
        attention: auto (fused on a GPU, split on a CPU), or one of ATTENTIONS.
        cuda_graphs: iterations are CUDA graphs, but for those of very many tokens.
        slots: of the K/V manager; 0 is all that there is room for.
        max_batch_size: requests of a batch.
        parts: of the model, each in a process of its own.
        control: one of CONTROLS, where there are several.
        reductions: one of REDUCTIONS, where layers are split.

    block_size: slots of a block of K/V; 0 is one run of slots a request.
    prefetch: one batch more than workers is in flight.
    increments_by: what executes iterations of increments, one of INCREMENTS_BY; ENGINE is the engine itself.
    """

    block_size = 0
    prefetch = False
    increments_by = ENGINE

    def __init__(
        self,
        attention: str,
        cuda_graphs: bool,
        slots: int,
        max_batch_size: int,
        parts: Parts | None = None,
        control: str = CONTROLS[0],
        reductions: str = REDUCTIONS[0],
    ):
        one_of("attention", attention, (AUTO, *ATTENTIONS))
        not_below("slots", slots, 0)
        not_below("max_batch_size", max_batch_size, 1)
        self.attention, self.cuda_graphs = attention, cuda_graphs
        self.slots, self.max_batch_size = slots, max_batch_size
        self.parts, self.control, self.reductions = parts or Parts(), control, reductions
        not_below("pipeline_parallel", self.parts.pipeline, 1)
        not_below("tensor_parallel", self.parts.tensor, 1)
        one_of("control", control, CONTROLS)
        one_of("reductions", reductions, REDUCTIONS)

    def unsupported(self, device: str) -> str | None:
        if device == "cpu" and self.attention == "fused":
            return "attention=fused is a kernel for a GPU; on a CPU there is attention=split"
        return None

    def prepare_serving(self, decoder: Decoder | PartedDecoder) -> Server:
        """Make a server for a decoder that is on its device, or whose parts will be.

        Raises BadOption, Unsupported, MemoryError.
        """
        engine, num_slots = self.engine(decoder, self.block_size)
        return self.server_of(engine, num_slots, decoder.shape, decoder.start_token)

    @abstractmethod
    def server_of(self, engine: Engine, num_slots: int, shape: DecoderShape, start_token: int | None = None) -> Server:
        """A server on an engine, also on one that is simulated. Raises BadOption."""

    def engine(self, decoder: Decoder | PartedDecoder, block_size: int = 0) -> tuple[Engine, int]:
        """An engine, and its K/V slots."""
        if self.parts.num_ranks > 1:
            return self._parallel_engine(cast(PartedDecoder, decoder), block_size)
        return self.local_engine(cast(Decoder, decoder), block_size)

    def local_engine(self, decoder: Decoder, block_size: int = 0) -> tuple[LocalEngine, int]:
        """An engine of this process, and its K/V slots."""
        assert isinstance(decoder, nn.Module)
        weight = next(decoder.parameters())
        on_gpu = weight.device.type == "cuda"
        if self.slots:
            self._check_slots(slot_bytes(decoder.shape, weight.element_size()), _free_bytes(weight.device))
        num_slots = self.slots or self._slots_that_fit(decoder, weight)
        attention, uses_graphs = self._attention_and_graphs(on_gpu)
        executor = None
        if self.increments_by != ENGINE:
            if on_gpu and attention != "fused":
                raise BadOption(
                    "system.increments_by needs system.attention=fused on a GPU: split calls depend on the batch"
                )
            executor = registry.load(self.increments_by).prepare
        engine = LocalEngine(decoder, num_slots, block_size, attention, uses_graphs, self.max_batch_size, executor)
        return engine, num_slots

    def slots_on(self, rooms: Sequence[Room]) -> int:
        """K/V slots: those that are asked for, or all that these GPUs have room for beside what an iteration computes.

        Raises:
            MemoryError: the model does not fit.
            BadOption: more slots than the fullest GPU has memory for.
        """
        if reason := lack(self.parts, [replace(room, spare=0) for room in rooms] if self.slots else rooms):
            raise MemoryError(reason)
        if not self.slots:
            return min(room.num_slots for room in rooms)
        fullest = max(rooms, key=lambda room: room.weights)
        self._check_slots(fullest.slot, fullest.whole - fullest.weights)
        return self.slots

    def _check_slots(self, each_bytes: int, free_bytes: int) -> None:
        """Raises BadOption for more slots than there is memory for. each_bytes: of one; free_bytes: beside weights."""
        if self.slots * each_bytes > free_bytes:
            needed, there = self.slots * each_bytes / GIB, free_bytes / GIB
            raise BadOption(
                f"system.slots={self.slots} take {needed:.1f} GiB, and {there:.1f} are free: "
                f"there is room for {free_bytes // each_bytes} at most"
            )

    def _attention_and_graphs(self, may_be_fused: bool) -> tuple[str, bool]:
        """One of ATTENTIONS, and whether iterations are CUDA graphs: those of split attention depend on the batch."""
        attention = self.attention if self.attention != AUTO else ATTENTIONS[may_be_fused]
        return attention, self.cuda_graphs and attention == "fused"

    def execute_increments_by(self, choice: str) -> None:
        """Raises BadOption for what is not one of INCREMENTS_BY, or where no process has the whole model."""
        one_of("increments_by", choice, INCREMENTS_BY)
        if choice != ENGINE and self.parts.num_ranks > 1:
            raise BadOption(f"system.increments_by={choice} schedules a whole model: of several processes there is {ENGINE}")
        self.increments_by = choice

    def most_tokens(self, num_positions: int) -> int:
        """Tokens that an iteration has room for, where no slots are asked for."""
        return int(self.max_batch_size * num_positions * USUAL_PROMPT)

    def rooms(self, decoder: PartedDecoder, gpu_bytes: int) -> list[Room]:
        """What the GPU of each rank holds, before anything is loaded."""
        weights = decoder.weights(self.parts.pipeline, self.parts.tensor)
        item_bytes = decoder.dtype.itemsize
        return rooms(decoder.shape, self.parts, weights, item_bytes, self._spare_bytes(decoder.shape, item_bytes), gpu_bytes)

    def _parallel_engine(self, decoder: PartedDecoder, block_size: int) -> tuple[Engine, int]:
        from .parallel import ParallelEngine
        from .worker import Spec

        on_gpu, num_slots = decoder.device.type == "cuda", self.slots
        if on_gpu:
            if (count := torch.cuda.device_count()) < self.parts.num_ranks:
                raise Unsupported(f"{self.parts} needs {self.parts.num_ranks} GPUs, and {count} are there")
            self.slots_on(self.rooms(decoder, torch.cuda.get_device_properties(0).total_memory))
            torch.cuda.empty_cache()  # the first worker has the same GPU
        else:
            num_slots = num_slots or CPU_SLOTS
            self._check_slots(slot_bytes(decoder.shape, decoder.dtype.itemsize), _free_bytes(decoder.device))
        attention, uses_graphs = self._attention_and_graphs(on_gpu)
        common = Spec(
            parts=self.parts,
            rank=0,
            device=decoder.device.type,
            rendezvous="",
            maker=decoder.maker,
            arguments=decoder.arguments,
            num_slots=num_slots,
            spare_bytes=self._spare_bytes(decoder.shape, decoder.dtype.itemsize),
            block_size=block_size,
            attention=attention,
            uses_graphs=uses_graphs,
            max_batch_size=self.max_batch_size,
            control=self.control,
            reductions=self.reductions,
        )
        specs = [replace(common, rank=rank) for rank in range(self.parts.num_ranks)]
        engine = ParallelEngine(specs, decoder.shape.vocabulary, self.prefetch)
        return engine, engine.num_slots

    def _spare_bytes(self, shape: DecoderShape, item_bytes: int) -> int:
        """Of a GPU, for what an iteration computes."""
        width_bytes = shape.heads * shape.head_size * item_bytes
        return max(LEAST_SPARE_BYTES, self.most_tokens(shape.positions) * WIDTHS_OF_TOKEN * width_bytes)

    def _copied_bytes(self, decoder: nn.Module) -> int:
        """Of a GPU, for weights that what executes increments lays out anew."""
        return COPIES.get(self.increments_by, 0) * sum(p.numel() * p.element_size() for p in decoder.parameters())

    def _slots_that_fit(self, decoder: Decoder, weight: Tensor) -> int:
        shape = decoder.shape
        each_bytes = slot_bytes(shape, weight.element_size())
        free_bytes = _free_bytes(weight.device)
        if weight.device.type != "cuda":
            return min(CPU_SLOTS, int(free_bytes * SHARE / 2) // each_bytes)
        spare_bytes = self._spare_bytes(shape, weight.element_size())
        spare_bytes += self._copied_bytes(cast(nn.Module, decoder))
        if (num_slots := int((free_bytes - spare_bytes) * SHARE) // each_bytes) < 1:
            raise MemoryError(
                f"beside the weights {free_bytes / GIB:.1f} GiB are free, of which {spare_bytes / GIB:.1f} are for "
                "computing and copies of weights: the rest holds no K/V slot"
            )
        return num_slots


def _free_bytes(device: torch.device) -> int:
    """Of a device's memory."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def one_of(key: str, value: str, valid: tuple[str, ...]) -> None:
    """Raises BadOption for a value that an option does not take."""
    if wrong := not_one_of(f"system.{key}", value, valid):
        raise BadOption(wrong)


def not_below(key: str, value: int, least: int) -> None:
    """Raises BadOption for an option below its least value, or above what a number of 32 bits holds."""
    if not least <= value <= MOST:
        most = f" and at most {MOST}" if value > MOST else ""
        raise BadOption(f"system.{key}={value} is not an integer of at least {least}{most}")
