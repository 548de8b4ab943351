"""Nimble's training: a whole step scheduled ahead of time over the joint graph of forward, backward and optimizer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from systems.base import Prepared
from systems.scheduling.execution.execute import execute
from systems.scheduling.graph.joint_graph import capture_step
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.plans.schedule import Schedule
from systems.scheduling.plans.stream_assignment import assign_streams
from systems.training.optimizers import StaticOptimizer, fits
from systems.training.step import Loss


def prepare_training(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    example_inputs: Tensor | Sequence[Tensor],
    example_target: Tensor,
    *,
    assign: Callable[[OperatorGraph], Schedule] = assign_streams,
) -> TrainingStep:
    """Make one step of training ready: `step(*inputs, target)` does what this does, and returns the loss.

        optimizer.zero_grad()
        value = loss(module(*inputs), target)
        value.backward()
        optimizer.step()

    Forward, loss, backward and optimizer are one graph of operators on the streams that `assign` gives them (Nimble, Section
    4.2; 4.1 for capturing a training iteration), with the updates beside the rest of backward. The module is trained in the
    form that it is in now. Parameters, buffers and the optimizer's state stay where they are, so that state_dict, schedulers
    of the learning rate and eager steps in between work as ever; `.grad` is neither read nor written. Preparing changes
    neither of them, nor the random state; random numbers are drawn as by an eager step.

    loss: a function of the module's output and the target; its value is a single number. Raises Unsupported for other
    optimizers than SGD and AdamW, and for what cannot be captured.
    """
    inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
    program, static = capture_step(module, optimizer, loss, inputs, example_target)
    return TrainingStep(module, static, execute(program, assign(program.graph)))


class TrainingStep(Prepared):
    """A step of training, made ready. Steps must not overlap."""

    def __init__(self, module: nn.Module, optimizer: StaticOptimizer, executor: Prepared):
        self.optimizer, self.executor = optimizer, executor
        self.schedule, self.program, self.captured = executor.schedule, executor.program, executor.captured
        self.modules = list(module.modules())
        self.forms = [m.training for m in self.modules]
        self.owners: list[dict[str, Any]] = [d for m in self.modules for d in (m._modules, m._parameters, m._buffers)]
        self.holds = [dict(owner) for owner in self.owners]
        self.held = _held(self.owners)
        self.tensors = [x for x in self.held if isinstance(x, Tensor)]
        self.addresses = [t.data_ptr() for t in self.tensors]

    @property
    def memory(self) -> dict[str, int]:
        return self.executor.memory

    def __call__(self, *inputs: Tensor) -> Tensor:
        """inputs: the module's, then the target. Returns the loss before the update, a tensor without gradient.

        Raises ValueError for inputs of other shapes, dtypes or another device than prepared, and where a setting of the
        optimizer has changed that is captured (all but learning rates are); RuntimeError where the module has been switched
        between training and eval form, or a parameter or buffer has been replaced or moved.
        """
        assert self.program is not None
        self.program.check(inputs)
        self._check_module()
        self.optimizer.refresh()
        value = self.executor(*inputs)
        self.optimizer.optimizer._opt_called = True  # type: ignore[attr-defined]  # or learning-rate schedulers warn
        return value

    def close(self) -> None:
        self.executor.close()

    def _check_module(self) -> None:
        """Before each step, so lists are compared as wholes, and only what differs is looked into."""
        forms = [m.training for m in self.modules]
        if forms != self.forms:
            i = next(i for i, (now, then) in enumerate(zip(forms, self.forms, strict=True)) if now != then)
            form = "training" if self.forms[i] else "eval"
            raise RuntimeError(
                f"{type(self.modules[i]).__name__} was in {form} form when the step was prepared: prepare it again"
            )
        now = _held(self.owners)
        if len(now) != len(self.held) or not all(map(operator.is_, now, self.held)):
            self._take_buffers_over()
        if list(map(Tensor.data_ptr, self.tensors)) != self.addresses:
            raise RuntimeError("a parameter or buffer of the module has moved since the step was prepared: prepare it again")

    def _take_buffers_over(self) -> None:
        """A buffer may be assigned anew, as an eager forward may do: the captured one takes its value and its place."""
        for owner, holds in zip(self.owners, self.holds, strict=True):
            for name in owner.keys() | holds.keys():
                now: Any = owner.get(name)
                then = holds.get(name)
                if now is then:
                    continue
                if isinstance(then, nn.Parameter) or not isinstance(then, Tensor) or not fits(now, then):
                    raise RuntimeError(
                        f"{name} of the module has been replaced since the step was prepared: prepare it again"
                    )
                with torch.no_grad():
                    owner[name] = then.copy_(now)


def _held(owners: list[dict[str, Any]]) -> list[Any]:
    return [x for owner in owners for x in owner.values()]
