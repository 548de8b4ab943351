"""What every system under test is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from systems.scheduling.plans.schedule import Schedule

if TYPE_CHECKING:  # they need what is defined here
    from systems.scheduling.graph.program import Program
    from systems.training.step import Loss


class Unsupported(Exception):
    """This system cannot run this model on this device with this installation; the message is the reason, in one line."""

    def __init__(self, reason: str):
        super().__init__(" ".join(reason.split()))


class BadOption(ValueError):
    """A system's option has a value that it does not take."""


class Prepared(ABC):
    """A module made ready for one shape of inputs; call it in the module's place."""

    schedule: Schedule | None = None
    program: Program | None = None  # the module as captured, where the system captures operators
    captured: bool = False  # a call is one replay of one CUDA Graph
    compilation: dict[str, Any] = {}  # what a record shall say of a compiler's part in it: seconds, trials, what was tried

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that this system knows of itself, by name; what it reserves beside torch's allocator among them."""
        return {}

    @abstractmethod
    def __call__(self, *inputs: Tensor) -> Any: ...

    def close(self) -> None:
        """Give back threads and device memory."""


class PreparedModule(Prepared):
    """A system that is called like a module and keeps its own memory in torch's allocator."""

    def __init__(self, call: Any):
        self.call = call

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> Any:
        return self.call(*inputs)

    def close(self) -> None:
        self.call = None


class System(ABC):
    """One way of executing a model. `prepare` may take long; calling what it returns is what is measured."""

    name: str
    report: Callable[[str], None] = staticmethod(lambda message: None)  # told what a long preparation is at
    profiled = False  # whether preparing has run a profiler in this process, which slows launches ever after
    own_randomness = False  # in training it draws other random numbers than eager execution from the same state

    def unsupported(self, device: str) -> str | None:
        """Why this system cannot run on this kind of device ("cpu" or "cuda") or installation, or None."""
        return None

    @abstractmethod
    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        """Make `module` (in eval form) ready for inputs of these shapes, dtypes and device.

        Raises Unsupported where this system cannot run this module.
        """

    def prepare_training(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, inputs: tuple[Tensor, ...], target: Tensor
    ) -> Prepared:
        """Make one step of training of `module` (in training form) ready for inputs and target like these.

        Calling it with (*inputs, target) updates the module by the optimizer, and returns the loss. Preparing changes
        neither of them. Raises Unsupported where this system cannot train, or not this module.
        """
        raise Unsupported(f"{self.name} runs inference only")

    def schedule(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Schedule:
        """The schedule alone, without executing the model. Raises Unsupported where a system has none."""
        raise Unsupported(f"{self.name} has no schedule of operators")
