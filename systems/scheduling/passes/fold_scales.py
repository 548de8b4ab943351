"""Makes a number that multiplies the queries or keys of an attention a part of its scale."""

from collections.abc import Iterator
from dataclasses import replace
from math import isfinite, sqrt
from typing import TypeAlias

import torch

from systems.scheduling.decision import Decision
from systems.scheduling.graph.effects import READERS_AT_AN_OFFSET, is_view
from systems.scheduling.graph.operator_graph import OperatorGraph
from systems.scheduling.graph.patterns import COPIES, only_user, users
from systems.scheduling.graph.program import Call, Input, Output, Program
from systems.scheduling.graph.rewrite import without

from .attention_places import ATTENTION
from .context import Context, Rewritten
from .patterns import name_operators

aten = torch.ops.aten
TIMES, OVER = (aten.mul.Tensor, aten.mul.Scalar), (aten.div.Tensor, aten.div.Scalar)
Source: TypeAlias = Output | Input  # of what is multiplied
# What is multiplied lies elsewhere than the product, and its bits are others.
READERS_OF_BITS = (*READERS_AT_AN_OFFSET, aten.view.dtype)
FACTORS = (0, 1)  # the places of queries and keys among the arguments: each multiplies scores


def fold_scales(program: Program, _: Context) -> Rewritten:
    """Let attention scale scores by what multiplies all queries or keys before it, as in Whisper (in none of the papers).

    Invariants:
        - Attention alone reads what was multiplied, its views or copies; what it reads lies as before. What writes a buffer
          reads all that is computed of it before.
        - Scores are as precise or more: a product of half precision is rounded no more.

    Nothing is measured: an operator less is never slower.
    """
    readers = users(program)
    source_of: dict[Output, Source] = {}  # by the multiplications that go, what they multiply
    scale_of: dict[int, float] = {}  # by attention
    decisions: list[Decision] = []
    for v, call in enumerate(program.calls):
        if call.function is not ATTENTION:
            continue
        for place in FACTORS:
            for u, source, number in _multiplications(program, readers, v, place):
                source_of[Output(u)] = source
                scale_of[v] = scale_of.get(v, _scale(program, call)) * number
                pattern = f"{name_operators(program, [u])} by {number:.4g} before attention"
                decisions.append(Decision("fold_scales", pattern, (u, v), {}, "folded"))
    if not source_of:
        return program, []

    def moved(argument: Source) -> Source:
        while isinstance(argument, Output) and argument in source_of:
            argument = source_of[argument]
        return argument

    calls: list[Call] = []
    for v, call in enumerate(program.calls):
        own = call.map(lambda a: moved(a) if isinstance(a, Output) else a)
        calls.append(replace(own, kwargs={**own.kwargs, "scale": scale_of[v]}) if v in scale_of else own)
    graph = OperatorGraph(program.graph.operators, [[o.operator for o in call.references()] for call in calls])
    scaled = Program(graph, calls, program.outputs, program.output_spec, program.examples, program.derived)
    return without(scaled, [output.operator for output in source_of]), decisions


def _scale(program: Program, call: Call) -> float:
    scale = call.kwargs.get("scale")
    return 1 / sqrt(program.value(call.args[0]).shape[-1]) if scale is None else float(scale)


def _multiplications(
    program: Program, readers: list[list[int]], reader: int, place: int
) -> Iterator[tuple[int, Source, float]]:
    """Those of a tensor by a number that lead to queries or keys, with nothing but views and copies between.

    There are none where values or the mask are the same tensor.

    Args:
        reader: the attention.
        place: one of FACTORS.
    """
    attention = program.calls[reader]
    argument, others = attention.args[place], [*attention.args[2:], *attention.kwargs.values()]
    if isinstance(argument, Output) and any(isinstance(other, Output) and other == argument for other in others):
        return
    while isinstance(argument, Output) and argument.index is None and only_user(readers[argument.operator]) == reader:
        reader, call = argument.operator, program.calls[argument.operator]
        if (found := _multiplication(program, reader)) is not None:
            yield reader, *found
        elif call.function in READERS_OF_BITS or not (is_view(call.function) or call.function in COPIES):
            return
        argument = call.args[0]


def _multiplication(program: Program, u: int) -> tuple[Source, float] | None:
    """What operator u multiplies, and the number; None where it does something else, or what it reads lies otherwise."""
    call = program.calls[u]
    if call.function not in (*TIMES, *OVER) or call.kwargs or len(call.args) != 2:
        return None
    source, number = call.args
    if not isinstance(source, Output | Input) or isinstance(number, bool) or not isinstance(number, int | float):
        return None
    if not number > 0 or not isfinite(number):
        return None
    x, out = program.value(source), call.produces
    if not x.numel() or (x.shape, x.dtype, x.stride()) != (out.shape, out.dtype, out.stride()):
        return None
    return source, 1 / number if call.function in OVER else float(number)
