"""Tensors between the parts of a model that are in processes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from .parts import Parts

if TYPE_CHECKING:
    from .direct import DirectSums

MANY = 2**20  # numbers, as those of an iteration with prompts


class Link:
    """Tensors between the parts of a model: NCCL between GPUs, or each other's memory for sums; gloo between CPUs.

    Args:
        parts, rank: whose link it is.
        group: of the parts of its stage.
    """

    def __init__(self, parts: Parts, rank: int, group: dist.ProcessGroup):
        self.parts, self.rank, self.group = parts, rank, group
        self.direct: DirectSums | None = None

    def sum(self, x: Tensor, addend: Tensor | None = None) -> None:
        """Over the parts of the stage, in place; the addend is added to it once."""
        if self.direct is not None and self.direct.takes(x):
            self.direct.sum(x, addend)
            return
        dist.all_reduce(x, group=self.group)
        if addend is not None:
            x.add_(addend)

    def gathered(self, x: Tensor) -> Tensor:
        """[R, n] of each part of the stage -> [R, n * parts]."""
        shares = [torch.empty_like(x) for _ in range(self.parts.tensor)]
        dist.all_gather(shares, x, group=self.group)
        return torch.cat(shares, -1)

    def send(self, x: Tensor) -> None:
        """To the same part of the next stage."""
        dist.send(x, self.rank + self.parts.tensor)

    def receive(self, x: Tensor) -> None:
        """From the same part of the stage before."""
        dist.recv(x, self.rank - self.parts.tensor)

    def reach(self, device: torch.device, dtype: torch.dtype) -> None:
        """Sum by the memory of others from now on, where the GPUs of the stage reach each other's."""
        first = self.rank - self.parts.place(self.rank)[1]
        if self.parts.tensor > 1 and device.type == "cuda":
            from .direct import DirectSums, reach_each_other  # it needs Triton

            if reach_each_other(list(range(first, first + self.parts.tensor))):
                self.direct = DirectSums(self.group, dtype, device)

    def connect(self, device: torch.device) -> None:
        """Make every communicator that the model uses. Numbers few and many go by algorithms with buffers of their own."""
        stage, _ = self.parts.place(self.rank)
        for count in (1, MANY):
            numbers = torch.zeros(count, device=device)
            if self.parts.tensor > 1:
                self.sum(numbers)
                self.gathered(numbers)
            if stage:
                self.receive(numbers)
            if stage < self.parts.pipeline - 1:
                self.send(numbers)
