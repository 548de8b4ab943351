"""How the elements of one tensor stand in another, through views and copies that change their order alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from systems.scheduling.graph.patterns import COPIES
from systems.scheduling.graph.program import Call

aten = torch.ops.aten
# They group the elements in another way and leave their order.
RESHAPES = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.flatten.using_ints, aten.unflatten.int),
)
MOVES = (*RESHAPES, *COPIES, aten.transpose.int, aten.permute.default, aten.select.int)


@dataclass(frozen=True)
class Factor:
    """A part of an axis's index i: i // step % size.

    Args:
        axis: of the source, by its number.
    """

    axis: int
    size: int
    step: int = 1


@dataclass(frozen=True)
class Rearrangement:
    """A tensor by its source's axes.

    Args:
        dims: the factors of each dimension, the slowest first; () of one of size 1.
        fixed: factors that stand at one index, which was selected.
    """

    dims: tuple[tuple[Factor, ...], ...]
    fixed: tuple[tuple[Factor, int], ...] = ()

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Rearrangement":
        """The source itself, whose axes are its dimensions."""
        return cls(tuple((Factor(axis, size),) if size > 1 else () for axis, size in enumerate(shape)))

    @property
    def shape(self) -> list[int]:
        return [prod(f.size for f in dim) for dim in self.dims]

    @property
    def factors(self) -> list[Factor]:
        """Of all dimensions, the slowest first; neighbours that are one part of an axis are one factor."""
        return _joined([f for dim in self.dims for f in dim])

    def after(self, call: Call) -> "Rearrangement | None":
        """What one of MOVES makes of it; None of another operator, or where a size splits no factor evenly."""
        if call.function in COPIES:
            return self
        if call.function in RESHAPES:
            dims = _grouped(self.factors, call.produces.shape)
            return None if dims is None else replace(self, dims=dims)
        if call.function is aten.transpose.int:
            i, j = call.args[1:3]
            order = list(range(len(self.dims)))
            order[i], order[j] = order[j], order[i]
            return replace(self, dims=tuple(self.dims[k] for k in order))
        if call.function is aten.permute.default:
            return replace(self, dims=tuple(self.dims[k] for k in call.args[1]))
        return self._selected(*call.args[1:3]) if call.function is aten.select.int else None

    def steps(self, shape: Sequence[int]) -> list[tuple[Any, tuple[Any, ...]]] | None:
        """The views that make it of its source: operators, each with its arguments after the tensor.

        The last one may group dimensions that no view groups, unless a copy stands before it.

        Args:
            shape: of the source.

        Returns:
            None where the factors are not exactly those of the axes.
        """
        used = [*(f for dim in self.dims for f in dim), *(f for f, _ in self.fixed)]
        refined: list[Factor] = []
        for axis, size in enumerate(shape):
            own = sorted((f for f in used if f.axis == axis), key=lambda f: -f.step)
            if [f.step for f in own] != [prod(f.size for f in own[i + 1 :]) for i in range(len(own))]:
                return None
            if prod(f.size for f in own) != size:
                return None
            refined += own
        steps: list[tuple[Any, tuple[Any, ...]]] = []
        if (sizes := [f.size for f in refined]) != list(shape):
            steps.append((aten.view.default, (sizes,)))
        for f, index in sorted(self.fixed, key=lambda item: -refined.index(item[0])):
            steps.append((aten.select.int, (refined.index(f), index)))
        remaining = [f for f in refined if all(f != other for other, _ in self.fixed)]
        order = [remaining.index(f) for dim in self.dims for f in dim]
        if order != sorted(order):
            steps.append((aten.permute.default, (order,)))
        if [remaining[k].size for k in order] != self.shape:
            steps.append((aten.view.default, (self.shape,)))
        return steps

    def _selected(self, dim: int, index: int) -> "Rearrangement | None":
        factors = _joined(self.dims[dim])
        if len(factors) > 1:
            return None
        dim %= len(self.dims)
        fixed = tuple((f, index % f.size) for f in factors)
        return Rearrangement((*self.dims[:dim], *self.dims[dim + 1 :]), (*self.fixed, *fixed))


def _joined(factors: Sequence[Factor]) -> list[Factor]:
    joined: list[Factor] = []
    for f in factors:
        if joined and joined[-1].axis == f.axis and joined[-1].step == f.size * f.step:
            joined[-1] = replace(f, size=joined[-1].size * f.size)
        else:
            joined.append(f)
    return joined


def _grouped(factors: Sequence[Factor], shape: Sequence[int]) -> tuple[tuple[Factor, ...], ...] | None:
    """The factors, in their order, as dimensions of these sizes; None where one would have to be split unevenly."""
    left, dims = [*factors], []
    for size in shape:
        dim: list[Factor] = []
        while (lacking := size // prod(f.size for f in dim)) > 1:
            if not left:
                return None
            f = left.pop(0)
            if f.size > lacking:
                if f.size % lacking:
                    return None
                rest = f.size // lacking
                left.insert(0, replace(f, size=rest))
                f = replace(f, size=lacking, step=f.step * rest)
            elif lacking % f.size:
                return None
            dim.append(f)
        dims.append(tuple(dim))
    return tuple(dims)
