"""Operator merge: convolutions of one input as one convolution (IOS, Section 3, "Operator merge")."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from systems.scheduling.graph.derived import Derived
from systems.scheduling.graph.program import Call, Program
from systems.scheduling.graph.rewrite import Replacement

from .units import ACTIVATIONS

aten = torch.ops.aten


@dataclass(frozen=True)
class _Convolution:
    """One of the convolutions to merge, a pair for height and width of everything spatial. norm: its batch norm's call."""

    operator: int
    call: Call
    weight: Tensor  # [K, C / groups, kernel height, kernel width]
    bias: Tensor | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    norm: Call | None
    activation: Call | None
    last: int


def merge(program: Program, units: Sequence[Sequence[int]]) -> Replacement | None:
    """One operator in the place of all `units`, or None where they cannot be merged.

    They can be where each is a two-dimensional convolution, perhaps with a batch norm and an activation after it, the same
    for all; of one input, with equal stride, dilation and number of groups; and where zeros around the smaller kernels bring
    all to one size and one padding. The kernels are stacked along the output channels, and so are biases and batch norms;
    the outputs are views of the merged one's (copies where there are groups of channels, whose outputs interleave).
    """
    together = _together(program, units)
    if together is None:
        return None
    found, (kernel, padding) = together
    first = found[0]
    derived = [Derived.of(partial(_stack, kernel, padding, _geometry(found), first.groups), *(p.weight for p in found))]
    arguments: list[Any] = [derived[0].tensor]
    arguments.append(_stacked(derived, [p.bias for p in found], [p.weight for p in found], first.groups))
    if first.norm is not None:
        for i in (1, 2, 3, 4):
            given = [p.norm.args[i] for p in found]  # type: ignore[union-attr]
            arguments.append(_stacked(derived, given, [p.weight for p in found], first.groups))
        arguments.append(first.norm.args[7])
    else:
        arguments += [None] * 5
    channels = [p.weight.shape[0] for p in found]
    shape = [list(first.stride), list(padding), list(first.dilation), first.groups]
    call = Call(
        run_merged,
        (first.call.args[0], *arguments, shape, channels, first.activation and _activation(first.activation)),
        {},
        tuple(program.calls[p.last].produces for p in found),
    )
    operators = tuple(sorted(v for unit in units for v in unit))
    results: dict[int, int | None] = {p.last: i for i, p in enumerate(found)}
    return Replacement(operators, "merged_conv2d", "opweave.merged_conv2d", call, results, tuple(derived))


def mergeable(program: Program, units: Sequence[Sequence[int]]) -> bool:
    """Would `merge` give an operator? No weights are stacked to find out."""
    return _together(program, units) is not None


def _together(
    program: Program, units: Sequence[Sequence[int]]
) -> tuple[list[_Convolution], tuple[tuple[int, int], tuple[int, int]]] | None:
    """The convolutions, and the kernel size and padding that they have in common."""
    if len(units) < 2:
        return None
    parts = [_read(program, unit) for unit in units]
    found = [p for p in parts if p is not None]
    if len(found) < len(parts) or not _alike(found):
        return None
    frame = _frame(program, found)
    return None if frame is None else (found, frame)


def run_merged(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    epsilon: float | None,
    shape: list[Any],
    channels: list[int],
    activation: tuple[Any, ...] | None,
) -> tuple[Tensor, ...]:
    """The merged operator: x [N, C, H, W] to one [N, channels[i], H', W'] for each convolution."""
    stride, padding, dilation, groups = shape
    y = aten.conv2d.default(x, weight, bias, stride, padding, dilation, groups)
    if mean is not None:
        y = torch.batch_norm(y, gamma, beta, mean, variance, False, 0.0, epsilon, torch.backends.cudnn.enabled)  # type: ignore[arg-type]
    if activation is not None:
        function, rest = activation
        y = function(y, *rest)
    if groups == 1:
        return y.split(channels, dim=1)
    n, _, height, width = y.shape
    parts = y.view(n, groups, -1, height, width).split([c // groups for c in channels], dim=2)
    return tuple(p.reshape(n, -1, height, width) for p in parts)


def _activation(call: Call) -> tuple[Any, ...]:
    return call.function, tuple(call.args[1:])


def _read(program: Program, unit: Sequence[int]) -> _Convolution | None:
    calls = [program.calls[v] for v in unit]
    first, rest = calls[0], calls[1:]
    if first.function is not aten.conv2d.default or first.kwargs or not isinstance(first.args[1], Tensor):
        return None
    norm = activation = None
    if rest and rest[0].function is aten.batch_norm.default:
        norm, rest = rest[0], rest[1:]
    if rest and rest[0].function in ACTIVATIONS:
        activation, rest = rest[0], rest[1:]
    if rest:
        return None
    given = [*first.args, *[None, None, None, 1, 0, 1, 1][len(first.args) :]]
    _, weight, bias, stride, padding, dilation, groups = given
    stride, padding, dilation = _pair(stride), _pair(padding), _pair(dilation)
    return _Convolution(unit[0], first, weight, bias, stride, padding, dilation, groups, norm, activation, unit[-1])


def _pair(value: Any) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * (2 // len(values))


def _alike(parts: Sequence[_Convolution]) -> bool:
    def kind(p: _Convolution) -> tuple[Any, ...]:
        norm = None if p.norm is None else (p.norm.args[7], [a is None for a in p.norm.args[1:5]])
        activation = None if p.activation is None else _activation(p.activation)
        return p.call.args[0], p.stride, p.dilation, p.groups, p.weight.shape[1], p.weight.dtype, norm, activation

    return all(kind(p) == kind(parts[0]) for p in parts)


def _frame(program: Program, parts: Sequence[_Convolution]) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The size of kernel and the padding that all can be brought to, or None.

    Before a kernel stand as many zeros as the largest padding exceeds its own, in steps of the dilation.
    """
    kernel, padding = [], []
    for d in (0, 1):
        largest = max(p.padding[d] for p in parts)
        if any((largest - p.padding[d]) % p.dilation[d] for p in parts):
            return None
        kernel.append(max((largest - p.padding[d]) // p.dilation[d] + p.weight.shape[2 + d] for p in parts))
        padding.append(largest)
        size = program.value(parts[0].call.args[0]).shape[2 + d]
        extent = size + 2 * largest - parts[0].dilation[d] * (kernel[d] - 1) - 1
        out = extent // parts[0].stride[d] + 1
        if extent < 0 or any(p.call.produces.shape[2 + d] != out for p in parts):
            return None
    return (kernel[0], kernel[1]), (padding[0], padding[1])


def _geometry(parts: Sequence[_Convolution]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(p.padding, p.dilation) for p in parts]


def _stack(
    kernel: tuple[int, int],
    padding: tuple[int, int],
    geometry: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    groups: int,
    *weights: Tensor,
) -> Tensor:
    """[sum of K, C / groups, kernel height, kernel width]: each kernel in zeros, by groups of channels."""
    framed = []
    for weight, (own, dilation) in zip(weights, geometry, strict=True):
        top, left = ((padding[d] - own[d]) // dilation[d] for d in (0, 1))
        bottom, right = kernel[0] - top - weight.shape[2], kernel[1] - left - weight.shape[3]
        framed.append(torch.nn.functional.pad(weight, (left, right, top, bottom)))
    return _interleave(groups, *framed)


def _interleave(groups: int, *tensors: Tensor) -> Tensor:
    """Along the output channels: the first group's of every tensor, then the second's."""
    return torch.cat([part for parts in zip(*(t.chunk(groups) for t in tensors), strict=True) for part in parts])


def _stacked(derived: list[Derived], given: Sequence[Any], weights: Sequence[Tensor], groups: int) -> Tensor | None:
    """Vectors of one number a channel, stacked; zeros for those that are not there, None where none is."""
    if all(t is None for t in given):
        return None
    vectors = [w.new_zeros(w.shape[0]) if t is None else t for t, w in zip(given, weights, strict=True)]
    derived.append(Derived.of(partial(_interleave, groups), *vectors))
    return derived[-1].tensor
