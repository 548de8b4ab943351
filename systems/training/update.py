"""What becomes of the gradients of a captured step."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from conf.text import counted


class Update(ABC):
    """Operators of a step that take gradients, in a form that is captured once and replayed.

    Attributes:
        name: of these operators.
        target: the same as a schedule file has it.
        changes_parameters: whether they write the parameters.
        rates: by parameter group, the learning rate on the GPU, [], or None.
        moments: by parameter, the tensors beside it that they write, by name.
    """

    name: str
    target: str
    changes_parameters = True
    rates: Sequence[Tensor | None]
    moments: Mapping[Tensor, Mapping[str, Tensor]]

    @abstractmethod
    def group_of(self, parameter: Tensor) -> int:
        """The number of its group. Parameters of one group share an operator."""

    @abstractmethod
    def update(
        self,
        group: int,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: dict[str, list[Tensor]],
        rate: Tensor | None,
    ) -> None:
        """The operator: takes the gradients of some parameters of one group.

        Args:
            group: its number.
            parameters: [P].
            gradients: [P], of the parameters' shapes.
            moments: as `moments_of` returns them: by name, [P].
            rate: the learning rate on the GPU, []; None where there is none.
        """

    @abstractmethod
    def refresh(self) -> None:
        """Before each step.

        Raises:
            ValueError: The optimizer has other parameters since the capture, or a setting that it fixed has changed.
        """

    @abstractmethod
    def finish(self) -> None:
        """After each step."""

    def moments_of(self, parameters: Sequence[Tensor]) -> dict[str, list[Tensor]]:
        """The moments by name, one tensor for each of these parameters."""
        names = self.moments[parameters[0]]
        return {name: [self.moments[p][name] for p in parameters] for name in names}


class StoredGradients(Update):
    """Gradients that a step leaves in the parameters' `.grad`, for the optimizer to take after it.

    Args:
        optimizer: of any kind.
        parameters: those of the optimizer's that a step has gradients for.
    """

    name = "_foreach_copy_"
    target = "aten._foreach_copy_.default"
    changes_parameters = False

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Collection[Tensor]):
        self.optimizer = optimizer
        self.num_held = self._num_held()
        self.rates = [None]
        self.moments = {p: {"gradient": torch.zeros_like(p, requires_grad=False)} for p in parameters}

    def group_of(self, parameter: Tensor) -> int:
        return 0

    def update(
        self,
        group: int,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        moments: dict[str, list[Tensor]],
        rate: Tensor | None,
    ) -> None:
        torch._foreach_copy_(moments["gradient"], list(gradients))

    def refresh(self) -> None:
        if (now := self._num_held()) != self.num_held:
            raise ValueError(
                f"the optimizer held {counted(self.num_held, 'parameter')} when the step was prepared, and now {now}: "
                "prepare it again"
            )

    def finish(self) -> None:
        """The optimizer's own step, as after `backward()`."""
        self.optimizer.zero_grad()
        for parameter, moments in self.moments.items():
            parameter.grad = moments["gradient"]
        self.optimizer.step()

    def _num_held(self) -> int:
        return sum(len(group["params"]) for group in self.optimizer.param_groups)
