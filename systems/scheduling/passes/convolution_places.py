"""Convolutions that kernels of this project take, with what stands around them: what passes match and name alike."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from systems.scheduling.decision import place_of
from systems.scheduling.graph.part import part
from systems.scheduling.graph.patterns import ADDITION, CONCATENATION, Convolution, convolution, only_user, users
from systems.scheduling.graph.program import Input, Output, Program

from .own_kernels import DTYPES, activation, is_plain
from .patterns import CONV2D_FUNCTIONS, addend_of, product_relu_conv2d

aten = torch.ops.aten
CUDNN_RELU, CUDNN_ADD_RELU = aten.cudnn_convolution_relu.default, aten.cudnn_convolution_add_relu.default
KIND = "fuse_in_triton"  # of the decisions at these places


@dataclass(frozen=True)
class Place:
    """A convolution and what is fused with it.

    Args:
        operators: that one kernel replaces, in the order of capture; the last alone is read from outside.
        conv: the convolution, of one group; or a depthwise one alone.
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


def signature_of(separate: Program, place: Place) -> str:
    """Equal for places that take equally long.

    Args:
        separate: the place alone.
    """
    return "; ".join([*(separate.signature(i) for i in range(len(place.operators))), f"before: {place.before}"])


def separate_places(program: Program) -> dict[int, str]:
    """Of the places that fuse_in_triton has left separate: the name of a decision by the place's last operator.

    Where a place has parts, the decision is that of the pointwise convolution.
    """
    last = [(parts_of(program, place) or (place,))[-1] for place in places(program)]
    return {place.operators[-1]: place_of(KIND, signature_of(part(program, place.operators), place)) for place in last}


def parts_of(program: Program, place: Place) -> tuple[Place, ...]:
    """The depthwise convolution of a place, with what comes before it, and the pointwise one, with all after it.

    They are what a place that is left separate consists of. Empty where the place has no depthwise convolution.
    """
    if place.depthwise is None:
        return ()
    w = next(v for v in place.operators if _depthwise(program, v) is not None)
    before, after = (tuple(v for v in place.operators if (v > w) == is_after) for is_after in (False, True))
    depthwise = Place(before, place.depthwise, place.x, place.before, None, "none", None, "none", is_part=False)
    return depthwise, replace(place, operators=after, x=Output(w), before=place.between, depthwise=None, between="none")


def places(program: Program) -> list[Place]:
    """The places in the order of capture. None shares an operator with another."""
    readers = users(program)
    taken: set[int] = set()
    matched: list[Place] = []
    for v in range(len(program.graph)):
        if v not in taken and (place := _place(program, readers, v, taken)) is not None:
            matched.append(place)
            taken.update(place.operators)
    # A depthwise convolution that no pointwise one takes is a place alone. A place that computes its activation reads it.
    read = {place.x.operator for place in matched if isinstance(place.x, Output)}
    for v in range(len(program.graph)):
        if v not in taken and (place := _depthwise_place(program, readers, v, taken, v in read)) is not None:
            matched.append(place)
            taken.update(place.operators)
    return sorted(matched, key=lambda place: place.operators[-1])


def _place(program: Program, readers: Sequence[list[int]], v: int, taken: Collection[int]) -> Place | None:
    """The place of operator v, or None where it is no convolution of one group that a kernel takes.

    Args:
        readers: of each operator.
        taken: operators of other places.
    """
    parsed = _dense(program, v)
    if parsed is None:
        return None
    conv, addend, after = parsed
    operators, x = [v], conv.x
    between, depthwise = "none", None
    u = _own(x, readers, taken) if _is_pointwise(conv) and conv.stride == (1, 1) else None
    if u is not None and (act := activation(program, u)):
        w = _own(program.calls[u].args[0], readers, taken)
        if w is not None and (depthwise := _depthwise(program, w)):
            operators, x, between = [w, u, *operators], depthwise.x, act
    elif u is not None and (depthwise := _depthwise(program, u)):
        operators, x = [u, *operators], depthwise.x
    operators, x, before = _with_activation(program, readers, taken, operators, x)
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
    is_part = _is_part(program, readers, operators)
    return Place(tuple(sorted(operators)), conv, x, before, depthwise, between, addend, after, is_part)


def _depthwise_place(
    program: Program, readers: Sequence[list[int]], v: int, taken: Collection[int], is_read: bool
) -> Place | None:
    """The place of operator v, or None where it is no depthwise convolution that a kernel takes.

    Args:
        is_read: whether another place reads it, and not its activation.
    """
    conv, produces = _depthwise(program, v), program.calls[v].produces
    if conv is None or not isinstance(produces, Tensor) or not is_plain(produces):
        return None
    operators, x, before = _with_activation(program, readers, taken, [v], conv.x)
    after, reader = "none", only_user(readers[v])
    if reader is not None and reader not in taken and not is_read and (act := activation(program, reader)):
        operators, after = [*operators, reader], act
    if not isinstance(x, Output | Input) or not is_plain(program.value(x)):
        return None
    return Place(tuple(operators), conv, x, before, None, "none", None, after, _is_part(program, readers, operators))


def _own(reference: object, readers: Sequence[list[int]], taken: Collection[int]) -> int | None:
    """The operator that computes this for one place alone."""
    if not isinstance(reference, Output) or reference.index is not None or reference.operator in taken:
        return None
    return None if only_user(readers[reference.operator]) is None else reference.operator


def _with_activation(
    program: Program, readers: Sequence[list[int]], taken: Collection[int], operators: list[int], x: object
) -> tuple[list[int], object, str]:
    """A place's first operators, with the activation that it reads where nothing else does; what it reads then, and the
    activation of that."""
    if isinstance(x, Output) and x.operator not in taken and (act := activation(program, x.operator)):
        if _own(x, readers, taken) is not None:
            operators = [x.operator, *operators]
        return operators, program.calls[x.operator].args[0], act
    return operators, x, "none"


def _is_part(program: Program, readers: Sequence[list[int]], operators: Sequence[int]) -> bool:
    """Do concatenations alone read the last operator?"""
    return all(u >= 0 and program.calls[u].function is CONCATENATION for u in readers[max(operators)])


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
    elif call.function is product_relu_conv2d:
        conv, after = _vendors((*call.args, (1, 1), (0, 0), (1, 1), 1)), "relu"
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
