"""Replaces bags of embeddings that hold one row each by lookups."""

from dataclasses import replace
from typing import Any

import torch

from systems.scheduling.decision import Decision
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.graph.patterns import users
from systems.scheduling.graph.program import Call, Output, Program
from systems.scheduling.graph.rewrite import without

from .context import Context, Rewritten
from .patterns import shape_of

aten = torch.ops.aten
BAGS = (aten.embedding_bag.default, aten.embedding_bag.padding_idx)
NUMBERS = (aten.arange.default, aten.arange.start, aten.arange.start_step)
# Of a bag's arguments; the first three have none.
DEFAULTS: tuple[Any, ...] = (*[None] * 3, False, 0, False, None, False, None)
EMBEDDING = aten.embedding.default


def replace_bags(program: Program, _: Context) -> Rewritten:
    """Look up each row of a bag of embeddings whose bags begin at 0, 1, 2 and so on (in none of the papers).

    Recommenders call a bag where a sample has one value of a feature. Its sum, mean and maximum are that row. Other passes
    fuse lookups, and no bags.

    Invariant: as many bags begin as there are rows, and the program reads nothing of a bag but the rows.

    Nothing is measured: a bag computes more than a lookup.
    """
    replaced = [v for v in range(len(program.graph)) if _is_of_single_rows(program, v)]
    if not replaced:
        return program, []

    def of_lookup(argument: Any) -> Any:
        return Output(argument.operator) if isinstance(argument, Output) and argument.operator in replaced else argument

    calls, operators = [call.map(of_lookup) for call in program.calls], list(program.graph.operators)
    for v in replaced:
        calls[v] = Call(EMBEDDING, calls[v].args[:2], {}, program.calls[v].produces[0])
        operators[v] = replace(operators[v], name="embedding", target=str(EMBEDDING))
    graph = OperatorGraph(operators, [[o.operator for o in call.references()] for call in calls])
    outputs = [of_lookup(o) for o in program.outputs]
    looked_up = Program(graph, calls, outputs, program.output_spec, program.examples, program.derived)
    beginnings = {program.calls[v].args[2].operator for v in replaced}
    unread = [v for v in beginnings if not users(looked_up)[v]]
    decisions = [
        Decision("replace_bags", f"embedding_bag of {shape_of(program.value(program.calls[v].args[0]))}", (v,), {}, "lookup")
        for v in replaced
    ]
    return without(looked_up, unread), decisions


def _is_of_single_rows(program: Program, v: int) -> bool:
    """Is it bags of a row each, of which nothing but the rows is read?"""
    call = program.calls[v]
    if call.function not in BAGS or call.kwargs:
        return False
    arguments: tuple[Any, ...] = (*call.args, *DEFAULTS[len(call.args) :])
    _, rows, beginnings, _, _, _, weights, has_last, padding = arguments
    if weights is not None or has_last or padding is not None or not isinstance(beginnings, Output):
        return False
    read = [a for c in program.calls for a in c.references() if a.operator == v]
    read += [o for o in program.outputs if isinstance(o, Output) and o.operator == v]
    counted = program.calls[beginnings.operator]
    return (
        all(output.index == 0 for output in read)
        and counted.function in NUMBERS
        and _numbers(counted) == (0, program.value(rows).numel(), 1)
        and program.value(rows).dim() == 1
    )


def _numbers(call: Call) -> tuple[Any, Any, Any]:
    """The first number of an arange, the one before which it ends, and its step."""
    if call.function is aten.arange.default:
        return 0, call.args[0], 1
    return call.args[0], call.args[1], call.args[2] if len(call.args) > 2 else 1
