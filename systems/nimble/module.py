"""Nimble as a library: a module in the place of a module."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from systems.base import Loss
from systems.scheduling.execution.arena import Arena
from systems.scheduling.execution.scheduled import Scheduled
from systems.scheduling.execution.training_step import TrainingStep
from systems.scheduling.graph.program import describe

from .system import NimbleSystem

Shape = tuple[tuple[torch.Size, torch.dtype, torch.device], ...]


class Nimble(nn.Module):
    """`Nimble(module).prepare(example_inputs)`, then call it like `module`: each call replays a schedule made ahead of time.

    Its parameters, buffers and submodules are those of `module` itself, under the same names. So it can stand wherever the
    module does: in a larger module, in an optimizer, in a checkpoint. The next call uses new weights that are written in
    place. Further calls of `prepare` make further shapes ready; all shapes share one arena of device memory. So calls must
    not run at the same time; a call on another stream waits for the last one.

    Args:
        module: in eval form for inference, in training form for steps of training.
        options: as in conf/system/nimble.yaml.
    """

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__()
        # Not a submodule: the names in state_dict are to stay the module's own.
        self.__dict__["module"] = module
        for own in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[own] = getattr(module, own)
        self.__dict__["training"] = module.training
        self.system = NimbleSystem(**options)
        self.prepared: dict[Shape, Scheduled] = {}
        self.addresses: dict[Shape, list[tuple[Tensor, int]]] = {}
        self.arena = Arena()
        self.lock = threading.Lock()
        self.last: torch.cuda.Event | None = None

    def prepare(self, example_inputs: Tensor | Sequence[Tensor], training: bool = False, **training_arguments: Any) -> Any:
        """Make calls with inputs of these shapes, dtypes and device ready.

        The module is captured in eval form, whatever form it is in. The module, its statistics and the random state stay as
        they are.

        Args:
            example_inputs: of the shapes, dtypes and device that calls will have.
            training: make one step of training ready instead.
            training_arguments: `optimizer`, `loss` (a function of the module's output and the target) and `example_target`.

        Returns:
            This module, or for training a function `step(*inputs, target) -> loss`.

        Raises:
            Unsupported: the module cannot be captured.
            TypeError: the inputs are no tensors.
        """
        inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
        if not inputs or not all(isinstance(x, Tensor) for x in inputs):
            raise TypeError("example_inputs is a tensor or a sequence of tensors")
        if training:
            return self._prepare_training(inputs, **training_arguments)
        if training_arguments:
            raise TypeError(f"{', '.join(training_arguments)}: for training=True alone")
        shape = _shape(inputs)
        if shape in self.prepared:
            self.prepared.pop(shape).close()
        with _preserved_random_state(inputs), _eval_form(self.module):
            self.prepared[shape] = self.system.prepare(self.module, inputs, arena=self.arena)
        self.addresses[shape] = [(t, t.data_ptr()) for t in (*self.parameters(), *self.buffers())]
        return self

    def _prepare_training(
        self,
        inputs: tuple[Tensor, ...],
        *,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        example_target: Tensor,
    ) -> TrainingStep:
        return self.system.prepare_training(self.module, optimizer, loss, inputs, example_target)

    def forward(self, *inputs: Tensor) -> Any:
        """The module's output, in eval form and without gradients.

        Raises:
            ValueError: inputs of these shapes, dtypes or device were not prepared.
            RuntimeError: the module is in training form, or its weights have moved since.
        """
        if self.training:
            raise RuntimeError("it was prepared for inference: call eval() first, or prepare(..., training=True)")
        prepared = self.prepared.get(_shape(inputs)) if all(isinstance(x, Tensor) for x in inputs) else None
        if prepared is None:
            ready = "; ".join(_names(shape) for shape in self.prepared) or "nothing"
            raise ValueError(
                f"called with {', '.join(map(describe, inputs))}, prepared for {ready}: prepare these inputs too"
            )
        with self.lock, self._after_last_call(inputs):
            out = prepared(*inputs)
        # Checked after the launch, so that the check overlaps the GPU's work.
        if any(t.data_ptr() != address for t, address in self.addresses[_shape(inputs)]):
            raise RuntimeError("a parameter or buffer of the module has moved since prepare: prepare again")
        return out

    @contextmanager
    def _after_last_call(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """On a GPU, wait for the last call of any shape, since all shapes share one arena (WAR)."""
        if not inputs[0].is_cuda:
            yield
            return
        stream = torch.cuda.current_stream(inputs[0].device)
        if self.last is not None:
            stream.wait_event(self.last)
        yield
        self.last = stream.record_event(self.last)

    def train(self, mode: bool = True) -> Nimble:
        self.module.train(mode)
        self.__dict__["training"] = mode
        return self

    def close(self) -> None:
        """Give back threads and device memory; the module stays as it is."""
        for prepared in self.prepared.values():
            prepared.close()
        self.prepared.clear()
        self.addresses.clear()
        self.arena = Arena()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """The module's own attributes, where this wrapper has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def _shape(inputs: Sequence[Tensor]) -> Shape:
    return tuple((x.shape, x.dtype, x.device) for x in inputs)


def _names(shape: Shape) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(size)} on {device}" for size, dtype, device in shape)


@contextmanager
def _eval_form(module: nn.Module) -> Iterator[None]:
    training = [m for m in module.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True


def _preserved_random_state(inputs: Sequence[Tensor]) -> Any:
    return torch.random.fork_rng(devices=sorted({x.device.index or 0 for x in inputs if x.is_cuda}))
