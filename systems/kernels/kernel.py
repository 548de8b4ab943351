"""What every kernel of this project is; imports no Triton."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

EARLY_CAPABILITY = (9, 0)  # compute capability from which GPUs launch kernels early


@dataclass(frozen=True, kw_only=True)
class Kernel(ABC):
    """A kernel with all that it is compiled for.

    Args:
        is_early: whether it is launched while the kernel before it ends (programmatic dependent launch). Its blocks take up
            SMs and wait there until that kernel has ended and what it wrote is seen.
    """

    is_early: bool = False

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Launch it on the current stream. Each kernel says what it takes."""
