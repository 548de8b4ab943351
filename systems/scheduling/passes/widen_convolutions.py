"""Makes convolutions over one dimension convolutions of images of one row, which have layouts and more kernels."""

from typing import Any

import torch
from torch import Tensor

from systems.scheduling.graph.derived import Derived
from systems.scheduling.graph.patterns import BATCH_NORM, CONVOLUTION, convolution, is_elementwise, references
from systems.scheduling.graph.program import Call, Output, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Rewritten

aten = torch.ops.aten
CONTIGUOUS = {"memory_format": torch.contiguous_format}
ROW = 2  # the dimension of an image [N, C, 1, L] that a sequence [N, C, L] has not


def widen_convolutions(program: Program, context: Context) -> Rewritten:
    """Compute each conv1d, and what is elementwise between two, with images of one row, as PyTorch's own conv1d does inside.
    That copies a sequence that is not contiguous first: else its output would lie as the sequence does.

    `select_kernels` decides about the layouts of images alone: in that of sequences a vendor's kernel converts input, weight
    and output in each call.
    """
    widened = set[int]()
    for v, call in enumerate(program.calls):
        if convolution(call, (aten.conv1d.default,)) is not None or _is_between(program, v, widened):
            widened.add(v)
    if not any(program.calls[v].function is aten.conv1d.default for v in widened):
        return program, []
    sequences = {v: Call(aten.squeeze.dim, (Output(v), ROW), {}, program.calls[v].produces) for v in widened}
    images: dict[Any, Call] = {}

    def as_sequence(argument: Any) -> Any:
        return sequences[argument.operator] if isinstance(argument, Output) and argument.operator in widened else argument

    def as_image(argument: Any) -> Any:
        if argument not in images:
            sequence = program.value(argument)
            produces = sequence.to("meta").unsqueeze(ROW)
            is_image = isinstance(argument, Output) and argument.operator in widened
            image = argument if is_image else Call(aten.unsqueeze.default, (argument, ROW), {}, produces)
            copy = Call(aten.clone.default, (image,), CONTIGUOUS, produces.contiguous())
            images[argument] = image if sequence.is_contiguous() else copy
        return images[argument]

    replacements = []
    for v, call in enumerate(program.calls):
        operator = program.graph.operators[v]
        if v not in widened:
            if not widened.isdisjoint(program.graph.predecessors[v]):
                replacements.append(Replacement((v,), operator.name, operator.target, call.map(as_sequence), {v: None}))
            continue
        produces = call.produces.unsqueeze(ROW)
        conv = convolution(call, (aten.conv1d.default,))
        if conv is None:
            new = Call(call.function, call.args, call.kwargs, produces)
            replacements.append(Replacement((v,), operator.name, operator.target, new, {v: None}))
            continue
        weight = Derived.of(_as_images, conv.weight)
        sizes = ([1, *conv.stride], [0, *conv.padding], [1, *conv.dilation])
        new = Call(CONVOLUTION, (as_image(conv.x), weight.tensor, conv.bias, *sizes, conv.groups), {}, produces)
        replacements.append(Replacement((v,), "conv2d", str(CONVOLUTION), new, {v: None}, (weight,)))
    return replace(program, replacements, [as_sequence(o) for o in program.outputs])[0], []


def _is_between(program: Program, v: int, widened: set[int]) -> bool:
    """Does it compute each element of a widened tensor by itself?"""
    call = program.calls[v]
    read = references(call)
    is_one = len(read) == 1 and isinstance(read[0], Output) and read[0].operator in widened
    if not is_one or not is_elementwise(program, v):
        return False
    return call.function is BATCH_NORM or not any(isinstance(a, Tensor) for a in call.leaves())


def _as_images(weight: Tensor) -> Tensor:
    return weight.unsqueeze(ROW)
