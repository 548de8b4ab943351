"""Leaves out copies that only change how a tensor lies in memory, where what reads it is faster without them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from systems.scheduling.decision import Decision
from systems.scheduling.graph.capture import on_meta
from systems.scheduling.graph.part import part
from systems.scheduling.graph.patterns import COPIES, VIEW, convolution
from systems.scheduling.graph.program import Call, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Rewritten
from .patterns import CONV2D_FUNCTIONS, name_operators, returned_operators
from .strides import is_computed, is_uncomputed, readers_of_changed, with_strides

MULTIPLICATION, DIVISION = torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor
COPIED, DROPPED = "copied", "dropped"


def drop_copies(program: Program, context: Context) -> Rewritten:
    """Let readers of a copy read what was copied, where they take its strides and are faster so.

    Models copy queries, keys and values into the order that attention has them in, and its output back. Kernels that take
    strides need neither.

    Invariants:
        - What is copied is computed by the program, so that nothing writes to it. No caller sees the copy.
        - Copies whose readers meet, as at one attention, are one place: with one of them another may become needless.
        - No convolution reads another layout than before: `select_kernels` decides about that.
        - Equal places are measured once, with all that reads them, and treated alike.
    """
    droppable = _droppable(program)
    places = _places(program, droppable)
    times_by_signature: dict[str, dict[str, float]] = {}
    decisions: list[Decision] = []
    chosen: list[int] = []
    for copies, operators in places:
        dropped = _without(program, copies)
        if dropped is None:
            continue
        separate = part(program, operators)
        signature = "; ".join(separate.signature(i) for i in range(len(operators)))
        if signature not in times_by_signature:
            within = [operators.index(v) for v in copies]
            fewer = part(dropped, operators)
            costs = {COPIED: separate, DROPPED: replace(fewer, [_as_view(fewer, i) for i in within])[0]}
            times_by_signature[signature] = {name: context.cost(context.later(p)) for name, p in costs.items()}
        computed = [v for v in operators if v not in copies and not is_uncomputed(program.calls[v].function)]
        pattern = f"{len(copies)} around {name_operators(program, computed)}"
        decision = context.decide("drop_copies", pattern, tuple(copies), signature, times_by_signature[signature])
        decisions.append(decision)
        if decision.chosen == DROPPED:
            chosen += copies
    dropped = _without(program, sorted(chosen))
    assert dropped is not None  # each place by itself fits, and no two places meet
    return replace(dropped, [_as_view(dropped, v) for v in chosen])[0], decisions


def _droppable(program: Program) -> list[int]:
    """Copies of what the program computes, which no caller sees.

    What lies in a buffer is written at the end of a call, which waits for those that read the buffer, and not for their
    readers.
    """
    returned = returned_operators(program)
    calls = enumerate(program.calls)
    return [v for v, c in calls if _is_copy(program, c) and v not in returned and is_computed(program, c.args[0])]


def _is_copy(program: Program, call: Call) -> bool:
    """Does it return what it reads? A product with 1 does, as models have where a factor is not set."""
    if call.function in (MULTIPLICATION, DIVISION):
        is_one = isinstance(call.args[1], int | float) and call.args[1] == 1 and not call.kwargs
        return is_one and call.produces.dtype is program.value(call.args[0]).dtype
    return call.function in COPIES


def _places(program: Program, copies: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Copies that can be left out, in groups whose readers meet; each with its operators, in the order of capture."""
    places: list[tuple[set[int], set[int]]] = []
    current = program
    for v in copies:
        fewer = _without(current, [v])
        if fewer is None:
            continue
        dropped, operators = {v}, {v, *readers_of_changed(current, fewer, [v])}
        is_moved = current.calls[v].produces.stride() != fewer.calls[v].produces.stride()
        if is_moved and any(convolution(program.calls[u], CONV2D_FUNCTIONS) for u in operators):
            continue
        for other in [place for place in places if not place[1].isdisjoint(operators)]:
            dropped, operators = dropped | other[0], operators | other[1]
            places.remove(other)
        places.append((dropped, operators))
        current = fewer
    return [(sorted(dropped), sorted(operators)) for dropped, operators in places]


def _without(program: Program, copies: Sequence[int]) -> Program | None:
    """The program where the readers of each copy know the strides of what is copied; None where one cannot take them."""
    for v in copies:
        source = program.value(program.calls[v].args[0])
        strided = with_strides(program, {v: on_meta(source)})
        if strided is None:
            return None
        program = strided
    return program


def _as_view(program: Program, v: int) -> Replacement:
    source = program.calls[v].args[0]
    value: Tensor = program.calls[v].produces
    return Replacement((v,), "view", str(VIEW), Call(VIEW, (source, list(value.shape)), {}, value), {v: None})
