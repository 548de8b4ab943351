"""What a system that serves is: it puts a scheduler and an engine together for a decoder."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor, nn

from conf import not_one_of
from systems.base import BadOption, Prepared, System, Unsupported

from .engine import ATTENTIONS, Decoder, Engine, LocalEngine
from .loop import Clock, Course, Inbox, serve
from .peer import PeerServer
from .request import Delivery
from .scheduler import Scheduler

AUTO = "auto"
GIB = 2**30
SHARE = 0.95  # of the device's memory that is free once the weights are there
LEAST_SPARE_BYTES = 2 * GIB  # of it, for what an iteration computes
USUAL_PROMPT = 1 / 4  # of all positions: prompts of a batch are seldom longer on average
WIDTHS_OF_TOKEN = 14  # tensors as wide as the model that are alive at once, the inner ones of a block as several
CPU_SLOTS = 16384  # by default


@dataclass(frozen=True)
class Server:
    """Ready to serve. bounds: K/V slots, positions and vocabulary, within which requests can be served."""

    scheduler: Scheduler
    engine: Engine
    bounds: tuple[int, int, int]

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
        return serve(self.scheduler, self.engine, inbox, deliver, clock, course)


class AnyServingSystem(System):
    """A system whose work comes as requests: `prepare_serving` in the place of `prepare`.

    max_batch_size: requests of a batch.
    needs_weights: it computes with the decoder's weights; one elsewhere needs its size alone.
    """

    max_batch_size: int
    needs_weights: bool = True

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        raise Unsupported(f"{self.name} serves requests and executes no module by itself: runner=serving")

    @abstractmethod
    def prepare_serving(self, decoder: Decoder) -> Server | PeerServer:
        """Make a server for a decoder that is on its device. Raises BadOption, Unsupported, MemoryError."""


class ServingSystem(AnyServingSystem):
    """One of ours, which differ in their scheduler.

    Args:
        attention: auto (fused on a GPU, split on a CPU), or one of ATTENTIONS.
        cuda_graphs: iterations of increments alone are CUDA graphs.
        slots: of the K/V manager; 0 is all that there is room for.
        max_batch_size: requests of a batch.
    """

    def __init__(self, attention: str, cuda_graphs: bool, slots: int, max_batch_size: int):
        one_of("attention", attention, (AUTO, *ATTENTIONS))
        not_below("slots", slots, 0)
        not_below("max_batch_size", max_batch_size, 1)
        self.attention, self.cuda_graphs = attention, cuda_graphs
        self.slots, self.max_batch_size = slots, max_batch_size

    def unsupported(self, device: str) -> str | None:
        if device == "cpu" and self.attention == "fused":
            return "attention=fused is a kernel for a GPU; on a CPU there is attention=split"
        return None

    @abstractmethod
    def prepare_serving(self, decoder: Decoder) -> Server: ...

    def engine(self, decoder: Decoder, block_size: int = 0) -> tuple[LocalEngine, int]:
        """An engine, and its K/V slots."""
        assert isinstance(decoder, nn.Module)
        weight = next(decoder.parameters())
        on_gpu = weight.device.type == "cuda"
        num_slots = self.slots or self._slots_that_fit(decoder, weight)
        attention = self.attention if self.attention != AUTO else ATTENTIONS[on_gpu]
        engine = LocalEngine(decoder, num_slots, block_size, attention, self.cuda_graphs, self.max_batch_size)
        return engine, num_slots

    def most_tokens(self, num_positions: int) -> int:
        """Tokens that an iteration has room for, where no slots are asked for."""
        return int(self.max_batch_size * num_positions * USUAL_PROMPT)

    def _slots_that_fit(self, decoder: Decoder, weight: Tensor) -> int:
        shape = decoder.shape
        slot_bytes = 2 * shape.layers * shape.heads * shape.head_size * weight.element_size()
        if weight.device.type != "cuda":
            return min(CPU_SLOTS, int(psutil.virtual_memory().available * SHARE / 2) // slot_bytes)
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info()
        width_bytes = shape.heads * shape.head_size * weight.element_size()
        spare_bytes = max(LEAST_SPARE_BYTES, self.most_tokens(shape.positions) * WIDTHS_OF_TOKEN * width_bytes)
        if (num_slots := int((free_bytes - spare_bytes) * SHARE) // slot_bytes) < 1:
            raise MemoryError(f"beside the weights {free_bytes / GIB:.1f} GiB are free, which hold no K/V slot")
        return num_slots


def one_of(key: str, value: str, valid: tuple[str, ...]) -> None:
    """Raises BadOption for a value that an option does not take."""
    if wrong := not_one_of(f"system.{key}", value, valid):
        raise BadOption(wrong)


def not_below(key: str, value: int, least: int) -> None:
    """Raises BadOption for an option below its least value."""
    if value < least:
        raise BadOption(f"system.{key}={value} is not an integer of at least {least}")
