"""For each convolution the fastest implementation and layout, as measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from math import inf
from typing import Any

import torch
from torch import Tensor

from systems.scheduling.graph.derived import Derived
from systems.scheduling.graph.part import alone, part
from systems.scheduling.graph.program import Call, Input, Output, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .fuse_elementwise import is_elementwise
from .layouts import cheapest_layouts

aten = torch.ops.aten
CONVOLUTION = aten.conv2d.default
POOLS = (aten.max_pool2d.default, aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default)
LAYOUTS = ("contiguous", "channels_last")

Cost = Callable[[Program], float]  # milliseconds of a program, its operators one after the other


@dataclass(frozen=True)
class Choice:
    """What was chosen for equal operators. milliseconds: of every candidate, by name ("library channels_last"), first of
    PyTorch's own choice in the layout of the model.
    """

    pattern: str
    chosen: str
    milliseconds: dict[str, float]
    operators: tuple[int, ...]

    @property
    def gain(self) -> float:
        """How many times as fast as PyTorch's own choice in the layout of the model."""
        return next(iter(self.milliseconds.values())) / self.milliseconds[self.chosen]


def select_kernels(
    program: Program, cost: Cost, implementations: bool = True, layouts: bool = True
) -> tuple[Program, list[Choice]]:
    """Give every convolution its fastest implementation, and run in channels_last what gains by it.

    Candidates are what PyTorch dispatches to (library) and, with `implementations`, the vendor's convolution and PyTorch's
    own (Nimble, Section 5, "basic kernel selection"); with `layouts`, all of them in channels_last too. Each is measured
    alone. Operators that take any layout join in; conversions are paid for where layouts meet, and the assignment with the
    least total time is found by a minimum cut (layouts.py). The sum over operators is what is minimised: on a model with
    branches the gain in latency is less.
    """
    flexible = [_is_flexible(program, v) for v in range(len(program.graph))]
    measured: dict[str, float] = {}

    def milliseconds(candidate: Program) -> float:
        signature = candidate.signature(0)
        if signature not in measured:
            measured[signature] = cost(candidate)
        return measured[signature]

    tables: dict[int, dict[tuple[str, int], float]] = {}  # convolution -> (implementation, layout) -> milliseconds
    costs = []
    for v, call in enumerate(program.calls):
        if not flexible[v]:
            costs.append((0.0, inf))
            continue
        if call.function is CONVOLUTION:
            tables[v] = {
                (name, layout): milliseconds(candidate)
                for layout in ((0, 1) if layouts else (0,))
                for name, candidate in _candidates(program, v, layout)
                if implementations or name == "library"
            }
            best = [min((t for (_, at), t in tables[v].items() if at == layout), default=inf) for layout in (0, 1)]
            costs.append((best[0], best[1]))
        else:
            both = [milliseconds(_one(program, v, layout)) for layout in ((0, 1) if layouts else (0,))]
            costs.append((both[0], both[1] if layouts else inf))
    assigned = _assign(program, flexible, costs, milliseconds) if layouts else [0] * len(costs)
    return _apply(program, assigned, tables), _choices(program, assigned, tables)


def _is_flexible(program: Program, v: int) -> bool:
    """May its tensors lie in memory as they like? All of four dimensions, and an operator that looks at no strides."""
    call = program.calls[v]
    if not isinstance(call.produces, Tensor) or call.produces.dim() != 4 or not _tensors_read(call):
        return False
    if any(program.value(a).dim() != 4 for a in _tensors_read(call)):
        return False
    if call.function is CONVOLUTION:
        return isinstance(call.args[1], Tensor) and not call.kwargs
    if call.function is aten.cat.default:
        return len(call.args) > 1 and call.args[1] == 1 and len(_tensors_read(call)) == len(call.args[0])
    if call.function is aten.batch_norm.default or call.function in POOLS:
        return True
    return is_elementwise(program, v) and not any(isinstance(a, Tensor) for a in call.args)


def _tensors_read(call: Call) -> list[Output | Input]:
    return [a for a in call.leaves() if isinstance(a, Output | Input)]


def _candidates(program: Program, v: int, layout: int) -> list[tuple[str, Program]]:
    """The implementations of convolution v that there are in a layout, as programs of one operator."""
    whole = _one(program, v, layout)
    found = [("library", whole)]
    name, call, examples = program.graph.operators[v].name, whole.calls[0], whole.examples
    for kind, function in _others(call, examples[0].device.type):
        if kind == "native" and layout == 1:
            continue  # it would make its input contiguous itself
        candidate = changed(call, function=function)
        found.append((kind, alone(name, f"opweave.{kind}_conv2d", candidate, examples)))
    return found


def _one(program: Program, v: int, layout: int) -> Program:
    """Operator v as a program, in a layout."""
    single = part(program, [v], channels_last=layout == 1)
    call = single.calls[0]
    if layout == 1 and call.function is CONVOLUTION:
        weight = call.args[1].contiguous(memory_format=torch.channels_last)
        call = changed(call, args=(call.args[0], weight, *call.args[2:]))
    operator = program.graph.operators[v]
    return alone(operator.name, operator.target, call, single.examples)


def _others(call: Call, device: str) -> list[tuple[str, Callable[..., Any]]]:
    """What there is beside the library's dispatch, as functions that take conv2d's arguments."""
    weight, groups = call.args[1], call.args[6] if len(call.args) > 6 else 1
    dilation = call.args[5] if len(call.args) > 5 else [1, 1]
    others: list[tuple[str, Callable[..., Any]]] = []
    depthwise = groups > 1 and weight.shape[1] == 1 and weight.shape[0] % groups == 0
    if device == "cuda" and depthwise:  # which of the two PyTorch dispatches to depends on dtype and layout
        others += [("cudnn", cudnn_conv2d), ("native", native_conv2d)]
    elif groups == 1 and (device == "cuda" or list(dilation) == [1, 1]):
        others.append(("native", native_conv2d))
    return others


def cudnn_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """cuDNN's convolution, also where PyTorch would dispatch to a kernel of its own (depthwise). Shapes as conv2d's."""
    allow_tf32 = torch.backends.cudnn.allow_tf32
    out = aten.cudnn_convolution.default(x, weight, padding, stride, dilation, groups, True, False, allow_tf32)
    return out if bias is None else out.add_(bias.view(-1, 1, 1))


def native_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """PyTorch's own convolution: im2col and a matrix product, or its depthwise kernel. Shapes as conv2d's."""
    kernel = weight.shape[2:]
    if groups > 1:
        return aten._conv_depthwise2d.default(x, weight, kernel, bias, stride, padding, dilation)  # type: ignore[no-any-return]
    if list(dilation) != [1, 1]:
        return aten.slow_conv_dilated2d.default(x, weight, kernel, bias, stride, padding, dilation)  # type: ignore[no-any-return]
    return aten._slow_conv2d_forward.default(x, weight, kernel, bias, stride, padding)  # type: ignore[no-any-return]


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "library": CONVOLUTION,
    "cudnn": cudnn_conv2d,
    "native": native_conv2d,
}


def _assign(
    program: Program, flexible: list[bool], costs: list[tuple[float, float]], milliseconds: Callable[[Program], float]
) -> list[int]:
    n = len(program.graph)
    inputs = sorted({a.index for c in program.calls for a in _tensors_read(c) if isinstance(a, Input)})
    place = {index: n + i for i, index in enumerate(inputs)}  # the model's inputs, which come as they are
    reads = [
        [r.operator for r in c.references()] + [place[a.index] for a in c.leaves() if isinstance(a, Input)]
        for c in program.calls
    ]
    # The model's outputs are given back as they were; readers that want them contiguous stand for that.
    kept = [u for u in sorted(program.kept_operators()) if flexible[u]]
    values = [c.produces for c in program.calls] + [program.examples[i] for i in inputs]
    read = {u for producers in reads for u in producers} | set(kept)
    conversions = [_conversion(program, values[u], milliseconds) if u in read else (0.0, 0.0) for u in range(len(values))]
    everywhere = [*costs, *[(0.0, inf)] * (len(inputs) + len(kept))]
    readings = [*reads, *[[] for _ in inputs], *[[u] for u in kept]]
    conversions += [(0.0, 0.0)] * len(kept)
    return cheapest_layouts(everywhere, readings, conversions)[:n]


def _conversion(program: Program, value: Any, milliseconds: Callable[[Program], float]) -> tuple[float, float]:
    """Milliseconds of converting a tensor to contiguous and to channels_last."""
    if not isinstance(value, Tensor) or value.dim() != 4 or _same_either_way(value):
        return 0.0, 0.0
    times = []
    for source, layout in ((1, 0), (0, 1)):
        call = _convert(Input(0), value, layout)
        example = torch.zeros(value.shape, dtype=value.dtype, device=program.device)
        example = example.contiguous(memory_format=_memory_format(source))
        times.append(milliseconds(alone("clone", "aten.clone.default", call, (example,))))
    return times[0], times[1]


def _convert(reference: Any, value: Tensor, layout: int) -> Call:
    memory_format = _memory_format(layout)
    return Call(
        aten.clone.default, (reference,), {"memory_format": memory_format}, value.contiguous(memory_format=memory_format)
    )


def _memory_format(layout: int) -> torch.memory_format:
    return torch.channels_last if layout == 1 else torch.contiguous_format


def _same_either_way(value: Tensor) -> bool:
    """One channel, or one pixel: both layouts are the same bytes."""
    return value.shape[1] == 1 or tuple(value.shape[2:]) == (1, 1)


def _apply(program: Program, assigned: list[int], tables: dict[int, dict[tuple[str, int], float]]) -> Program:
    """The program with its convolutions replaced and conversions put in."""
    converted: dict[tuple[Any, int], Call] = {}

    def read(layout: int) -> Callable[[Any], Any]:
        def change(argument: Any) -> Any:
            if not isinstance(argument, Output | Input):
                return argument
            value = program.value(argument)
            if not isinstance(value, Tensor) or value.dim() != 4 or _same_either_way(value):
                return argument
            source = assigned[argument.operator] if isinstance(argument, Output) else 0
            if source == layout:
                return argument
            return converted.setdefault((argument, layout), _convert(argument, value, layout))

        return change

    replacements = []
    for v, call in enumerate(program.calls):
        layout, operator = assigned[v], program.graph.operators[v]
        new, target = call.map(read(layout)), operator.target
        derived: tuple[Derived, ...] = ()
        if layout == 1:
            new = changed(new, produces=call.produces.contiguous(memory_format=torch.channels_last))
        if v in tables:
            name = _fastest(tables[v], layout)
            if name != "library":
                new, target = changed(new, function=IMPLEMENTATIONS[name]), f"opweave.{name}_conv2d"
            if layout == 1:
                laid = Derived.of(_to_channels_last, call.args[1])
                new, derived = changed(new, args=(new.args[0], laid.tensor, *new.args[2:])), (laid,)
        replacements.append(Replacement((v,), operator.name, target, new, {v: None}, derived))
    return replace(program, replacements, [read(0)(o) for o in program.outputs])[0]


def _fastest(table: dict[tuple[str, int], float], layout: int) -> str:
    """The implementation that won in a layout; PyTorch's own choice where another is no faster."""
    return min((t, name != "library", name) for (name, at), t in table.items() if at == layout)[2]


def _to_channels_last(weight: Tensor) -> Tensor:
    return weight.contiguous(memory_format=torch.channels_last)


def describe(program: Program, v: int) -> str:
    """A convolution for people: "1x192x16x16, weight 192x1x3x3, stride 2, groups 192"."""
    call = program.calls[v]
    parts = ["x".join(map(str, program.value(call.args[0]).shape)), "weight " + "x".join(map(str, call.args[1].shape))]
    for i, name, default in ((3, "stride", 1), (5, "dilation", 1), (6, "groups", 1)):
        value = call.args[i] if len(call.args) > i else default
        values = [value] if isinstance(value, int) else list(value)
        if set(values) != {default}:
            parts.append(f"{name} {'x'.join(map(str, values[:1] if len(set(values)) == 1 else values))}")
    return ", ".join(parts)


def _choices(program: Program, assigned: list[int], tables: dict[int, dict[tuple[str, int], float]]) -> list[Choice]:
    """One for each set of equal convolutions of one layout, in the order of capture."""
    operators: dict[tuple[str, int], list[int]] = {}
    for v in tables:
        operators.setdefault((program.signature(v), assigned[v]), []).append(v)
    choices = []
    for (_, layout), members in operators.items():
        table = tables[members[0]]
        chosen = _fastest(table, layout)
        times = {f"{name} {LAYOUTS[at]}": t for (name, at), t in table.items()}
        choices.append(Choice(describe(program, members[0]), f"{chosen} {LAYOUTS[layout]}", times, tuple(members)))
    return choices
