"""Selects for each convolution the fastest implementation and layout (Nimble, Section 5, "basic kernel selection")."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace as changed
from functools import cache
from math import inf
from typing import Any

import torch
from torch import Tensor

from systems.scheduling.decision import Decision, place_of
from systems.scheduling.graph.derived import Derived
from systems.scheduling.graph.part import alone, part
from systems.scheduling.graph.patterns import (
    BATCH_NORM,
    CONCATENATION,
    CONVOLUTION,
    convolution,
    is_elementwise,
    references,
    users,
)
from systems.scheduling.graph.program import Call, Input, Output, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Cost, Rewritten
from .layouts import cheapest_layouts
from .norm_places import norm_place, own_norm
from .own_kernels import META, has_kernels
from .patterns import (
    GROUP_NORM,
    cudnn_conv2d,
    group_norm_channels_last,
    is_product,
    is_same_either_way,
    name_convolution,
    native_conv2d,
    product_conv2d,
)

aten = torch.ops.aten
POOLS = (aten.max_pool2d.default, aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default)
RESIZES = (aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec)
KIND = "select_kernels"
OWN = "own kernels"  # of a group norm
NORM_TARGET = f"opweave.{group_norm_channels_last.__name__}"
LAYOUTS = ("contiguous", "channels_last")  # by number
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "library": CONVOLUTION,
    "cudnn": cudnn_conv2d,
    "native": native_conv2d,
    "product": product_conv2d,
}

Known = Callable[[Program], bool]
Times = dict[tuple[str, int], float]  # milliseconds of a convolution by implementation and layout


def select_kernels(program: Program, context: Context) -> Rewritten:
    """Give each convolution its fastest implementation, and run in channels_last what gains by it.

    The alternatives of a convolution are what PyTorch dispatches to (library) and, with the switch `select_kernels`, the
    vendor's kernel and PyTorch's own; with the switch `select_layouts`, the first two in channels_last too, and there a
    pointwise one as a product of pixels with the weight. Each is measured alone. With the switch `select_norms` a group norm
    takes channels_last as well, in kernels that the pass of that name then puts in.

    Invariant: of all assignments of layouts to operators, this one has the least sum of measured times, with a conversion
    wherever layouts meet (`cheapest_layouts`). Operators that take any layout take part. On a model with branches the gain
    in latency is less than in the sum.
    """
    implementations, layouts = "select_kernels" in context.switches, "select_layouts" in context.switches
    both = (0, 1) if layouts else (0,)
    norms = "select_norms" in context.switches and has_kernels(program.device)
    flexible = [_is_flexible(program, v) or (norms and _is_norm(program, v)) for v in range(len(program.graph))]
    milliseconds = _remembered(context.cost)
    times_by_signature: dict[str, Times] = {}
    times_by_convolution: dict[int, Times] = {}
    usable_by_convolution: dict[int, Times] = {}
    costs = []  # of each operator, contiguous and channels_last
    for v, call in enumerate(program.calls):
        if not flexible[v]:
            costs.append((0.0, inf))
            continue
        if (signature := program.signature(v)) not in times_by_signature:
            names = None if implementations else ("library", OWN)
            times_by_signature[signature] = {
                (name, layout): t
                for layout in (both if _follows_layout(program, v) else (0,))
                for name, t in _times(program, v, layout, names, milliseconds, context.knows)
            }
        usable = times = times_by_signature[signature]
        if call.function is CONVOLUTION:
            times_by_convolution[v] = times
            usable_by_convolution[v] = usable = _usable(program, v, times, context)
        best = [min((t for (_, at), t in usable.items() if at == layout), default=inf) for layout in (0, 1)]
        costs.append((best[0], best[1]))
    assigned = _assign(program, flexible, costs, milliseconds, context.knows) if layouts else [0] * len(costs)
    rewritten = _apply(program, assigned, usable_by_convolution)
    return rewritten, _decisions(program, assigned, times_by_convolution, usable_by_convolution)


def _times(
    program: Program,
    v: int,
    layout: int,
    names: Collection[str] | None,
    milliseconds: Cost,
    knows: Known,
) -> Iterator[tuple[str, float]]:
    """The implementations of operator v in a layout, with their times; inputs have memory where one is measured alone.

    names: of those that are asked for; None for all.
    """
    real: dict[str, Program] = {}
    device = program.device if program.calls[v].function is GROUP_NORM else META
    for name, candidate in _candidates(program, v, layout, device):
        if names is None or name in names:
            if candidate.device == META and not knows(candidate):
                real = real or dict(_candidates(program, v, layout, program.device))
                candidate = real[name]
            yield name, _measured(name, candidate, milliseconds)


def _measured(name: str, candidate: Program, milliseconds: Cost) -> float:
    """Of a kernel of our own infinite where it does not run here."""
    if name != OWN:
        return milliseconds(candidate)
    try:
        return milliseconds(candidate)
    except Exception:  # whatever Triton raises of a kernel that does not fit
        return inf


def _remembered(cost: Cost) -> Cost:
    """`cost` of programs of one operator, asked once for equal ones."""
    ms_by_signature: dict[str, float] = {}

    def milliseconds(candidate: Program) -> float:
        signature = candidate.signature(0)
        if signature not in ms_by_signature:
            ms_by_signature[signature] = cost(candidate)
        return ms_by_signature[signature]

    return milliseconds


def _is_flexible(program: Program, v: int) -> bool:
    """May its tensors lie in memory as they like? All have four dimensions, and the operator looks at no strides.

    What lies in neither layout, as behind a transposition, stays so: a caller may get it.
    """
    call = program.calls[v]
    if not isinstance(call.produces, Tensor) or call.produces.dim() != 4 or not references(call):
        return False
    if not any(call.produces.is_contiguous(memory_format=_memory_format(layout)) for layout in (0, 1)):
        return False
    if any(program.value(a).dim() != 4 for a in references(call)):
        return False
    if call.function is CONVOLUTION:
        return convolution(call) is not None
    if call.function is CONCATENATION:
        return len(call.args) > 1 and call.args[1] == 1 and len(references(call)) == len(call.args[0])
    if call.function is BATCH_NORM or call.function in (*POOLS, *RESIZES):
        return True
    return is_elementwise(program, v) and not any(isinstance(a, Tensor) for a in call.args)


def _follows_layout(program: Program, v: int) -> bool:
    """Does a flexible operator return channels_last where it reads it? Not where what it reads is the same either way.

    A concatenation is contiguous where one of its images may be.
    """
    call = program.calls[v]
    read = [is_same_either_way(program.value(a)) for a in references(call)]
    return not (any(read) if call.function is CONCATENATION else all(read))


def _candidates(program: Program, v: int, layout: int, device: torch.device) -> list[tuple[str, Program]]:
    """The implementations of operator v in a layout, each as a program. Convolutions and group norms have several.

    device: of the inputs; a group norm's are the program's.
    """
    if program.calls[v].function is GROUP_NORM:
        norm = _own_norm(program, v, layout)
        library_norm = [("library", _single(program, v, 0, device))] if layout == 0 else []
        return library_norm + ([(OWN, norm)] if norm is not None else [])
    library = _single(program, v, layout, device)
    candidates = [("library", library)]
    if program.calls[v].function is not CONVOLUTION:
        return candidates
    name, call, examples = program.graph.operators[v].name, library.calls[0], library.examples
    for kind in _other_implementations(call, examples[0], layout, program.device.type == "cuda"):
        candidate = changed(call, function=IMPLEMENTATIONS[kind])
        candidates.append((kind, alone(name, f"opweave.{kind}_conv2d", candidate, examples)))
    return candidates


def _is_norm(program: Program, v: int) -> bool:
    """Is it a group norm that kernels of this project compute in channels_last?"""
    return program.calls[v].function is GROUP_NORM and _own_norm(program, v, layout=1) is not None


def _own_norm(program: Program, v: int, layout: int) -> Program | None:
    """Group norm v in a layout as a program of our own kernels, for which `select_norms` puts them in."""
    single = part(program, [v], channels_last=layout == 1)
    if layout == 1:
        call = single.calls[0]
        call = changed(call, function=group_norm_channels_last, produces=_channels_last(call.produces))
        single = alone(single.graph.operators[0].name, NORM_TARGET, call, single.examples)
    place = norm_place(single, users(single), 0)
    return None if place is None else replace(single, [own_norm(single, place)])[0]


def _single(program: Program, v: int, layout: int, device: torch.device) -> Program:
    """Operator v as a program, in a layout."""
    single = part(program, [v], channels_last=layout == 1, device=device)
    call = single.calls[0]
    if layout == 1 and call.function is CONVOLUTION:
        weight = _channels_last(call.args[1].to(device))
        call = changed(call, args=(call.args[0], weight, *call.args[2:]))
    operator = program.graph.operators[v]
    return alone(operator.name, operator.target, call, single.examples)


def _other_implementations(call: Call, x: Tensor, layout: int, is_cuda: bool) -> list[str]:
    """The names of the implementations beside the library's dispatch, of images x in a layout."""
    conv = convolution(call)
    assert conv is not None
    is_depthwise = conv.groups > 1 and conv.weight.shape[1] == 1 and conv.weight.shape[0] % conv.groups == 0
    names = ["cudnn"] if is_cuda and is_depthwise else []
    if layout == 1:  # where PyTorch's own would make its input contiguous
        return names + ["product"] * is_product(x, conv)
    # Which of cuDNN's and PyTorch's own depthwise kernel PyTorch dispatches to depends on dtype and layout.
    has_native = bool(names) or (conv.groups == 1 and (is_cuda or set(conv.dilation) == {1}))
    return names + ["native"] * has_native


def _assign(
    program: Program,
    flexible: list[bool],
    costs: list[tuple[float, float]],
    milliseconds: Cost,
    knows: Known,
) -> list[int]:
    """The layout of each operator. The model's inputs and outputs are nodes of the problem too, and stay as they are."""
    n = len(program.graph)
    inputs = sorted({a.index for c in program.calls for a in references(c) if isinstance(a, Input)})
    node_by_input = {index: n + i for i, index in enumerate(inputs)}
    reads = [
        [r.operator for r in c.references()] + [node_by_input[a.index] for a in c.leaves() if isinstance(a, Input)]
        for c in program.calls
    ]
    # The model's outputs are returned contiguous: for each stands a reader that takes nothing else.
    returned = [u for u in sorted(program.kept_operators()) if flexible[u]]
    values = [c.produces for c in program.calls] + [program.examples[i] for i in inputs]
    read = {u for producers in reads for u in producers} | set(returned)
    convert = _conversions(program, milliseconds, knows)
    conversions = [convert(values[u]) if u in read else (0.0, 0.0) for u in range(len(values))]
    all_costs = [*costs, *[(0.0, inf)] * (len(inputs) + len(returned))]
    all_reads = [*reads, *[[] for _ in inputs], *[[u] for u in returned]]
    conversions += [(0.0, 0.0)] * len(returned)
    return cheapest_layouts(all_costs, all_reads, conversions)[:n]


def _conversions(program: Program, milliseconds: Cost, knows: Known) -> Callable[[object], tuple[float, float]]:
    """A function of a value: milliseconds of converting it to contiguous and to channels_last."""

    def conversion_alone(shape: torch.Size, dtype: torch.dtype, layout: int, device: torch.device) -> Program:
        example = torch.zeros(shape, dtype=dtype, device=device).contiguous(memory_format=_memory_format(1 - layout))
        return alone("clone", "aten.clone.default", _convert(Input(0), example.to(META), layout), (example,))

    @cache
    def of(shape: torch.Size, dtype: torch.dtype) -> tuple[float, float]:
        times = []
        for layout in (0, 1):
            known = conversion_alone(shape, dtype, layout, META)
            times.append(milliseconds(known if knows(known) else conversion_alone(shape, dtype, layout, program.device)))
        return times[0], times[1]

    def conversion(value: object) -> tuple[float, float]:
        if not isinstance(value, Tensor) or value.dim() != 4 or is_same_either_way(value):
            return 0.0, 0.0
        return of(value.shape, value.dtype)

    return conversion


def _convert(reference: Output | Input, value: Tensor, layout: int) -> Call:
    memory_format = _memory_format(layout)
    return Call(
        aten.clone.default, (reference,), {"memory_format": memory_format}, value.contiguous(memory_format=memory_format)
    )


def _memory_format(layout: int) -> torch.memory_format:
    return torch.channels_last if layout == 1 else torch.contiguous_format


def _apply(program: Program, assigned: list[int], times_by_convolution: dict[int, Times]) -> Program:
    """The program with its convolutions replaced and conversions put in."""
    conversions: dict[tuple[Output | Input, int], Call] = {}

    def read(layout: int) -> Callable[[Any], Any]:
        def change(argument: Any) -> Any:
            if not isinstance(argument, Output | Input):
                return argument
            value = program.value(argument)
            if not isinstance(value, Tensor) or value.dim() != 4 or is_same_either_way(value):
                return argument
            source = assigned[argument.operator] if isinstance(argument, Output) else 0
            if source == layout or value.is_contiguous(memory_format=torch.channels_last):  # as it was captured
                return argument
            return conversions.setdefault((argument, layout), _convert(argument, value, layout))

        return change

    replacements = []
    for v, call in enumerate(program.calls):
        layout, operator = assigned[v], program.graph.operators[v]
        new, target = call.map(read(layout)), operator.target
        derived: tuple[Derived, ...] = ()
        if layout == 1:
            new = changed(new, produces=_channels_last(call.produces))
            if call.function is GROUP_NORM:
                new, target = changed(new, function=group_norm_channels_last), NORM_TARGET
        if v in times_by_convolution:
            name = _fastest(times_by_convolution[v], layout)
            if name != "library":
                new, target = changed(new, function=IMPLEMENTATIONS[name]), f"opweave.{name}_conv2d"
            if layout == 1:
                weight = Derived.of(_channels_last, call.args[1])
                new, derived = changed(new, args=(new.args[0], weight.tensor, *new.args[2:])), (weight,)
        replacements.append(Replacement((v,), operator.name, target, new, {v: None}, derived))
    return replace(program, replacements, [read(0)(o) for o in program.outputs])[0]


def _fastest(times: Times, layout: int) -> str:
    """The fastest implementation in a layout; PyTorch's own choice where another is no faster."""
    return min((t, name != "library", name) for (name, at), t in times.items() if at == layout)[2]


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _usable(program: Program, v: int, times: Times, context: Context) -> Times:
    """The alternatives of convolution v that may be taken: all, or the one that `context` names."""
    wanted = context.choices.get(place_of(KIND, program.signature(v)))
    return {key: t for key, t in times.items() if _name(*key) == wanted} or times


def _name(implementation: str, layout: int) -> str:
    return f"{implementation} {LAYOUTS[layout]}"


def _decisions(
    program: Program, assigned: list[int], times_by_convolution: dict[int, Times], usable: dict[int, Times]
) -> list[Decision]:
    """One for each convolution, in the order of capture."""
    decisions = []
    for v, times in times_by_convolution.items():
        chosen = _name(_fastest(usable[v], assigned[v]), assigned[v])
        milliseconds: dict[str, float | None] = {_name(*key): t for key, t in times.items()}
        place = place_of(KIND, program.signature(v))
        decisions.append(Decision(KIND, name_convolution(program, v), (v,), milliseconds, chosen, place=place))
    return decisions
