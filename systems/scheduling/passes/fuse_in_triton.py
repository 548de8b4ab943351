"""Puts in kernels of our own for convolutions and what stands around them, where they are faster."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conf.text import first_line
from systems.scheduling.decision import Decision, place_of
from systems.scheduling.graph.derived import Derived
from systems.scheduling.graph.part import part
from systems.scheduling.graph.patterns import ADDITION, CONCATENATION, Convolution, convolution, only_user, users
from systems.scheduling.graph.program import Call, Input, Output, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Rewritten, fastest
from .own_kernels import (
    DTYPES,
    SEPARATE,
    activation,
    has_kernels,
    is_plain,
    kernel_alone,
    target_of,
    without_unread_activations,
)
from .patterns import CONV2D_FUNCTIONS, addend_of, name_operators, shape_of

aten = torch.ops.aten
CUDNN_RELU, CUDNN_ADD_RELU = aten.cudnn_convolution_relu.default, aten.cudnn_convolution_add_relu.default
KIND = "fuse_in_triton"
WORTH = 0.95  # of the time of what is there, that a kernel has to stay below in its place


@dataclass(frozen=True)
class _Place:
    """A convolution and what is fused with it.

    Args:
        operators: that one kernel replaces, in the order of capture; the last alone is read from outside.
        conv: the convolution, of one group.
        x: what the kernel reads; before: the activation of it that others may read too, and that it computes itself.
        depthwise: the convolution before a pointwise one, and the activation between.
        addend: what is added, before the activation after.
        is_part: concatenations alone read it.
    """

    operators: tuple[int, ...]
    conv: Convolution
    x: Output | Input
    before: str
    depthwise: Convolution | None
    between: str
    addend: Output | Input | None
    after: str
    is_part: bool


def fuse_in_triton(program: Program, context: Context) -> Rewritten:
    """Replace each convolution, with an activation before it and a sum and an activation after it, by one kernel of
    `systems.kernels`, where that is faster; a pointwise one with the depthwise one before it (in none of the papers).

    Invariants:
        - Of the operators of a place only the last is read from outside, and a sum is fused only where its other addend is
          computed before the place begins: so no parallelism is lost.
        - An activation before a place may have other readers. The kernel computes it itself; where no reader is left, it
          goes.

        - A place of which no operator goes is taken only where it is at least 1 / WORTH times as fast alone. Beside others
          a kernel of many blocks takes longer: it holds more SMs. A part of a concatenation may save that one's kernel.

    Each distinct place is measured separate, as the passes before leave it, and with each tile worth a trial.
    """
    if not has_kernels(program.device):
        return program, []
    times_by_signature: dict[str, tuple[dict[str, float | None], dict[str, str]]] = {}
    replacements: list[Replacement] = []
    decisions: list[Decision] = []
    trials = [_trial(program, place) for place in _places(program)]
    _compile_ahead(program, trials, context)
    for trial in trials:
        place, calls = trial.place, trial.calls
        if trial.signature not in times_by_signature:
            times_by_signature[trial.signature] = _times(program, trial, context)
        times, reasons = times_by_signature[trial.signature]
        weights = [shape_of(conv.weight) for conv in (place.depthwise, place.conv) if conv]
        words = f"{shape_of(program.value(place.x))}, weight {' and '.join(weights)}"
        pattern = f"{words}: {name_operators(program, place.operators)}"
        own = _own_choice(times, is_kernel_saved=len(place.operators) > 1 or place.is_part)
        decisions.append(context.decide(KIND, pattern, place.operators, trial.signature, times, reasons, own))
        if (chosen := decisions[-1].chosen) in calls:
            name = "_".join(program.graph.operators[v].name for v in place.operators)
            target = target_of(calls[chosen])
            replacements.append(
                Replacement(place.operators, name, target, calls[chosen], {place.operators[-1]: None}, trial.derived)
            )
    return without_unread_activations(replace(program, replacements)[0]), decisions


@dataclass(frozen=True)
class _Trial:
    """A place and its alternatives.

    Args:
        separate: its operators as a program.
        signature: equal for places that take equally long.
        calls: the kernel by the name of its tile.
        derived: the weights that were laid out for it.
    """

    place: _Place
    separate: Program
    signature: str
    calls: dict[str, Call]
    derived: tuple[Derived, ...]


def _signature(separate: Program, place: _Place) -> str:
    return "; ".join([*(separate.signature(i) for i in range(len(place.operators))), f"before: {place.before}"])


def separate_places(program: Program) -> dict[int, str]:
    """Of the places that the pass has left separate: the name of the place's decision by its last operator."""
    return {
        place.operators[-1]: place_of(KIND, _signature(part(program, place.operators), place)) for place in _places(program)
    }


def _trial(program: Program, place: _Place) -> _Trial:
    separate = part(program, place.operators)
    signature = _signature(separate, place)
    kernels, derived = _calls(program, place, _num_cores(program.device))
    return _Trial(place, separate, signature, {str(call.function.tile): call for call in kernels}, derived)  # type: ignore[attr-defined]


def _compile_ahead(program: Program, trials: Sequence[_Trial], context: Context) -> None:
    """Compile, many at once, the kernels that are to be measured."""
    from systems.kernels.compiling import Job, compile_ahead

    distinct = {trial.signature: trial for trial in trials}.values()
    calls = [call for trial in distinct for call in trial.calls.values()]
    meta = torch.device("meta")
    unmeasured = [call for call in calls if not context.knows(kernel_alone(program, call, meta))]
    compile_ahead(Job.of(call.function, [program.value(a) for a in call.args]) for call in unmeasured)  # type: ignore[arg-type]


def _own_choice(times: dict[str, float | None], is_kernel_saved: bool) -> str:
    """The alternative that the pass takes by its own rule."""
    measured = {name: t for name, t in times.items() if t is not None}
    best = fastest(measured)
    return best if is_kernel_saved or measured[best] < WORTH * measured[SEPARATE] else SEPARATE


def _times(program: Program, trial: _Trial, context: Context) -> tuple[dict[str, float | None], dict[str, str]]:
    """Milliseconds of a place by alternative, and why an alternative has none."""
    times: dict[str, float | None] = {SEPARATE: context.cost(context.later(trial.separate))}
    reasons: dict[str, str] = {}
    for name, call in trial.calls.items():
        try:
            times[name] = context.cost(kernel_alone(program, call, program.device))
        except Exception as error:  # whatever Triton raises of a tile that does not fit
            times[name], reasons[name] = None, first_line(error)
    return times, reasons


def _places(program: Program) -> list[_Place]:
    """The places in the order of capture. None shares an operator with another."""
    readers = users(program)
    taken: set[int] = set()
    places: list[_Place] = []
    for v in range(len(program.graph)):
        if v not in taken and (place := _place(program, readers, v, taken)) is not None:
            places.append(place)
            taken.update(place.operators)
    return places


def _place(program: Program, readers: Sequence[list[int]], v: int, taken: Collection[int]) -> _Place | None:
    """The place of operator v, or None where it is no convolution that a kernel takes.

    Args:
        readers: of each operator.
        taken: operators of other places.
    """
    parsed = _dense(program, v)
    if parsed is None:
        return None
    conv, addend, after = parsed
    operators, x = [v], conv.x

    def own(reference: object) -> int | None:
        """The operator that computes this for the place alone."""
        if not isinstance(reference, Output) or reference.index is not None or reference.operator in taken:
            return None
        return None if only_user(readers[reference.operator]) is None else reference.operator

    between, depthwise = "none", None
    u = own(x) if _is_pointwise(conv) and conv.stride == (1, 1) else None
    if u is not None and (act := activation(program, u)):
        w = own(program.calls[u].args[0])
        if w is not None and (depthwise := _depthwise(program, w)):
            operators, x, between = [w, u, *operators], depthwise.x, act
    elif u is not None and (depthwise := _depthwise(program, u)):
        operators, x = [u, *operators], depthwise.x
    before = "none"
    if isinstance(x, Output) and x.operator not in taken and (act := activation(program, x.operator)):
        if own(x) is not None:
            operators = [x.operator, *operators]
        before, x = act, program.calls[x.operator].args[0]
    if addend is not None and not _is_computed_before(program, addend, operators[0]):
        operators, x, before, between, depthwise = [v], conv.x, "none", "none", None
    if after == "none" and addend is None:
        reader = only_user(readers[v])
        if reader is not None and program.calls[reader].function is ADDITION:
            other = addend_of(program, reader, v)
            if other is not None and _is_computed_before(program, other, operators[0]):
                operators, addend, v = [*operators, reader], other, reader
                reader = only_user(readers[v])
        if reader is not None and (act := activation(program, reader)):
            operators, after = [*operators, reader], act
    if not isinstance(x, Output | Input) or not is_plain(program.value(x)):
        return None
    last = max(operators)
    is_part = all(u >= 0 and program.calls[u].function is CONCATENATION for u in readers[last])
    return _Place(tuple(sorted(operators)), conv, x, before, depthwise, between, addend, after, is_part)


def _dense(program: Program, v: int) -> tuple[Convolution, Output | Input | None, str] | None:
    """Operator v as a convolution of one group, what it adds, and its activation; None where it is none."""
    call, addend, after = program.calls[v], None, "none"
    conv: Convolution | None
    if call.function is CUDNN_RELU:
        conv, after = _vendors(call.args), "relu"
    elif call.function is CUDNN_ADD_RELU:
        x, weight, addend, alpha, *rest = call.args
        if alpha != 1.0:
            return None
        conv, after = _vendors((x, weight, *rest)), "relu"
    else:
        conv = convolution(call, CONV2D_FUNCTIONS)
    if conv is None or conv.groups != 1 or conv.weight.dim() != 4:
        return None
    is_taken = isinstance(call.produces, Tensor) and is_plain(call.produces) and _lies_plainly(conv.weight)
    return (conv, addend, after) if is_taken else None


def _is_pointwise(conv: Convolution) -> bool:
    return tuple(conv.weight.shape[2:]) == (1, 1) and not any(conv.padding)


def _vendors(args: Sequence[Any]) -> Convolution:
    x, weight, bias, stride, padding, dilation, groups = args
    return Convolution(x, weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups)


def _depthwise(program: Program, v: int) -> Convolution | None:
    """Operator v as a depthwise convolution with as many outputs as inputs, or None."""
    conv = convolution(program.calls[v], CONV2D_FUNCTIONS)
    if conv is None or conv.weight.dim() != 4 or conv.groups == 1 or not _lies_plainly(conv.weight):
        return None
    channels = conv.weight.shape[0]
    return conv if conv.groups == channels and conv.weight.shape[1] == 1 else None


def _lies_plainly(weight: Tensor) -> bool:
    """Has a weight of one input channel, or of one pixel, its elements in order?"""
    return weight.dtype in DTYPES and (weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last))


def _is_computed_before(program: Program, reference: Output | Input, v: int) -> bool:
    return isinstance(reference, Input) or bool(program.graph.ancestors[v] >> reference.operator & 1)


def _calls(program: Program, place: _Place, num_cores: int) -> tuple[list[Call], tuple[Derived, ...]]:
    """The kernel with each tile worth a trial, and the weights that were laid out for it."""
    produces = program.calls[place.operators[-1]].produces
    is_contiguous = produces.is_contiguous()
    if not is_contiguous and not produces.is_contiguous(memory_format=torch.channels_last):
        return [], ()
    is_fp32 = place.conv.weight.dtype is torch.float32
    precision = "tf32" if not is_fp32 or torch.backends.cudnn.allow_tf32 else "ieee"
    if place.depthwise is not None:
        return _separable_calls(place, place.depthwise, produces, precision)
    return _dense_calls(program, place, produces, precision, num_cores)


def _separable_calls(
    place: _Place, depthwise: Convolution, produces: Tensor, precision: str
) -> tuple[list[Call], tuple[Derived, ...]]:
    from systems.kernels.separable import Separable, tiles  # imports Triton

    weight = place.conv.weight
    numbers = _numbers(depthwise)
    taps = Derived.of(_taps, depthwise.weight)
    arguments = place.x, taps.tensor, depthwise.bias, weight, place.conv.bias, place.addend
    acts = place.before, place.between, place.after
    kernels = [
        Separable(*numbers, *acts, precision, not produces.is_contiguous(), tile)
        for tile in tiles(weight.shape[1], weight.shape[0], depthwise.weight[0, 0].numel())
    ]
    return [Call(each, arguments, {}, produces) for each in kernels], (taps,)


def _dense_calls(
    program: Program, place: _Place, produces: Tensor, precision: str, num_cores: int
) -> tuple[list[Call], tuple[Derived, ...]]:
    from systems.kernels.dense import Dense, tiles  # imports Triton

    conv = place.conv
    is_rounded = precision == "tf32" and conv.weight.dtype is torch.float32
    rows = Derived.of(_rounded_rows if is_rounded else _rows, conv.weight)
    num_pixels = produces.numel() // produces.shape[1]
    calls = []
    for tile in tiles(num_pixels, produces.shape[1], conv.weight.shape[1], conv.weight[0, 0].numel(), num_cores):
        kernel = Dense(*_numbers(conv), place.before, place.after, precision, not produces.is_contiguous(), tile)
        num_blocks = tile.num_blocks(num_pixels, produces.shape[1])
        tickets = torch.zeros(num_blocks, dtype=torch.int32, device=program.device) if tile.splits > 1 else None
        calls.append(Call(kernel, (place.x, rows.tensor, conv.bias, place.addend, tickets), {}, produces))
    return calls, (rows,)


def _numbers(conv: Convolution) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]]:
    return _pair(conv.weight.shape[2:]), _pair(conv.stride), _pair(conv.padding), _pair(conv.dilation)


def _num_cores(device: torch.device) -> int:
    """Multiprocessors of the GPU; in Triton's interpreter those of a small one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _taps(weight: Tensor) -> Tensor:
    """The weight of a depthwise convolution, [C, 1, height, width], as [height * width, C]."""
    return weight.flatten(1).t().contiguous()


def _rows(weight: Tensor) -> Tensor:
    """The weight of a convolution, [K, C, height, width], as [K, height * width * C]."""
    return weight.permute(0, 2, 3, 1).flatten(1).contiguous()


def _rounded_rows(weight: Tensor) -> Tensor:
    """`_rows`, each number rounded to the nearest that TF32 holds."""
    rows = _rows(weight)
    nearest = ((rows.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(rows.isnan(), rows, nearest)


def _pair(sizes: Sequence[int]) -> tuple[int, int]:
    height, width = sizes
    return int(height), int(width)
