"""Activations that a model writes in several operators: which of those that kernels compute they are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from systems.scheduling.graph.patterns import VIEW, is_elementwise, only_user
from systems.scheduling.graph.program import Input, Output, Program

from .own_kernels import activation

aten = torch.ops.aten
# By the name that kernels have for them. Each holds one of CURVES.
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
CURVES = (aten.tanh.default, aten.sigmoid.default, aten.gelu.default)
MOST_OPERATORS = 12  # of an activation
CLOSE = 1e-9  # in fp64


@dataclass(frozen=True)
class Activation:
    """What alone reads a tensor.

    Args:
        operators: in the order of capture; the last returns the activation, and no other is read by others.
        name: that kernels have for it.
    """

    operators: tuple[int, ...]
    name: str


def activation_of(program: Program, readers: list[list[int]], v: int) -> Activation | None:
    """The activation that alone reads what operator v returns, as an operator of PyTorch's or written in several.

    It may read another view of that. Then others read it by views of their own, to which its shape is the same.
    """
    if (reader := only_user(readers[v])) is not None:
        if (name := activation(program, reader)) is not None:
            return Activation((reader,), name)
        if program.calls[reader].function is VIEW:
            inner = _written_out(program, readers, reader)
            if inner is None or not all(u >= 0 and program.calls[u].function is VIEW for u in readers[inner.operators[-1]]):
                return None
            return Activation((reader, *inner.operators), inner.name)
    return _written_out(program, readers, v)


def _written_out(program: Program, readers: list[list[int]], v: int) -> Activation | None:
    """By its values: operators that compute the same numbers as one of FORMS are that one, however they are written."""
    source = Output(v)
    within = _computed_of(program, readers, source)
    if not any(program.calls[u].function in CURVES for u in within):
        return None
    points = _points()
    values = {source: points}
    for k, last in enumerate(within):
        call = program.calls[last].map(lambda a: values[a] if isinstance(a, Output) else a)
        values[Output(last)] = call.function(*call.args, **call.kwargs)
        operators = (*within[:k], last)
        if not set(readers[v]) <= set(operators) or not all(set(readers[u]) <= set(operators) for u in within[:k]):
            continue
        for name, form in FORMS.items():
            if torch.allclose(values[Output(last)], form(points), CLOSE, CLOSE):
                return Activation(operators, name)
    return None


def _computed_of(program: Program, readers: list[list[int]], source: Output) -> list[int]:
    """Elementwise operators that read nothing but this tensor and each other, in the order of capture."""
    within: list[int] = []
    pending = {u for u in readers[source.operator] if u >= 0}
    while pending and len(within) <= MOST_OPERATORS:
        pending.remove(u := min(pending))
        if _reads_only(program, u, {source, *map(Output, within)}):
            within.append(u)
            pending |= {reader for reader in readers[u] if reader > u}
    return within


def _reads_only(program: Program, u: int, tensors: set[Output]) -> bool:
    def is_known(argument: Any) -> bool:
        return argument in tensors if isinstance(argument, Output) else not isinstance(argument, Input | Tensor)

    return is_elementwise(program, u) and all(map(is_known, program.calls[u].leaves()))


def _points() -> Tensor:
    """Where activations are compared: around 0, where they bend, and far from it."""
    return torch.cat(
        (torch.linspace(-12.0, 12.0, 2401, dtype=torch.float64), torch.tensor([-1e3, -60.0, 60.0, 1e3]).double())
    )
