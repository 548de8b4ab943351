"""Nimble as a library: a module in the place of a module."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from systems.base import Prepared
from systems.scheduling.execution.arena import Arena
from systems.scheduling.graph.program import describe

from .system import NimbleSystem

Shape = tuple[tuple[torch.Size, torch.dtype, torch.device], ...]


class Nimble(nn.Module):
    """`Nimble(module).prepare(example_inputs)`, then call it like `module`: each call replays a schedule made ahead of time.

    Its parameters, buffers and submodules are those of `module` itself, under the same names, so that it can stand wherever
    the module does: in a larger module, in an optimizer, in a checkpoint. New weights written in place are used by the next
    call. Further shapes are prepared by further calls of `prepare`; their executions share one arena of device memory, so
    calls must not run at the same time (a call on another stream waits for the last one).

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
        self.prepared: dict[Shape, Prepared] = {}
        self.placed: dict[Shape, list[tuple[Tensor, int]]] = {}
        self.arena = Arena()
        self.lock = threading.Lock()
        self.last: torch.cuda.Event | None = None

    def prepare(self, example_inputs: Tensor | Sequence[Tensor], training: bool = False, **of_training: Any) -> Any:
        """Make calls with inputs of these shapes, dtypes and device ready; returns this module.

        The module is captured in eval form, whatever form it is in. It, its statistics and the random state stay as they
        are. With training=True it is one step of training that is made ready, and what is returned is a function
        `step(*inputs, target) -> loss`: pass `optimizer`, `loss` (a function of the module's output and the target) and
        `example_target`, as to `prepare_training`.

        Raises Unsupported where the module cannot be captured, TypeError for inputs that are no tensors.
        """
        inputs = (example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)
        if not inputs or not all(isinstance(x, Tensor) for x in inputs):
            raise TypeError("example_inputs is a tensor or a sequence of tensors")
        if training:
            from .training import prepare_training

            return prepare_training(self.module, example_inputs=inputs, assign=self.system.assign, **of_training)
        if of_training:
            raise TypeError(f"{', '.join(of_training)}: for training=True alone")
        shape = _shape(inputs)
        if shape in self.prepared:
            self.prepared.pop(shape).close()
        with _random_state_kept(inputs), _eval_form(self.module):
            self.prepared[shape] = self.system.prepare(self.module, inputs, arena=self.arena)
        self.placed[shape] = [(t, t.data_ptr()) for t in (*self.parameters(), *self.buffers())]
        return self

    def forward(self, *inputs: Tensor) -> Any:
        """The module's output, in eval form and without gradients.

        Raises ValueError for inputs of shapes, dtypes or a device that were not prepared, RuntimeError where the module is
        in training form or its weights have moved since.
        """
        if self.training:
            raise RuntimeError("it was prepared for inference: call eval() first, or prepare(..., training=True)")
        prepared = self.prepared.get(_shape(inputs)) if all(isinstance(x, Tensor) for x in inputs) else None
        if prepared is None:
            ready = "; ".join(_names(shape) for shape in self.prepared) or "nothing"
            raise ValueError(
                f"called with {', '.join(map(describe, inputs))}, prepared for {ready}: prepare these inputs too"
            )
        with self.lock, self._after_the_last(inputs):
            out = prepared(*inputs)
        # Asked while a GPU is busy with it.
        if any(t.data_ptr() != address for t, address in self.placed[_shape(inputs)]):
            raise RuntimeError("a parameter or buffer of the module has moved since prepare: prepare again")
        return out

    @contextmanager
    def _after_the_last(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """On a GPU: after the last call of any shape, which used the same arena, has ended."""
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
        self.placed.clear()
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


def _random_state_kept(inputs: Sequence[Tensor]) -> Any:
    return torch.random.fork_rng(devices=sorted({x.device.index or 0 for x in inputs if x.is_cuda}))
