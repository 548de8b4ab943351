"""Device memory, and streams with workspaces, that several captured schedules use in turn."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .cuda_streams import Streams


class Arena:
    """Gives each schedule a range of at least its size; schedules that never run at once may get the same one.

    A CUDA Graph holds addresses, so a range once given never moves. A schedule that needs more than there is gets a new
    range, which later ones share: prepare the largest shape first, and its arena serves all.

    Args:
        room: bytes of a new range over those that are asked for, so that schedules that need more share it. A range is no
            larger than asked for where memory does not allow it.

    Raises:
        ValueError: `room` is below 1.
    """

    def __init__(self, room: float = 1.0) -> None:
        if room < 1:
            raise ValueError(f"a range of {room} times what is asked for cannot hold it")
        self.room = room
        self.ranges: list[Tensor] = []
        self.streams_by_device: dict[torch.device, Streams] = {}

    def take(self, size: int, device: torch.device) -> Tensor:
        """At least `size` bytes on `device`, as uint8[>= size]: the smallest range that is large enough, or a new one."""
        fitting = [r for r in self.ranges if r.device == device and r.numel() >= size]
        if not fitting:
            self.ranges.append(self._new(size, device))
            return self.ranges[-1]
        return min(fitting, key=Tensor.numel)

    def _new(self, size: int, device: torch.device) -> Tensor:
        try:
            return torch.empty(ceil(size * self.room), dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            return torch.empty(size, dtype=torch.uint8, device=device)

    def streams(self, device: torch.device) -> Streams:
        """The streams of a GPU whose workspaces these schedules use; they are free again once this arena is gone."""
        from .cuda_streams import Streams  # CUDA's bindings: PyTorch for a CPU comes without

        if device not in self.streams_by_device:
            self.streams_by_device[device] = Streams(device)
        return self.streams_by_device[device]

    @property
    def size(self) -> int:
        """Bytes held."""
        return sum(r.numel() for r in self.ranges)
