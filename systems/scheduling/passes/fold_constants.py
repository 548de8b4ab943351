"""Computes once, in preparation, what depends on no input of the model."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false

from systems.scheduling.decision import Decision
from systems.scheduling.graph.derived import Derived
from systems.scheduling.graph.effects import draws, is_view
from systems.scheduling.graph.operator_graph import Operator, OperatorGraph
from systems.scheduling.graph.program import Call, Input, Output, Program

from .context import Context, Rewritten
from .patterns import name_operators, returned_operators

aten = torch.ops.aten
# They return one number everywhere, in a shape that is known; they take no value of their first argument. By operator, that
# number, or the place of the argument that it is.
ZERO, ONE = 0.0, 1.0
FILLED: dict[object, float | int] = {
    **dict.fromkeys((aten.zeros_like.default, aten.new_zeros.default), ZERO),
    **dict.fromkeys((aten.ones_like.default, aten.new_ones.default), ONE),
    aten.full_like.default: 1,
    aten.fill.Scalar: 1,
    aten.new_full.default: 2,
}


def fold_constants(program: Program, _: Context) -> Rewritten:
    """Replace operators that read parameters, buffers and numbers alone by the tensors that they compute (in none of the
    papers). Such are relative positions, masks, and weights that a module computes out of others.

    Invariants:
        - An operator is constant where all that it reads is, and where it draws no random numbers. One that fills a shape
          with a number reads nothing, and what a run of the program writes is not constant. Views of the module's own
          tensors stay, since no kernel computes them; so do views of what is folded that leave elements out or repeat them.
        - What the model returns is computed by every call: its caller may write to it.
        - A constant is derived again where a tensor is written that it was computed of.

    Nothing is measured: an operator less is never slower.
    """
    constant = _constant(program)
    derived: dict[Output, Derived] = {}

    def folded(argument: Any) -> Any:
        if not isinstance(argument, Output) or not constant[argument.operator]:
            return argument
        if argument not in derived:
            derived[argument] = _derived(program, argument)
        return derived[argument].tensor

    remaining = [v for v in range(len(program.graph)) if not constant[v]]
    if len(remaining) == len(program.graph):
        return program, []
    place = {v: i for i, v in enumerate(remaining)}
    calls = [program.calls[v].map(folded) for v in remaining]
    calls = [call.map(lambda a: Output(place[a.operator], a.index) if isinstance(a, Output) else a) for call in calls]
    outputs = [Output(place[o.operator], o.index) if isinstance(o, Output) else o for o in program.outputs]
    operators = [
        Operator(i, program.graph.operators[v].name, program.graph.operators[v].target) for i, v in enumerate(remaining)
    ]
    graph = OperatorGraph(operators, [[o.operator for o in call.references()] for call in calls])
    more = program.derived + derived.values()
    decisions = []
    for reference in derived:
        members = _computing(program, reference.operator)
        decisions.append(Decision("fold_constants", name_operators(program, members), tuple(members), {}, "folded"))
    return Program(graph, calls, outputs, program.output_spec, program.examples, more), decisions


def _constant(program: Program) -> list[bool]:
    """For each operator whether it is computed in preparation."""
    returned = returned_operators(program)
    written = {_memory(t) for t in program.changed}
    constant: list[bool] = []
    for v, call in enumerate(program.calls):
        leaves = call.leaves()
        references = [a for a in leaves if isinstance(a, Output | Input)]
        is_fixed = all(isinstance(a, Output) and constant[a.operator] for a in references)
        is_fixed = is_fixed and not any(isinstance(a, Tensor) and _memory(a) in written for a in leaves)
        is_own_view = is_view(call.function) and not references
        constant.append((is_fixed or _fills(call)) and not is_own_view and v not in returned and _is_repeatable(call))
    for v in reversed(range(len(constant))):  # readers first: what stays may have to keep what it reads
        for reference in () if constant[v] else program.calls[v].references():
            u = reference.operator
            constant[u] = constant[u] and is_non_overlapping_and_dense_or_false(program.value(reference))
    return constant


def _is_repeatable(call: Call) -> bool:
    """Does it compute tensors, and the same ones every time?"""
    produced = call.produces if isinstance(call.produces, list | tuple) else [call.produces]
    if not isinstance(call.function, torch._ops.OpOverload) or draws(call.function, call.args, call.kwargs):
        return False
    return all(isinstance(t, Tensor) for t in produced)


def _fills(call: Call) -> bool:
    return call.function in FILLED and isinstance(call.produces, Tensor)


def _filled(call: Call, device: torch.device) -> Tensor:
    number = FILLED[call.function]
    value = call.args[number] if isinstance(number, int) else number
    produces = call.produces
    made = torch.empty_strided(produces.shape, produces.stride(), dtype=produces.dtype, device=device)
    return made.fill_(value)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _computing(program: Program, v: int) -> list[int]:
    """Constant operator v and those that it depends on, in the order of capture."""
    members, ahead = {v}, [v]
    while ahead:
        u = ahead.pop()
        new = set() if _fills(program.calls[u]) else {*program.graph.predecessors[u]} - members
        members |= new
        ahead += new
    return sorted(members)


def _derived(program: Program, reference: Output) -> Derived:
    members = _computing(program, reference.operator)
    leaves = [leaf for v in members for leaf in program.calls[v].leaves()]
    sources = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    return Derived.of(partial(_value, program, members, reference), *sources.values())


def _value(program: Program, members: Sequence[int], reference: Output, *_: Tensor) -> Tensor:
    """What the operators compute now, in memory of its own."""
    values: dict[int, Any] = {}
    for v in members:
        call = program.calls[v]
        values[v] = _filled(call, program.device) if _fills(call) else program.execute(v, values, ())  # type: ignore[arg-type]
    value = values[reference.operator]
    tensor: Tensor = value if reference.index is None else value[reference.index]
    return tensor.clone(memory_format=torch.preserve_format)
