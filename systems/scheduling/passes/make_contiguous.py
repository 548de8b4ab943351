"""Copies a tensor once into the order of its dimensions, where all that follows would read it in another."""

from typing import Any

import torch
from torch import Tensor

from systems.scheduling.decision import Decision
from systems.scheduling.graph.capture import on_meta
from systems.scheduling.graph.part import part
from systems.scheduling.graph.patterns import is_elementwise
from systems.scheduling.graph.program import Call, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Rewritten
from .patterns import name_operators, shape_of
from .strides import is_image, readers_of_changed, with_strides

aten = torch.ops.aten
AS_CAPTURED, CONTIGUOUS = "as captured", "contiguous"


def make_contiguous(program: Program, context: Context) -> Rewritten:
    """Let an elementwise operator return a contiguous tensor in the place of a permuted one, where that is faster.

    PyTorch's elementwise operators return what lies as their first input does. A residual stream that begins with a permuted
    tensor, as of a convolution over time, stays permuted through a whole network, and each layer norm copies it first.

    Invariant: a place is the first of such a chain. It is measured with all that reads what would lie otherwise.
    """
    decisions: list[Decision] = []
    times_by_signature: dict[str, dict[str, float]] = {}
    replacements: list[Replacement] = []
    tried = set[int]()
    for v in range(len(program.graph)):
        call = program.calls[v]
        if not is_elementwise(program, v) or call.produces.is_contiguous() or is_image(call.produces):
            continue
        tried.add(v)
        out = torch.empty_like(call.produces, memory_format=torch.contiguous_format)
        if not tried.isdisjoint(program.graph.predecessors[v]) or (strided := with_strides(program, {v: out})) is None:
            continue
        operators = (v, *sorted(readers_of_changed(program, strided, [v])))
        captured, contiguous = (part(p, operators) for p in (program, strided))
        contiguous = replace(contiguous, [_contiguous(contiguous, 0)])[0]
        signature = "; ".join(captured.signature(i) for i in range(len(operators)))
        if signature not in times_by_signature:
            costs = {AS_CAPTURED: context.later(captured), CONTIGUOUS: context.later(contiguous)}
            times_by_signature[signature] = {name: context.cost(p) for name, p in costs.items()}
        pattern = f"{name_operators(program, [v])} of {shape_of(out)}, read by {len(operators) - 1}"
        decision = context.decide("make_contiguous", pattern, (v,), signature, times_by_signature[signature])
        decisions.append(decision)
        if decision.chosen == CONTIGUOUS:
            program = strided
            replacements.append(_contiguous(program, v))
    return replace(program, replacements)[0], decisions


def _contiguous(program: Program, v: int) -> Replacement:
    """Operator v on contiguous copies of the tensors that lie otherwise. Its output is known as contiguous already."""

    def copied(argument: Any) -> Any:
        value = program.value(argument)
        if not isinstance(value, Tensor) or value.is_contiguous():
            return argument
        produces = on_meta(value.to("meta").contiguous())
        return Call(aten.clone.default, (argument,), {"memory_format": torch.contiguous_format}, produces)

    operator = program.graph.operators[v]
    return Replacement((v,), operator.name, operator.target, program.calls[v].map(copied), {v: None})
