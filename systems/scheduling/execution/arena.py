"""Device memory that several captured schedules use in turn."""

import torch
from torch import Tensor


class Arena:
    """Gives each schedule a range of at least its size; schedules that never run at once may get the same one.

    A CUDA Graph holds addresses, so a range once given never moves. A schedule that needs more than there is gets a new
    range, which later ones share: prepare the largest shape first, and its arena serves all.
    """

    def __init__(self) -> None:
        self.ranges: list[Tensor] = []

    def take(self, size: int, device: torch.device) -> Tensor:
        """At least `size` bytes on `device`, as uint8[>= size]: the smallest range that is large enough, or a new one."""
        fitting = [r for r in self.ranges if r.device == device and r.numel() >= size]
        if not fitting:
            self.ranges.append(torch.empty(size, dtype=torch.uint8, device=device))
            return self.ranges[-1]
        return min(fitting, key=Tensor.numel)

    @property
    def size(self) -> int:
        """Bytes held."""
        return sum(r.numel() for r in self.ranges)
