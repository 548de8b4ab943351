"""What an operator of a program is: the vocabulary in which passes, schedulers and profiles match operators."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .program import Call, Input, Output, Program

aten = torch.ops.aten
CONVOLUTION = aten.conv2d.default
CONVOLUTIONS = (aten.conv1d.default, CONVOLUTION, aten.conv3d.default)
BATCH_NORM = aten.batch_norm.default
CONCATENATION = aten.cat.default
ADDITION = aten.add.Tensor
VIEW = aten.view.default
ACTIVATIONS = (aten.relu.default, aten.hardtanh.default, aten.silu.default, aten.sigmoid.default)  # after a convolution
UNTAGGED = (aten.floor_divide.default,)  # elementwise, which PyTorch does not say of it
GROUPED = aten._grouped_mm.default
CAST = aten._to_copy.default  # as those, where it changes the type of numbers alone
COPIES = (aten.clone.default,)  # tagged pointwise, but there to change a layout


@dataclass(frozen=True)
class Convolution:
    """A convolution whose weight and bias are the module's own. stride, padding, dilation: one number a spatial dimension.

    Args:
        x: what is convolved, [N, C, ...].
        weight: [K, C / groups, ...].
        bias: [K].
    """

    x: object
    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def convolution(call: Call, functions: Sequence[object] = CONVOLUTIONS) -> Convolution | None:
    """`call` as a convolution of a batch; None where it is none of `functions`, or its weight or bias is computed."""
    if call.function not in functions or call.kwargs or not isinstance(call.args[1], Tensor):
        return None
    arguments: list[Any] = [*call.args, *(None, None, None, 1, 0, 1, 1)[len(call.args) :]]
    x, weight, bias, stride, padding, dilation, groups = arguments
    if not isinstance(bias, Tensor | None) or (isinstance(call.produces, Tensor) and call.produces.dim() != weight.dim()):
        return None
    n = weight.dim() - 2
    return Convolution(x, weight, bias, _repeated(stride, n), _repeated(padding, n), _repeated(dilation, n), groups)


def is_norm(call: Call) -> bool:
    """Is it a batch norm in eval form whose scale, shift and statistics are the module's own?"""
    return call.function is BATCH_NORM and all(isinstance(t, Tensor | None) for t in call.args[1:5])


def is_reshape(program: Program, v: int) -> bool:
    """Is it another shape of a contiguous tensor, which no kernel computes?"""
    call = program.calls[v]
    return call.function is VIEW and program.value(call.args[0]).is_contiguous()


def is_elementwise(program: Program, v: int) -> bool:
    """Does the operator compute each element of its output from those at the same place? In eval form a batch norm does."""
    function = program.calls[v].function
    if function is BATCH_NORM:
        return True
    tags = getattr(function, "tags", ())
    return (
        (torch.Tag.pointwise in tags or function in UNTAGGED or is_cast(program.calls[v]))
        and torch.Tag.nondeterministic_seeded not in tags
        and function not in COPIES
        and isinstance(program.calls[v].produces, Tensor)
        and reads_tensors(program, v)
    )


def is_cast(call: Call) -> bool:
    """Does it change the type of numbers, and neither where they are nor how they lie?"""
    return call.function is CAST and len(call.args) == 1 and set(call.kwargs) == {"dtype"}


def references(call: Call) -> list[Output | Input]:
    """What the call reads of other operators and of the model's inputs, in order."""
    return [a for a in call.leaves() if isinstance(a, Output | Input)]


def reads_tensors(program: Program, v: int) -> bool:
    """Is nothing that the operator reads from others a number, as `.item()` computes?"""
    return all(isinstance(program.value(a), Tensor) for a in references(program.calls[v]))


def users(program: Program) -> list[list[int]]:
    """For each operator those that read it, in order; an output of the model counts as a reader too, as -1."""
    out: list[list[int]] = [list(readers) for readers in program.graph.successors]
    for v in program.kept_operators():
        out[v].append(-1)
    return out


def only_user(readers: Iterable[int]) -> int | None:
    """The one operator among `readers`, or None where there are none, several, or the model's output."""
    operators = list(readers)
    return operators[0] if len(operators) == 1 and operators[0] >= 0 else None


def _repeated(size: int | Sequence[int], num_dimensions: int) -> tuple[int, ...]:
    """One number a dimension, of a single number for all or one for each."""
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return sizes * (num_dimensions // len(sizes))
