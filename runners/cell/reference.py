"""Eager in a precision above the one that is measured, and again with weights and inputs half a unit of rounding away."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from models.model import TF32
from systems.arithmetic import disturb, epsilon, without_tf32
from systems.preparing import give_back

WIDE = {"fp64": torch.float64, "fp32": torch.float32}  # the highest first
FEWEST_DRAWS = 2  # they show whether the output depends on the inputs
SECONDS = 15.0  # after which no further draw is computed: fp64 takes long on a CPU
COPIES = 2.0  # free host memory that the reference needs, in sizes of its weights

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class References:
    """What the reference makes of the draws; of fewer than there are, where they take long.

    Args:
        precision: "fp64", "fp32", or the module's own.
        outputs: of each draw.
        disturbed: the same with weights and inputs half a unit of rounding away, an error that eager may have.
    """

    precision: str
    outputs: list[Any]
    disturbed: list[Any]


def references(module: Callable[..., object], draws: Sequence[Inputs], precision: str) -> References:
    """Compute the draws in fp64; in fp32 where that neither fits nor runs; in the module's own types where neither does.

    Args:
        module: eager; it does not change.
        draws: inputs of each call.
        precision: in which the module computes.
    """
    try:
        for name, dtype in WIDE.items():
            if isinstance(module, nn.Module) and _fits(module, dtype):
                try:
                    return _of_copy(module, draws, precision, name)
                except Exception:  # what a module raises that insists on its own types, or for which there is no memory
                    give_back()
        with _exact(torch.get_default_dtype()):
            outputs = _outputs(module, draws, None)
            disturbed = _outputs(module, draws[: len(outputs)], None, is_disturbed=True)
        return References("fp32" if precision in TF32 else precision, outputs, disturbed)
    finally:
        give_back()


def _of_copy(module: nn.Module, draws: Sequence[Inputs], precision: str, name: str) -> References:
    dtype = WIDE[name]
    with _exact(dtype):
        copy = deepcopy(module)._apply(lambda tensor: _as(tensor, dtype))
        outputs = _outputs(copy, draws, dtype)
        for i, (weight, own) in enumerate(zip(state(copy), state(module), strict=True)):
            if by := epsilon(own, precision):
                disturb(weight, i, by / 2)
        return References(name, outputs, _outputs(copy, draws[: len(outputs)], dtype, is_disturbed=True))


@torch.no_grad()
def _outputs(
    call: Callable[..., object], draws: Sequence[Inputs], dtype: torch.dtype | None, *, is_disturbed: bool = False
) -> list[Any]:
    begin, outputs = perf_counter(), list[Any]()
    for draw in draws:
        if len(outputs) >= FEWEST_DRAWS and perf_counter() - begin > SECONDS:
            break
        inputs = [_as(x.clone(), dtype) for x in draw]
        for i, (x, own) in enumerate(zip(inputs, draw, strict=True)):
            if is_disturbed and (by := epsilon(own, "fp32")):
                disturb(x, i, by / 2)
        outputs.append(call(*inputs))
    return outputs


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A floating-point or complex tensor in this precision; others, and any where it is None, as they are."""
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype)


def state(module: nn.Module) -> list[Tensor]:
    """Its parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def _fits(module: nn.Module, dtype: torch.dtype) -> bool:
    """Is there host memory for it? A GPU says so itself."""
    num_bytes = sum(t.numel() * dtype.itemsize for t in state(module) if not t.is_cuda)
    return COPIES * num_bytes < psutil.virtual_memory().available


@contextmanager
def _exact(dtype: torch.dtype) -> Iterator[None]:
    """New tensors are of this type, nothing uses TF32, and cuDNN times no algorithms."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with without_tf32():
            yield
    finally:
        torch.set_default_dtype(default)
