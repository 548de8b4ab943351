"""Schedule units: operators that IOS schedules as one (IOS, Section 5, Table 2)."""

import torch

from systems.scheduling.graph.patterns import (
    ACTIVATIONS,
    BATCH_NORM,
    CONCATENATION,
    CONVOLUTIONS,
    is_elementwise,
    only_user,
    users,
)
from systems.scheduling.graph.program import Input, Program

aten = torch.ops.aten
NORMS = (BATCH_NORM,)
JOINS = (CONCATENATION,)
PADS = (aten.constant_pad_nd.default, aten.pad.default)
KINDS = ("operator", "conv_relu", "relu_sepconv", "auto")


def find_units(program: Program, kind: str = "auto") -> list[tuple[int, ...]]:
    """The operators of `program` in units, each in the order of capture; the units in the order of their last operators.

    Invariant: an operator that is read outside its unit is the last of the unit, or depends on weights alone. So the units
    depend on each other without cycles, and none on a later one.

    Elementwise operators and paddings go into the convolution or concatenation that alone reads them, concatenations into
    such a concatenation: in the paper's engine, an operator's input may be a sum or a concatenation. An operator of weights
    alone goes into the first unit that reads it: it could run at any time, and would leave no articulation point.

    Args:
        kind: operator: each operator by itself. conv_relu: a convolution, the batch norm and the activation after it.
            relu_sepconv: a ReLU, the depthwise and the pointwise convolution after it, and a batch norm after those. auto:
            both, separable convolutions first.
    """
    n = len(program.graph)
    readers = users(program)
    unit_of: dict[int, int] = {}
    units: list[list[int]] = []

    def grow(start: int, steps: list[tuple[object, ...]], least: int = 1) -> None:
        """A unit of `start` and of as many operators after it as match the steps; a step that does not match is left out."""
        chain = [start]
        for functions in steps:
            v = only_user(readers[chain[-1]])
            if v is not None and v not in unit_of and program.calls[v].function in functions:
                chain.append(v)
        if len(chain) >= least:
            unit_of.update(dict.fromkeys(chain, len(units)))
            units.append(chain)

    if kind in ("relu_sepconv", "auto"):
        for v in range(n):
            if v not in unit_of and _is_depthwise(program, v):
                grow(v, [CONVOLUTIONS, NORMS], least=2)
    if kind in ("conv_relu", "auto"):
        for v in range(n):
            if v not in unit_of and program.calls[v].function in CONVOLUTIONS:
                grow(v, [NORMS, ACTIVATIONS])
    if kind != "operator":
        weights_only = _weights_only(program)
        for v in reversed(range(n)):  # readers first
            if v in unit_of:
                continue
            reading = [unit_of[r] for r in readers[v] if r >= 0]
            homes = set(reading) if len(reading) == len(readers[v]) else set()
            if weights_only[v] and reading:
                home = min(reading, key=lambda i: max(units[i]))
            elif len(homes) == 1 and _is_input_of(program, v, units[reading[0]]):
                home = reading[0]
            else:
                home = len(units)
                units.append([])
            units[home].append(v)
            unit_of[v] = home
    else:
        units = [[v] for v in range(n)]
    return sorted((tuple(sorted(u)) for u in units), key=lambda u: u[-1])


def _is_input_of(program: Program, v: int, unit: list[int]) -> bool:
    """Is operator v, read by this unit alone, a part of the unit's input?"""
    functions = {program.calls[u].function for u in unit}
    if functions & set(CONVOLUTIONS):
        return is_elementwise(program, v) or program.calls[v].function in PADS
    if program.calls[max(unit)].function in JOINS:
        return is_elementwise(program, v) or program.calls[v].function in JOINS
    return False


def _weights_only(program: Program) -> list[bool]:
    """For each operator whether it depends on no input of the model."""
    weights_only: list[bool] = []
    for v, call in enumerate(program.calls):
        reads_input = any(isinstance(a, Input) for a in call.leaves())
        weights_only.append(not reads_input and all(weights_only[u] for u in program.graph.predecessors[v]))
    return weights_only


def _is_depthwise(program: Program, v: int) -> bool:
    call = program.calls[v]
    return call.function in CONVOLUTIONS and len(call.args) > 6 and call.args[6] > 1 and call.args[1].shape[1] == 1
