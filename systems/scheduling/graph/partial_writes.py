"""Writes into parts of a tensor, as eager execution makes them: a kernel each.

Of `x[2:, 1] = v` export makes a computation: views of x, what is written, and for each view a copy of what it is a view of
with the part put in. `with_partial_writes` makes one copy of x for all writes in a row, into which each of them writes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.types import Number

from .effects import named
from .program import Call, Output, Program
from .rewrite import Replacement
from .rewrite import replace as replaced

aten = torch.ops.aten
SLICE, SELECT = 0, 1  # kinds of view
SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default)
VIEWS = (aten.slice.Tensor, aten.select.int)
FILLS = (aten.fill.Scalar, aten.fill.Tensor, aten.copy.default)  # whose first argument says how many numbers are written
LAST = (1 << 63) - 1
NUM_PLACES = 5  # integers of one view, as `_place` gives them


def writes_of(parts: Sequence[int]) -> Iterator[tuple[list[tuple[int, ...]], int]]:
    """Of each write the views that lead to its part, and which value or number it writes. parts: as of `write_parts`."""
    left = iter(parts)
    for num_views in left:
        yield [tuple(islice(left, NUM_PLACES)) for _ in range(num_views)], next(left)


@torch.library.custom_op("opweave::write_parts", mutates_args=())
def write_parts(x: Tensor, parts: Sequence[int], values: Sequence[Tensor], numbers: Sequence[Number]) -> Tensor:
    """A copy of x with parts of it written, one after the other.

    Args:
        x: dense.
        parts: of each write the number of views that lead to the part, NUM_PLACES integers for each of those, and what is
            written: the index of a value, or -1 - that of a number.
        values: of a part's shape, or one that broadcasts to it.
        numbers: that fill parts.
    """
    result = x.clone()
    for views, source in writes_of(parts):
        part = result
        for kind, dim, start, end, step in views:
            part = part.select(dim, start) if kind == SELECT else aten.slice.Tensor(part, dim, start, end, step)
        value = numbers[-1 - source] if source < 0 else values[source]
        if isinstance(value, Tensor) and value.dim():
            part.copy_(value)
        else:
            part.fill_(value)  # takes the number of a tensor on the host: no CUDA Graph holds a copy from there
    return result


@write_parts.register_fake
def _(x: Tensor, parts: Sequence[int], values: Sequence[Tensor], numbers: Sequence[Number]) -> Tensor:
    return torch.empty_like(x)


WRITE_PARTS = torch.ops.opweave.write_parts.default


@dataclass(frozen=True)
class _Write:
    """One write.

    Args:
        base: what it writes a part of.
        views: that lead to the part, NUM_PLACES integers each.
        value: what is written: a number, or a reference to a tensor.
        looks: views of the base, by their operators.
        operators: a fill where there is one, then scatters. The last returns the base with the part written.
    """

    base: Any
    views: tuple[tuple[int, ...], ...]
    value: Any
    looks: tuple[int, ...]
    operators: tuple[int, ...]

    @property
    def result(self) -> int:
        return self.operators[-1]


def with_partial_writes(program: Program) -> Program:
    """The program with one operator for all writes in a row, where these are more than a copy that one kernel writes to.

    Each write of a row but the first is to what the one before returns, which nothing else reads. A program that writes
    buffers stays as it is.
    """
    if program.changed:
        return program
    replacements = [_replacement(program, row) for row in _rows(program) if sum(len(write.operators) for write in row) > 1]
    return replaced(program, replacements)[0] if replacements else program


def _rows(program: Program) -> Iterator[list[_Write]]:
    """The writes of a program, in the order of their results."""
    writes = {v: write for v in range(len(program.graph)) if (write := _write(program, v)) is not None}
    inner = {v for write in writes.values() for v in write.operators[:-1]}
    row: list[_Write] = []
    for v, write in writes.items():
        if v in inner:
            continue
        if row and not (write.base == Output(row[-1].result) and _are_alone(program, [*row, write])):
            yield row
            row = []
        row.append(write)
    if row:
        yield row


def _are_alone(program: Program, row: Sequence[_Write]) -> bool:
    """Does nothing but these writes read what the first of them return?"""
    within = {v for write in row for v in (*write.looks, *write.operators)}
    between = {v for write in row[1:] for v in write.looks} | {write.result for write in row[:-1]}
    return all(set(program.graph.successors[v]) <= within for v in between) and not between & program.kept_operators()


def _write(program: Program, v: int) -> _Write | None:
    """The write that ends with this scatter; None for another operator, or one for which a copy of the base does not do."""
    call = program.calls[v]
    if call.function not in SCATTERS or not _is_copied(program, call):
        return None
    base, value = call.args[:2]
    views, looks, operators = [_place(program, call)], list[int](), [v]
    while isinstance(value, Output) and _is_read_once(program, value.operator):
        source = program.calls[value.operator]
        seen = _seen(program, source.args[0], base) if source.function in (*SCATTERS, *FILLS) else None
        if seen is None or seen[0] != views:
            break
        looks += seen[1]
        operators.insert(0, value.operator)
        value = source.args[1]
        if source.function in FILLS:
            break
        views.append(_place(program, source))
    if not isinstance(program.value(value), Tensor | bool | int | float):
        return None
    return _Write(base, tuple(views), value, tuple(looks), tuple(operators))


def _is_copied(program: Program, call: Call) -> bool:
    """Does a copy of what this scatter takes lie in memory as what it returns?"""
    base = program.value(call.args[0])
    return is_non_overlapping_and_dense_or_false(base) and base.stride() == call.produces.stride()


def _is_read_once(program: Program, v: int) -> bool:
    return len(program.graph.successors[v]) == 1 and v not in program.kept_operators()


def _seen(program: Program, reference: Any, base: Any) -> tuple[list[tuple[int, ...]], list[int]] | None:
    """The views by which a tensor is a part of the base, and their operators; None where it is none."""
    places, operators = list[tuple[int, ...]](), list[int]()
    while not _is_same(reference, base):
        if not isinstance(reference, Output) or program.calls[reference.operator].function not in VIEWS:
            return None
        call = program.calls[reference.operator]
        places.insert(0, _place(program, call))
        operators.insert(0, reference.operator)
        reference = call.args[0]
    return places, operators


def _is_same(reference: Any, base: Any) -> bool:
    return reference is base if isinstance(base, Tensor) else bool(reference == base)


def _place(program: Program, call: Call) -> tuple[int, ...]:
    """Which part a view shows or a scatter writes: the kind, the dimension from the first on, start, end and step."""
    given = named(call.function, call.args, call.kwargs)  # type: ignore[arg-type]
    dim = given.get("dim", 0) % program.value(call.args[0]).dim()
    if "index" in given:
        return SELECT, dim, given["index"], 0, 1
    start, end = given.get("start"), given.get("end")
    return SLICE, dim, 0 if start is None else start, LAST if end is None else end, given.get("step", 1)


def _replacement(program: Program, row: Sequence[_Write]) -> Replacement:
    parts: list[int] = []
    values: list[Any] = []
    numbers: list[Any] = []
    for write in row:
        is_tensor = isinstance(program.value(write.value), Tensor)
        parts += [len(write.views), *chain.from_iterable(write.views), len(values) if is_tensor else -1 - len(numbers)]
        (values if is_tensor else numbers).append(write.value)
    computed = {v for write in row for v in write.operators}
    within = computed | {v for write in row for v in write.looks}
    shown = {
        v for v in within - computed if set(program.graph.successors[v]) <= within and v not in program.kept_operators()
    }
    last = row[-1].result
    call = Call(WRITE_PARTS, (row[0].base, parts, values, numbers), {}, program.calls[last].produces)
    return Replacement(tuple(sorted(computed | shown)), "write_parts", str(WRITE_PARTS), call, {last: None})
