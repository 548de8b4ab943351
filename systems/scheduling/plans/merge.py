"""Operator merge: convolutions of one input as one convolution (IOS, Section 3, "Operator merge")."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from systems.scheduling.graph.derived import Derived
from systems.scheduling.graph.effects import READERS_OF_MEMORY, is_view
from systems.scheduling.graph.patterns import ACTIVATIONS, CONVOLUTION, Convolution, convolution, is_norm
from systems.scheduling.graph.program import Call, Program
from systems.scheduling.graph.rewrite import Replacement

Pair = tuple[int, int]  # of height and width
MERGED = "merged_conv2d"  # the name of an operator that takes the place of several


@dataclass(frozen=True)
class _Member:
    """One of the convolutions to merge.

    Args:
        conv: the convolution itself.
        call: its call.
        norm: the call of its batch norm.
        activation: the call of its activation.
        last: the last operator of its unit.
    """

    conv: Convolution
    call: Call
    norm: Call | None
    activation: Call | None
    last: int


def merge(program: Program, units: Sequence[Sequence[int]]) -> Replacement | None:
    """One operator in the place of all `units`, or None where they cannot be merged.

    The kernels are stacked along the output channels, and so are biases and batch norms. The outputs are views of the merged
    operator's. They are copies with the strides of the separate operators' outputs in three cases: there are groups of
    channels, whose outputs interleave; the model returns the output; or a reader takes memory as it lies.

    Invariants of units that can be merged:
        - Each is a two-dimensional convolution, perhaps with a batch norm and an activation after it, the same for all.
        - All have one input, and equal stride, dilation and number of groups.
        - Zeros around the smaller kernels bring all to one kernel size and one padding.
    """
    matched = _match(program, units)
    if matched is None:
        return None
    members, (kernel, padding) = matched
    first, weights = members[0], [m.conv.weight for m in members]
    groups = first.conv.groups
    geometry = [(m.conv.padding, m.conv.dilation) for m in members]
    derived = [Derived.of(partial(_stack, kernel, padding, geometry, groups), *weights)]
    arguments: list[Any] = [derived[0].tensor]
    arguments.append(_stacked(derived, [m.conv.bias for m in members], weights, groups))
    if first.norm is not None:
        for i in (1, 2, 3, 4):
            vectors = [m.norm.args[i] for m in members]  # type: ignore[union-attr]
            arguments.append(_stacked(derived, vectors, weights, groups))
        arguments.append(first.norm.args[7])
    else:
        arguments += [None] * 5
    channels = [weight.shape[0] for weight in weights]
    shape = [list(first.conv.stride), list(padding), list(first.conv.dilation), groups]
    copied = [groups > 1 or _is_seen(program, m.last) for m in members]
    strides = [list(program.calls[m.last].produces.stride()) if c else None for c, m in zip(copied, members, strict=True)]
    call = Call(
        run_merged,
        (first.conv.x, *arguments, shape, channels, first.activation and _activation(first.activation)),
        {"strides": strides} if any(copied) else {},
        tuple(program.calls[m.last].produces for m in members),
    )
    operators = tuple(sorted(v for unit in units for v in unit))
    results: dict[int, int | None] = {m.last: i for i, m in enumerate(members)}
    return Replacement(operators, MERGED, f"opweave.{MERGED}", call, results, tuple(derived))


def merge_name(replacement: Replacement, units: Sequence[str]) -> str:
    """What tells what a merge costs: its units' signatures, and the strides of outputs that it copies.

    Args:
        replacement: as `merge` makes it.
        units: their signatures.
    """
    return " | ".join([*units, *(str(value) for value in replacement.call.kwargs.values())])


def mergeable(program: Program, units: Sequence[Sequence[int]]) -> bool:
    """Would `merge` give an operator? No weights are stacked to find out."""
    return _match(program, units) is not None


def _match(program: Program, units: Sequence[Sequence[int]]) -> tuple[list[_Member], tuple[Pair, Pair]] | None:
    """The convolutions, and the kernel size and padding that they have in common."""
    if len(units) < 2:
        return None
    members = [m for unit in units if (m := _member(program, unit)) is not None]
    if len(members) < len(units) or not _are_alike(members):
        return None
    frame = _frame(program, members)
    return None if frame is None else (members, frame)


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
    strides: Sequence[list[int] | None] = (),
) -> tuple[Tensor, ...]:
    """The merged operator: x [N, C, H, W] to one [N, channels[i], H', W'] for each convolution.

    Args:
        strides: of the outputs that are copied.
    """
    stride, padding, dilation, groups = shape
    y = CONVOLUTION(x, weight, bias, stride, padding, dilation, groups)
    if mean is not None:
        y = torch.batch_norm(y, gamma, beta, mean, variance, False, 0.0, epsilon, torch.backends.cudnn.enabled)  # type: ignore[arg-type]
    if activation is not None:
        function, rest = activation
        y = function(y, *rest)
    n, _, height, width = y.shape
    if groups == 1:
        parts = y.split(channels, dim=1)
    else:
        parts = y.view(n, groups, -1, height, width).split([c // groups for c in channels], dim=2)
    if not strides:
        return parts
    shapes = [(n, c, height, width) for c in channels]
    return tuple(p if s is None else _laid(p, shape, s) for p, shape, s in zip(parts, shapes, strides, strict=True))


def _laid(part: Tensor, shape: tuple[int, ...], strides: list[int]) -> Tensor:
    """A copy of the part, of this shape and with these strides."""
    out = part.new_empty_strided(shape, strides)
    out.view(part.shape).copy_(part)
    return out


def _is_seen(program: Program, v: int) -> bool:
    """Does anything depend on how the output of operator v lies in memory?"""
    readers = [program.calls[u].function for u in program.graph.successors[v]]
    return v in program.kept_operators() or any(is_view(f) or f in READERS_OF_MEMORY for f in readers)


def _activation(call: Call) -> tuple[Any, ...]:
    return call.function, tuple(call.args[1:])


def _member(program: Program, unit: Sequence[int]) -> _Member | None:
    first, *rest = [program.calls[v] for v in unit]
    conv = convolution(first, (CONVOLUTION,))
    if conv is None:
        return None
    norm = activation = None
    if rest and is_norm(rest[0]):
        norm, rest = rest[0], rest[1:]
    if rest and rest[0].function in ACTIVATIONS:
        activation, rest = rest[0], rest[1:]
    return None if rest else _Member(conv, first, norm, activation, unit[-1])


def _are_alike(members: Sequence[_Member]) -> bool:
    def kind(m: _Member) -> tuple[object, ...]:
        norm = None if m.norm is None else (m.norm.args[7], [a is None for a in m.norm.args[1:5]])
        activation = None if m.activation is None else _activation(m.activation)
        conv = m.conv
        return conv.x, conv.stride, conv.dilation, conv.groups, conv.weight.shape[1], conv.weight.dtype, norm, activation

    return all(kind(m) == kind(members[0]) for m in members)


def _frame(program: Program, members: Sequence[_Member]) -> tuple[Pair, Pair] | None:
    """The kernel size and the padding that all can be brought to, or None.

    Before a kernel stand as many zeros as the largest padding exceeds its own, in steps of the dilation.
    """
    first = members[0].conv
    kernel, padding = [], []
    for d in (0, 1):
        largest = max(m.conv.padding[d] for m in members)
        if any((largest - m.conv.padding[d]) % m.conv.dilation[d] for m in members):
            return None
        kernel.append(max((largest - m.conv.padding[d]) // m.conv.dilation[d] + m.conv.weight.shape[2 + d] for m in members))
        padding.append(largest)
        size = program.value(first.x).shape[2 + d]
        extent = size + 2 * largest - first.dilation[d] * (kernel[d] - 1) - 1
        out = extent // first.stride[d] + 1
        if extent < 0 or any(m.call.produces.shape[2 + d] != out for m in members):
            return None
    return (kernel[0], kernel[1]), (padding[0], padding[1])


def _stack(
    kernel: Pair,
    padding: Pair,
    geometry: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    groups: int,
    *weights: Tensor,
) -> Tensor:
    """[sum of K, C / groups, kernel height, kernel width]: each kernel within zeros, by groups of channels.

    Args:
        kernel: the common size.
        padding: the common padding.
        geometry: each convolution's own padding and dilation.
    """
    framed = []
    for weight, (own, dilation) in zip(weights, geometry, strict=True):
        top, left = ((padding[d] - own[d]) // dilation[d] for d in (0, 1))
        bottom, right = kernel[0] - top - weight.shape[2], kernel[1] - left - weight.shape[3]
        framed.append(torch.nn.functional.pad(weight, (left, right, top, bottom)))
    return _interleave(groups, *framed)


def _interleave(groups: int, *tensors: Tensor) -> Tensor:
    """Along the output channels: the first group's of every tensor, then the second's."""
    return torch.cat([part for parts in zip(*(t.chunk(groups) for t in tensors), strict=True) for part in parts])


def _stacked(
    derived: list[Derived], vectors: Sequence[Tensor | None], weights: Sequence[Tensor], groups: int
) -> Tensor | None:
    """Vectors of one number a channel, stacked; zeros in the place of a missing one, None where all are missing."""
    if all(t is None for t in vectors):
        return None
    full = [w.new_zeros(w.shape[0]) if t is None else t for t, w in zip(vectors, weights, strict=True)]
    derived.append(Derived.of(partial(_interleave, groups), *full))
    return derived[-1].tensor
