"""Matrix products whose rows can come in another order, so that nothing around them is copied."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from systems.scheduling.graph.capture import on_meta
from systems.scheduling.graph.patterns import COPIES, VIEW
from systems.scheduling.graph.program import Call, Output, Program

from .patterns import returned_operators
from .rearrangement import MOVES, RESHAPES, Factor, Rearrangement
from .strides import is_computed

LINEAR = torch.ops.aten.linear.default
CLONE = torch.ops.aten.clone.default


@dataclass(frozen=True)
class RowPlace:
    """A product whose rows can come in another order.

    Args:
        linear: the product's id.
        source: whose rows it reads.
        before: views and copies from there to it.
        after: views and copies behind it.
        product: as it is instead. It returns what lies in the order of its dimensions.
        results: by what is read by others, the product or some of `after`: views of `product` that stand for it.
    """

    linear: int
    source: Any
    before: tuple[int, ...]
    after: tuple[int, ...]
    product: Call
    results: dict[int, Call]


def row_places(program: Program) -> list[RowPlace]:
    """Of two products with nothing but moves between them the first alone: the second reads what stands for those."""
    places: dict[int, RowPlace] = {}
    for v in range(len(program.graph)):
        place = _place(program, v)
        if place is None or (place.before and isinstance(place.source, Output) and place.source.operator in places):
            continue
        places[v] = place
    return list(places.values())


def _place(program: Program, v: int) -> RowPlace | None:
    call = program.calls[v]
    if call.function is not LINEAR or call.kwargs or not isinstance(call.produces, Tensor):
        return None
    weight, *biases = map(program.value, call.args[1:])
    if weight.dim() != 2 or any(b is not None and b.dim() > 1 for b in biases) or not call.produces.numel():
        return None  # such a bias has rows of its own
    before, source = _moves_before(program, call.args[0])
    if program.changed and not is_computed(program, source):  # it may be written between a copy of it and the product
        return None
    read = _through(program, Rearrangement.of(program.value(source).shape), before)
    after = list(_moves_after(program, v))
    if read is None or not read.dims or not returned_operators(program).isdisjoint([v, *after]):
        return None
    rows = [f for dim in read.dims[:-1] for f in dim]  # each an axis of the result, which ends with the columns
    width = call.produces.shape[-1]
    counted = iter(range(len(rows)))
    dims = [tuple(Factor(next(counted), f.size) for f in dim) for dim in read.dims[:-1]]
    own = Rearrangement((*dims, (Factor(len(rows), width),) if width > 1 else ()))
    read_of = {v: own}  # what each operator returns, by the axes of the result
    for u in after:
        moved = read_of[program.calls[u].args[0].operator].after(program.calls[u])
        if moved is None:
            return None
        read_of[u] = moved
    ends = {u: read_of[u] for u in (v, *after) if not set(program.graph.successors[u]) <= set(after)}
    if not ends:
        return None
    is_copied = any(_regroups_a_copy(program, u, v) for u in after)
    as_needed = _orders(ends.values(), len(rows))
    as_captured = list(range(len(rows)))
    as_they_lie = sorted(as_captured, key=lambda i: (rows[i].axis, -rows[i].step))
    orders = [(order, True) for order in (as_they_lie, *as_needed, as_captured)] + [(order, False) for order in as_needed]
    for order, is_free in orders:
        if order == as_captured and not is_copied:
            continue
        product = _product(program, call, source, [rows[i] for i in order], read, is_free)
        results = None if product is None else _results(product, order, ends)
        if product is not None and results is not None:
            return RowPlace(v, source, tuple(before), tuple(after), product, results)
    return None


def _moves_before(program: Program, reference: Any) -> tuple[list[int], Any]:
    """The views and copies that lead to a tensor, in order, and what they begin with."""
    moves: list[int] = []
    while isinstance(reference, Output) and reference.index is None and program.calls[reference.operator].function in MOVES:
        moves.insert(0, reference.operator)
        reference = program.calls[reference.operator].args[0]
    return moves, reference


def _moves_after(program: Program, v: int) -> Iterator[int]:
    """The views and copies behind operator v, in the order of capture."""
    moved = {v}
    for u in range(v + 1, len(program.graph)):
        call = program.calls[u]
        if call.function in MOVES and isinstance(call.args[0], Output) and call.args[0].operator in moved:
            moved.add(u)
            yield u


def _through(program: Program, read: Rearrangement | None, moves: Sequence[int]) -> Rearrangement | None:
    for u in moves:
        read = None if read is None else read.after(program.calls[u])
    return read


def _regroups_a_copy(program: Program, u: int, linear: int) -> bool:
    """Is it a view of other sizes behind a copy? `drop_copies` cannot leave out that copy."""
    if program.calls[u].function not in RESHAPES:
        return False
    while u != linear:
        if program.calls[u].function in COPIES:
            return True
        u = program.calls[u].args[0].operator
    return False


def _orders(ends: Iterable[Rearrangement], count: int) -> list[list[int]]:
    """Orders of the rows' factors, that others read them in."""
    orders: list[list[int]] = []
    for end in ends:
        axes = list(dict.fromkeys(f.axis for dim in end.dims for f in dim if f.axis < count))
        order = [*axes, *(axis for axis in range(count) if axis not in axes)]
        if order not in orders:
            orders.append(order)
    return orders


def _product(
    program: Program, call: Call, source: Any, rows: Sequence[Factor], read: Rearrangement, is_free: bool
) -> Call | None:
    """The product of rows in this order; None where its source cannot be brought into that.

    Args:
        is_free: whether the source has to lie so already.
    """
    read = replace(read, dims=(*((f,) for f in rows), read.dims[-1]))
    moved = _moved(source, program.value(source), read, copies=not is_free)
    if moved is None or (is_free and not moved[1].is_contiguous()):
        return None
    shape = [*(f.size for f in rows), call.produces.shape[-1]]
    return Call(LINEAR, (moved[0], *call.args[1:]), {}, torch.empty(shape, dtype=call.produces.dtype, device="meta"))


def _results(product: Call, order: Sequence[int], ends: dict[int, Rearrangement]) -> dict[int, Call] | None:
    """What stands for the ends, by views of the product; None where a view would span two strides."""
    place = {axis: i for i, axis in enumerate(order)}  # the columns stay the last axis

    def placed(f: Factor) -> Factor:
        return replace(f, axis=place.get(f.axis, f.axis))

    results: dict[int, Call] = {}
    for u, end in ends.items():
        dims = tuple(tuple(map(placed, dim)) for dim in end.dims)
        own = Rearrangement(dims, tuple((placed(f), index) for f, index in end.fixed))
        moved = _moved(product, product.produces, own, copies=False)
        if moved is None:
            return None
        # An operator of its own each, so that every end is one.
        unmoved = Call(VIEW, (product, list(product.produces.shape)), {}, product.produces)
        results[u] = unmoved if moved[0] is product else moved[0]
    return results


def _moved(source: Any, value: Tensor, read: Rearrangement, copies: bool) -> tuple[Any, Tensor] | None:
    """Calls that read a tensor so, and what they return; None where there are none.

    Args:
        copies: whether there may be a copy before the last view.
    """
    steps = read.steps(value.shape)
    if steps is None:
        return None
    for function, arguments in steps:
        if function is VIEW and not _has_view(value, *arguments):
            if not copies:
                return None
            value = value.contiguous()
            source = Call(CLONE, (source,), {"memory_format": torch.contiguous_format}, on_meta(value))
        value = function(value, *arguments)
        source = Call(function, (source, *arguments), {}, on_meta(value))
    return source, value


def _has_view(tensor: Tensor, shape: Sequence[int]) -> bool:
    """Does no dimension of this shape span two strides?"""
    try:
        tensor.view(shape)
    except RuntimeError:
        return False
    return True
