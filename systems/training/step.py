"""One step of training as autograd and an optimizer carry it out, for systems that execute modules."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from systems.base import Loss, Prepared

from .restore import restored, state_kept


class ModuleStep(Prepared):
    """`step(*inputs, target)` runs forward, loss, backward and the optimizer's step one after another; returns the loss."""

    def __init__(self, forward: Callable[..., Any], optimizer: torch.optim.Optimizer, loss: Loss):
        self.forward: Callable[..., Any] | None = forward
        self.optimizer, self.loss = optimizer, loss

    def __call__(self, *inputs: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        value = self.differentiate(*inputs)
        self.optimizer.step()
        return value

    def differentiate(self, *inputs: Tensor) -> Tensor:
        """All but the optimizer's step: leaves gradients in the parameters."""
        if self.forward is None:
            raise RuntimeError("this step is closed")
        with torch.enable_grad():
            value = self.loss(self.forward(*inputs[:-1]), inputs[-1])
            value.backward()
        return value.detach()

    def close(self) -> None:
        self.forward = None


@contextmanager
def undone(module: nn.Module, *more: Tensor) -> Iterator[None]:
    """Undo what training steps within change: parameters and their gradients, what `state_kept` keeps, and `more`."""
    gradients = [(p, p.grad) for p in module.parameters()]
    for p, _ in gradients:
        p.grad = None
    try:
        with state_kept(module), restored((*module.parameters(), *more), []):
            yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
