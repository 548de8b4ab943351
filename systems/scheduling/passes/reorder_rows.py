"""Has matrix products read rows in the order in which they are needed afterwards, where that is faster."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from systems.scheduling.decision import Decision
from systems.scheduling.graph.capture import on_meta
from systems.scheduling.graph.part import part
from systems.scheduling.graph.patterns import COPIES, VIEW, reads_tensors
from systems.scheduling.graph.program import Call, Output, Program
from systems.scheduling.graph.rewrite import Replacement, without
from systems.scheduling.graph.rewrite import replace as replaced

from .context import Context, Rewritten
from .patterns import name_operators, returned_operators
from .rearrangement import MOVES, RESHAPES, Factor, Rearrangement
from .strides import is_computed, is_uncomputed, readers_of_changed, with_strides

LINEAR = torch.ops.aten.linear.default
CLONE = torch.ops.aten.clone.default
AS_CAPTURED, REORDERED = "as captured", "reordered"


@dataclass(frozen=True)
class _Place:
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


@dataclass(frozen=True)
class _Reordered:
    """A program with some places done, and what differs there.

    Args:
        clusters: places whose operators meet; with the old program's operators that are replaced, left out, or read other
            strides; and the new program's in their stead.
    """

    program: Program
    clusters: list[tuple[list[_Place], list[int], list[int]]]


def reorder_rows(program: Program, context: Context) -> Rewritten:
    """Let a product read its rows in the order in which others read its result, and leave out copies around it.

    `nn.MultiheadAttention` has the sequence first inside, and its callers the batch. So it copies tokens before its
    products, and queries, keys and values behind them. A product computes each row alone, in whichever order they come.

    Invariants:
        - The rows and what is read of them are the same; a row is computed as before.
        - No caller sees what is rearranged, and nothing writes to what is read without its copy.
        - Places whose operators meet are decided together. Equal ones are measured once.
    """
    done = _with(program, _places(program))
    decisions: list[Decision] = []
    chosen: list[_Place] = []
    times_by_signature: dict[str, dict[str, float]] = {}
    copies = {v for v, call in enumerate(program.calls) if call.function in COPIES}
    for places, operators, own in done.clusters:
        captured, reordered = part(program, operators), part(done.program, own)
        signature = "; ".join(captured.signature(i) for i in range(len(operators)))
        if signature not in times_by_signature:
            costs = {AS_CAPTURED: captured, REORDERED: reordered}
            times_by_signature[signature] = {name: context.cost(context.later(p)) for name, p in costs.items()}
        computed = [v for v in operators if v not in copies and not is_uncomputed(program.calls[v].function)]
        pattern = f"around {name_operators(program, computed)}"
        linears = tuple(place.linear for place in places)
        decision = context.decide("reorder_rows", pattern, linears, signature, times_by_signature[signature])
        decisions.append(decision)
        if decision.chosen == REORDERED:
            chosen += places
    return _with(program, chosen).program, decisions


def _places(program: Program) -> list[_Place]:
    """Of two products with nothing but moves between them the first alone: the second reads what stands for those."""
    places: dict[int, _Place] = {}
    for v in range(len(program.graph)):
        place = _place(program, v)
        if place is None or (place.before and isinstance(place.source, Output) and place.source.operator in places):
            continue
        places[v] = place
    return list(places.values())


def _place(program: Program, v: int) -> _Place | None:
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
            return _Place(v, source, tuple(before), tuple(after), product, results)
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
        try:
            produces = function(value, *arguments)
        except RuntimeError:  # a view would span two strides
            if not copies or function is not VIEW:
                return None
            value = value.contiguous()
            source = Call(CLONE, (source,), {"memory_format": torch.contiguous_format}, on_meta(value))
            produces = function(value, *arguments)
        value = produces
        source = Call(function, (source, *arguments), {}, on_meta(value))
    return source, value


def _with(program: Program, places: Sequence[_Place]) -> _Reordered:
    """The program with these places, without those whose readers cannot take the strides."""
    done = _all_with(program, places)
    if done is not None:
        return done
    fitting: list[_Place] = []
    done = _Reordered(program, [])
    for place in places:
        if (more := _all_with(program, [*fitting, place])) is not None:
            done = more
            fitting.append(place)
    return done


def _all_with(program: Program, places: Sequence[_Place]) -> _Reordered | None:
    """None where a reader cannot take the strides."""
    if not places:
        return _Reordered(program, [])
    replacements, moved = [], dict[int, Tensor]()
    for place in places:
        for u, call in place.results.items():
            # Its readers know its strides once `with_strides` has told them.
            known = replace(call, produces=program.calls[u].produces)
            replacements.append(Replacement((u,), _name(call), str(call.function), known, {u: None}))
            moved[u] = call.produces
    rewritten, new_ids = replaced(program, replacements)
    unread = _unread(rewritten, [new_ids[u] for place in places for u in (place.linear, *place.before, *place.after)])
    rewritten = without(rewritten, unread)
    shifted = _shifts(len(unread) + len(rewritten.graph), unread)
    ids = {u: shifted[new] for u, new in new_ids.items() if new in shifted}
    strided = with_strides(rewritten, {ids[u]: value for u, value in moved.items()})
    if strided is None:
        return None
    kept = {new: u for u, new in ids.items() if u not in moved}
    reading = readers_of_changed(rewritten, strided, [ids[u] for u in moved])
    if not all(reads_tensors(strided, v) for v in reading):  # such as one that reads `.item()`, which no part has
        return None
    changed = sorted({*(v for v in range(len(strided.graph)) if v not in kept), *reading})
    return _Reordered(strided, _clusters(program, strided, places, changed, ids))


def _name(call: Call) -> str:
    return str(call.function._schema.name.split("::")[1])  # type: ignore[attr-defined]


def _unread(program: Program, candidates: Sequence[int]) -> set[int]:
    """Those of the candidates that nothing reads but others of them."""
    unread, kept = set[int](), program.kept_operators()
    for v in sorted(set(candidates), reverse=True):
        if v not in kept and set(program.graph.successors[v]) <= unread:
            unread.add(v)
    return unread


def _shifts(count: int, unread: set[int]) -> dict[int, int]:
    return {v: i for i, v in enumerate(v for v in range(count) if v not in unread)}


def _clusters(
    before: Program, after: Program, places: Sequence[_Place], changed: Sequence[int], ids: dict[int, int]
) -> list[tuple[list[_Place], list[int], list[int]]]:
    """The places whose changed operators read each other, with their operators in both programs."""
    group = {v: v for v in changed}

    def root(v: int) -> int:
        while group[v] != v:
            v = group[v]
        return v

    for v in changed:
        for u in after.graph.predecessors[v]:
            if u in group:
                group[root(u)] = root(v)
    old_ids = {new: u for u, new in ids.items()}
    clusters: dict[int, tuple[list[_Place], list[int], list[int]]] = {}
    for v in changed:
        _, operators, own = clusters.setdefault(root(v), ([], [], []))
        own.append(v)
        if v in old_ids:
            operators.append(old_ids[v])
    for place in places:
        of, operators, _ = clusters[root(ids[next(iter(place.results))])]
        of.append(place)
        operators += [u for u in (place.linear, *place.before, *place.after) if u not in ids]
    return [(of, sorted(set(operators)), sorted(own)) for of, operators, own in clusters.values()]
