"""Leaves out copies that only change how a tensor lies in memory, where what reads it is faster without them."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from systems.scheduling.decision import Decision
from systems.scheduling.graph.capture import on_meta
from systems.scheduling.graph.effects import copy_back, is_view, written
from systems.scheduling.graph.part import part
from systems.scheduling.graph.patterns import COPIES, VIEW
from systems.scheduling.graph.program import Call, Output, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Rewritten
from .patterns import name_operators, returned_operators
from .strides import is_uncomputed, readers_of_changed, with_strides

COPIED, DROPPED = "copied", "dropped"


def drop_copies(program: Program, context: Context) -> Rewritten:
    """Let readers of a copy read what was copied, where they take its strides and are faster so.

    Models copy queries, keys and values into the order that attention has them in, and its output back. Kernels that take
    strides need neither.

    Invariants:
        - What is copied is computed by the program, and nothing writes to it or to the copy. No caller sees the copy.
        - Copies whose readers meet, as at one attention, are one place: with one of them another may become needless.
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
    """Copies of what the program computes, which neither a caller nor a writer sees."""
    writes = {_root(program, a) for call in program.calls for a in _written(call) if isinstance(a, Output)}
    returned = returned_operators(program)
    found = []
    for v, call in enumerate(program.calls):
        if call.function not in COPIES or v in returned or not isinstance(call.args[0], Output):
            continue
        source = _root(program, call.args[0])
        if isinstance(source, Output) and source not in writes and Output(v) not in writes:
            producer = program.calls[source.operator]
            if not any(True for _ in _written(producer)):  # its output would be memory of the module's own
                found.append(v)
    return found


def _written(call: Call) -> Iterable[Any]:
    if call.function is copy_back:
        return [call.args[0]]
    is_mutable = isinstance(call.function, OpOverload) and call.function._schema.is_mutable
    return written(call.function, call.args, call.kwargs) if is_mutable else []  # type: ignore[arg-type]


def _root(program: Program, reference: Any) -> Any:
    """What a reference is a view of: an operator's output, an input, or a tensor of the module's own."""
    while isinstance(reference, Output) and is_view(program.calls[reference.operator].function):
        reference = program.calls[reference.operator].args[0]
    return Output(reference.operator) if isinstance(reference, Output) else reference


def _places(program: Program, copies: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Copies that can be left out, in groups whose readers meet; each with its operators, in the order of capture."""
    places: list[tuple[set[int], set[int]]] = []
    current = program
    for v in copies:
        fewer = _without(current, [v])
        if fewer is None:
            continue
        dropped, operators = {v}, {v, *readers_of_changed(current, fewer, [v])}
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
