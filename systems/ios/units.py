"""Schedule units: operators that IOS schedules as one (IOS, Section 5, Table 2)."""

import torch

from systems.scheduling.operator_graph import OperatorGraph
from systems.scheduling.passes.fuse_elementwise import is_elementwise
from systems.scheduling.program import Program
from systems.scheduling.rewrite import only_user, users

aten = torch.ops.aten
CONVOLUTIONS = (aten.conv2d.default, aten.conv1d.default, aten.conv3d.default)
ACTIVATIONS = (aten.relu.default, aten.hardtanh.default, aten.silu.default, aten.sigmoid.default)
KINDS = ("operator", "conv_relu", "relu_sepconv", "auto")


def find_units(program: Program, kind: str = "auto") -> list[tuple[int, ...]]:
    """The operators of `program` in units, each in the order of capture; the units in the order of their last operators.

    conv_relu: a convolution, the batch norm and the activation after it. relu_sepconv: a ReLU, the depthwise and the
    pointwise convolution after it, and a batch norm after those. auto: both, separable convolutions first. operator: each
    operator by itself. A unit is a chain in which nothing but the next one reads an operator, so that the units depend on
    each other without cycles, and none on one that comes later.
    """
    readers = users(program)
    taken: dict[int, int] = {}
    units: list[list[int]] = []

    def grow(start: int, steps: list[tuple[object, ...]], least: int) -> None:
        """A unit of `start` and of as many operators after it as match the steps, a step that does not match left out."""
        chain = [start]
        for functions in steps:
            v = only_user(readers[chain[-1]])
            if v is not None and v not in taken and program.calls[v].function in functions:
                chain.append(v)
        if len(chain) >= least:
            units.append(chain)
            taken.update(dict.fromkeys(chain, len(units) - 1))

    n = len(program.graph)
    norm = (aten.batch_norm.default,)
    if kind in ("relu_sepconv", "auto"):
        for v in range(n):
            if v in taken:
                continue
            after = only_user(readers[v])
            if program.calls[v].function is aten.relu.default and after is not None and _is_depthwise(program, after):
                grow(v, [CONVOLUTIONS, CONVOLUTIONS, norm], 3)
            elif _is_depthwise(program, v):
                grow(v, [CONVOLUTIONS, norm], 2)
    if kind in ("conv_relu", "auto"):
        for v in range(n):
            if v not in taken and program.calls[v].function in CONVOLUTIONS:
                grow(v, [norm, ACTIVATIONS], 1)
    if kind in ("relu_sepconv", "auto"):
        for place, unit in enumerate(units):
            if len(unit) > 1:
                _absorb(program, readers, unit, taken, place)
    units += [[v] for v in range(n) if v not in taken]
    return sorted((tuple(sorted(u)) for u in units), key=lambda u: u[-1])


def unit_graph(graph: OperatorGraph, units: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """For each unit those that it depends on directly, by their places in `units`. Raises ValueError for a forward one."""
    place = {v: i for i, unit in enumerate(units) for v in unit}
    predecessors = []
    for i, unit in enumerate(units):
        before = sorted({place[u] for v in unit for u in graph.predecessors[v]} - {i})
        if before and before[-1] > i:
            raise ValueError(f"unit {i} depends on unit {before[-1]}, which comes after it")
        predecessors.append(tuple(before))
    return predecessors


def _absorb(program: Program, readers: list[list[int]], unit: list[int], taken: dict[int, int], place: int) -> None:
    """Add to a unit the elementwise operators that it alone reads, and what only those read."""
    waiting = list(unit)
    while waiting:
        for u in program.graph.predecessors[waiting.pop()]:
            if u not in taken and set(readers[u]) <= set(unit) and is_elementwise(program, u):
                unit.append(u)
                taken[u] = place
                waiting.append(u)


def _is_depthwise(program: Program, v: int) -> bool:
    call = program.calls[v]
    return call.function in CONVOLUTIONS and len(call.args) > 6 and call.args[6] > 1 and call.args[1].shape[1] == 1
