"""Schedule units: operators that IOS schedules as one (IOS, Section 5, Table 2)."""

import torch

from systems.scheduling.graph.program import Input, Program
from systems.scheduling.graph.rewrite import only_user, users
from systems.scheduling.passes.fuse_elementwise import is_elementwise

aten = torch.ops.aten
CONVOLUTIONS = (aten.conv2d.default, aten.conv1d.default, aten.conv3d.default)
ACTIVATIONS = (aten.relu.default, aten.hardtanh.default, aten.silu.default, aten.sigmoid.default)
NORMS = (aten.batch_norm.default,)
JOINS = (aten.cat.default,)
PADS = (aten.constant_pad_nd.default, aten.pad.default)
KINDS = ("operator", "conv_relu", "relu_sepconv", "auto")


def find_units(program: Program, kind: str = "auto") -> list[tuple[int, ...]]:
    """The operators of `program` in units, each in the order of capture; the units in the order of their last operators.

    operator: each operator by itself. conv_relu: a convolution, the batch norm and the activation after it. relu_sepconv: a
    ReLU, the depthwise and the pointwise convolution after it, and a batch norm after those. auto: both, separable
    convolutions first. But for `operator`, sums and concatenations are made by the unit that alone reads them, as in the
    paper's engine, where an operator's input may be a sum or a concatenation: elementwise operators and paddings go into
    the convolution or the concatenation that alone reads them, and concatenations into such a concatenation. What depends
    on weights alone goes into the first unit that reads it, for it could run at any time and would leave no articulation
    point.

    Whatever has a reader outside of its unit is the last operator of it, or depends on nothing but weights: so the units
    depend on each other without cycles, and none on one that comes later.
    """
    n = len(program.graph)
    readers = users(program)
    unit_of: dict[int, int] = {}
    units: list[list[int]] = []

    def grow(start: int, steps: list[tuple[object, ...]], least: int = 1) -> None:
        """A unit of `start` and of as many operators after it as match the steps, a step that does not match left out."""
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
            own = [unit_of[r] for r in readers[v] if r >= 0]
            inside = set(own) if len(own) == len(readers[v]) else set()
            if weights_only[v] and own:
                home = min(own, key=lambda i: max(units[i]))
            elif len(inside) == 1 and _is_made_by(program, v, units[own[0]]):
                home = own[0]
            else:
                home = len(units)
                units.append([])
            units[home].append(v)
            unit_of[v] = home
    else:
        units = [[v] for v in range(n)]
    return sorted((tuple(sorted(u)) for u in units), key=lambda u: u[-1])


def _is_made_by(program: Program, v: int, unit: list[int]) -> bool:
    """Is operator v, read by this unit alone, a part of the unit's input?"""
    functions = {program.calls[u].function for u in unit}
    if functions & set(CONVOLUTIONS):
        return is_elementwise(program, v) or program.calls[v].function in PADS
    if program.calls[max(unit)].function in JOINS:
        return is_elementwise(program, v) or program.calls[v].function in JOINS
    return False


def _weights_only(program: Program) -> list[bool]:
    """Which operators depend on no input of the model."""
    found: list[bool] = []
    for v, call in enumerate(program.calls):
        reads_input = any(isinstance(a, Input) for a in call.leaves())
        found.append(not reads_input and all(found[u] for u in program.graph.predecessors[v]))
    return found


def _is_depthwise(program: Program, v: int) -> bool:
    call = program.calls[v]
    return call.function in CONVOLUTIONS and len(call.args) > 6 and call.args[6] > 1 and call.args[1].shape[1] == 1
