"""A step of training as one scheduled program: forward, loss, backward and the optimizer's update."""

from __future__ import annotations

from torch import Tensor, nn

from systems.training.held_module import HeldModule
from systems.training.update import Update

from .members import casts, check_casts
from .scheduled import Scheduled


class TrainingStep(Scheduled):
    """A step of training, made ready. Steps must not overlap.

    Invariant: the step runs on the tensors that the module and the optimizer held when it was prepared. Whatever has taken
    the place of one of them since is an error, but for a buffer that fits: its value is copied into the captured one.
    """

    def __init__(self, module: nn.Module, update: Update, executor: Scheduled):
        self.update, self.executor = update, executor
        self.schedule, self.program, self.is_captured = executor.schedule, executor.program, executor.is_captured
        self.operator_threads = executor.operator_threads
        self.casts = casts()
        self.module = HeldModule(module)

    @property
    def memory(self) -> dict[str, int]:
        return self.executor.memory

    def __call__(self, *inputs: Tensor) -> Tensor:
        """One step.

        Args:
            inputs: the module's, then the target.

        Returns:
            The loss before the update, a tensor without gradient.

        Raises:
            ValueError: the inputs have other shapes, dtypes or another device than prepared, or a setting of the optimizer
                has changed that is captured; all but learning rates are.
            RuntimeError: the module has been switched between training and eval form, a parameter or buffer has been
                replaced, moved, frozen or unfrozen, or autocast is another.
        """
        self.program.check(inputs)
        check_casts(self.casts)
        self.module.check()
        self.update.refresh()
        value = self.executor(*inputs)
        self.update.finish()
        return value

    def close(self) -> None:
        self.executor.close()
