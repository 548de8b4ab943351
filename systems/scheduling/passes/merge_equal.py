"""Computes once what several operators compute alike."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from systems.scheduling.decision import Decision
from systems.scheduling.graph.effects import draws
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.graph.program import Call, Output, Program
from systems.scheduling.graph.rewrite import without

from .context import Context, Rewritten
from .patterns import name_operators, returned_operators


def merge_equal(program: Program, _: Context) -> Rewritten:
    """Let readers of equal operators read the first of these (in none of the papers): NASNet averages one tensor twice.

    Invariants:
        - Operators are equal where they call the same function with the same arguments, equal ones among these counted as
          the same, and draw no random numbers. So no reader waits for more than before.
        - What the model returns stays, also where it is seen through a view: its caller may write to one alone.

    Nothing is measured: an operator less is never slower.
    """
    returned = returned_operators(program)
    first_by_key: dict[Hashable, int] = {}
    first_of: dict[int, int] = {}  # by the operators that go

    def merged(argument: Any) -> Any:
        if isinstance(argument, Output) and argument.operator in first_of:
            return Output(first_of[argument.operator], argument.index)
        return argument

    calls: list[Call] = []
    for v, call in enumerate(program.calls):
        calls.append(call := call.map(merged))
        if v not in returned and _is_repeatable(call) and (first := first_by_key.setdefault(_key(call), v)) != v:
            first_of[v] = first
    if not first_of:
        return program, []
    decisions = [
        Decision("merge_equal", name_operators(program, [v]), (first, v), {}, "merged") for v, first in first_of.items()
    ]
    graph = OperatorGraph(program.graph.operators, [[o.operator for o in call.references()] for call in calls])
    shared = Program(graph, calls, program.outputs, program.output_spec, program.examples, program.derived)
    return without(shared, first_of), decisions


def _is_repeatable(call: Call) -> bool:
    return isinstance(call.function, torch._ops.OpOverload) and not draws(call.function, call.args, call.kwargs)


def _key(call: Call) -> Hashable:
    return call.function, _hashable(call.args), _hashable(call.kwargs)


def _hashable(value: Any) -> Hashable:
    """Equal for equal arguments. Tensors are where they are one; 1, 1.0 and True are not, nor are 0.0 and -0.0."""
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((name, _hashable(v)) for name, v in value.items())
    if isinstance(value, float | complex):
        return type(value), repr(value)
    return id(value) if isinstance(value, Tensor) else (type(value), value)
