"""The channel of control messages between workers, apart from tensors as in the chapter, or behind them."""

from __future__ import annotations

import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor

from .parts import Parts

END = b""  # the message after the last
AWAKE_S = 0.05  # that a worker looks for messages without sleep: whoever sleeps takes tens of microseconds to wake


@dataclass(frozen=True)
class Wiring:
    """File descriptors of a worker's pipes. None: it has no such pipe.

    Args:
        messages: control messages come by it.
        forwards: they go on by these, to the next stage first.
        answers: of the last stage's controller, to the engine.
    """

    messages: int | None
    forwards: tuple[int, ...]
    answers: int | None


class Control(ABC):
    """The channel of control messages, seen from one worker."""

    @abstractmethod
    def receive(self, meanwhile: Callable[[], bool] | None = None) -> bytes:
        """The next message.

        meanwhile: what to do while none has come; it says whether it has more to do. None: this process sleeps.
        """

    @abstractmethod
    def forward(self, message: bytes) -> None:
        """To whoever has it from this worker; nobody, but for a controller."""

    def connect(self) -> None:
        """Make what messages need, before the first."""


class PipeControl(Control):
    """Messages apart from tensors: the chapter's separate channel."""

    def __init__(self, wiring: Wiring):
        assert wiring.messages is not None
        self.messages = Connection(wiring.messages, writable=False)
        self.poll = select.poll()
        self.poll.register(wiring.messages, select.POLLIN)
        self.forwards = [Connection(descriptor, readable=False) for descriptor in wiring.forwards]

    def receive(self, meanwhile: Callable[[], bool] | None = None) -> bytes:
        if meanwhile is not None:
            end_s = time.monotonic() + AWAKE_S
            while not self.poll.poll(0):
                if meanwhile():
                    end_s = time.monotonic() + AWAKE_S
                elif time.monotonic() > end_s:
                    break
        return self.messages.recv_bytes()

    def forward(self, message: bytes) -> None:
        for connection in self.forwards:
            connection.send_bytes(message)


class TensorControl(Control):
    """Messages as tensors, behind what the devices compute: the ablation, which is what the chapter says of others.

    Args:
        wiring: of which the first controller's messages alone are used.
        parts, rank, device: of the worker.
        groups: of all workers, and of the stage; of messages alone.
    """

    def __init__(
        self,
        wiring: Wiring,
        parts: Parts,
        rank: int,
        device: torch.device,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
    ):
        self.messages = None if wiring.messages is None else Connection(wiring.messages, writable=False)
        self.parts, self.rank, self.device = parts, rank, device
        self.everyone, self.stage = groups

    def receive(self, meanwhile: Callable[[], bool] | None = None) -> bytes:
        if self.messages is not None:
            return self.messages.recv_bytes()
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._from_before(size)
        if not (count := int(size)):
            return END
        message = torch.empty(count, dtype=torch.uint8, device=self.device)
        self._from_before(message)
        return bytes(message.cpu().numpy())

    def forward(self, message: bytes) -> None:
        self._on(torch.tensor([len(message)], device=self.device))
        if message:
            self._on(torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self.device))

    def connect(self) -> None:
        number = torch.zeros(1, device=self.device)
        if self.messages is None:
            self._from_before(number)
        self._on(number)

    def _on(self, tensor: Tensor) -> None:
        stage, part = self.parts.place(self.rank)
        if part:
            return
        if stage < self.parts.pipeline - 1:
            dist.send(tensor, self.rank + self.parts.tensor, group=self.everyone)
        if self.parts.tensor > 1:
            dist.broadcast(tensor, self.rank, group=self.stage)

    def _from_before(self, tensor: Tensor) -> None:
        stage, part = self.parts.place(self.rank)
        if part:
            dist.broadcast(tensor, stage * self.parts.tensor, group=self.stage)
        else:
            dist.recv(tensor, self.rank - self.parts.tensor, group=self.everyone)
