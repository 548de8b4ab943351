"""Puts in the vendor's convolutions and products with bias, residual and activation in one kernel, where they are faster."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from systems.scheduling.decision import Decision
from systems.scheduling.graph.part import alone, part
from systems.scheduling.graph.patterns import ADDITION, CONVOLUTION, convolution, only_user, users
from systems.scheduling.graph.program import Call, Input, Output, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Rewritten
from .patterns import (
    addend_of,
    cudnn_conv2d,
    is_product,
    name_convolution,
    name_operators,
    product_conv2d,
    product_relu_conv2d,
)

aten = torch.ops.aten
MATCHED = (CONVOLUTION, cudnn_conv2d, product_conv2d)
SEPARATE, FUSED, PRODUCT = "separate", "fused", "fused product"
# What oneDNN calls the activations that it can append; it takes their bounds as scalars.
ONEDNN: dict[object, str] = {
    aten.relu.default: "relu",
    aten.silu.default: "swish",
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
    aten.hardtanh.default: "hardtanh",
    aten.relu6.default: "hardtanh",
    aten.hardswish.default: "hardswish",
}
CUDNN = (aten.relu.default,)


@dataclass(frozen=True)
class _Place:
    """operators: a convolution, the addition after it if there is one, and the activation. residual: what is added."""

    operators: tuple[int, ...]
    residual: Output | Input | None


def fuse_convolution(program: Program, context: Context) -> Rewritten:
    """Fuse a convolution, perhaps an addition, and an activation into one kernel of the vendor's, where it is faster.

    cuDNN has such kernels for ReLU on a GPU, oneDNN for more activations on a CPU (Nimble, Appendix B, "a subset of
    TensorRT's" fusions). Some of PyTorch's operators for oneDNN's kernels raise errors in fp16 and bf16, so a CPU has them
    in float32 alone. A pointwise convolution in channels_last may be a product that computes the ReLU.

    Invariants:
        - Of the operators of a place only the last is read from outside, so no parallelism is lost. Each distinct place is
          measured fused and separate; separate means as the later passes leave it.
        - A place computes what eager execution does, but of a NaN. oneDNN's ReLU makes 0 of it, and its hardtanh the lower
          bound.
    """
    device = program.device.type
    times_by_signature: dict[str, dict[str, float]] = {}
    replacements: list[Replacement] = []
    decisions: list[Decision] = []
    for place in _places(program, device):
        operators = place.operators
        calls = {FUSED: _fused(program, place, device)}
        if (as_product := _product(program, place)) is not None:
            calls[PRODUCT] = as_product
        separate = part(program, operators)
        signature = "; ".join(separate.signature(i) for i in range(len(operators)))
        if signature not in times_by_signature:
            fused_ms = {name: context.cost(_fused_alone(program, operators, call)) for name, call in calls.items()}
            times_by_signature[signature] = {SEPARATE: context.cost(context.later(separate)), **fused_ms}
        times = times_by_signature[signature]
        pattern = f"{name_convolution(program, operators[0])} + {name_operators(program, operators[1:])}"
        decisions.append(context.decide("fuse_convolution", pattern, operators, signature, times))
        if (chosen := decisions[-1].chosen) != SEPARATE:
            name = "_".join(program.graph.operators[v].name for v in operators)
            replacements.append(Replacement(operators, name, f"opweave.fused_{name}", calls[chosen], {operators[-1]: None}))
    return replace(program, replacements)[0], decisions


def _places(program: Program, device: str) -> list[_Place]:
    """The places in the order of capture. Where two convolutions meet in one addition, the later one has it."""
    readers = users(program)
    activations = CUDNN if device == "cuda" else tuple(ONEDNN)
    taken: set[int] = set()
    places: list[_Place] = []
    for u in reversed(range(len(program.graph))):
        conv = convolution(program.calls[u], MATCHED)
        if conv is None or (device == "cpu" and program.value(conv.x).dtype != torch.float32):
            continue
        v = only_user(readers[u])
        chain: tuple[int, ...] = (u,)
        residual = None
        if v is not None and program.calls[v].function is ADDITION and (addend := addend_of(program, v, u)) is not None:
            chain, residual = (u, v), addend
            v = only_user(readers[v])
        if v is not None and program.calls[v].function in activations and not taken & {*chain, v}:
            places.append(_Place((*chain, v), residual))
            taken |= {*chain, v}
    return sorted(places, key=lambda place: place.operators)


def _fused(program: Program, place: _Place, device: str) -> Call:
    """The vendor's kernel for a place."""
    activation = program.calls[place.operators[-1]]
    conv = convolution(program.calls[place.operators[0]], MATCHED)
    assert conv is not None
    stride, padding, dilation = list(conv.stride), list(conv.padding), list(conv.dilation)
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    if device == "cuda":
        arguments = (conv.bias, stride, padding, dilation, conv.groups)
        if place.residual is None:
            function, arguments = aten.cudnn_convolution_relu.default, (conv.x, conv.weight, *arguments)
        else:
            function = aten.cudnn_convolution_add_relu.default
            arguments = (conv.x, conv.weight, place.residual, 1.0, *arguments)
    else:
        name, scalars = ONEDNN[activation.function], list(activation.args[1:])
        if name == "hardtanh":
            scalars += ([0.0, 6.0] if activation.function is aten.relu6.default else [-1.0, 1.0])[len(scalars) :]
        pointwise = torch.ops.mkldnn._convolution_pointwise
        arguments = (conv.weight, conv.bias, padding, stride, dilation, conv.groups)
        if place.residual is None:
            function, arguments = pointwise.default, (conv.x, *arguments, name, scalars, "")
        else:
            function = pointwise.binary
            arguments = (conv.x, place.residual, *arguments, "add", 1.0, name, scalars, "")
    return Call(function, arguments, {}, activation.produces)


def _product(program: Program, place: _Place) -> Call | None:
    """The place as one product, where that reads and writes the layout that is there; else None."""
    activation = program.calls[place.operators[-1]]
    conv = convolution(program.calls[place.operators[0]], MATCHED)
    assert conv is not None
    is_matched = activation.function is aten.relu.default and place.residual is None and conv.bias is not None
    is_last = activation.produces.is_contiguous(memory_format=torch.channels_last)
    if not is_matched or not is_last or not is_product(program.value(conv.x), conv):
        return None
    return Call(product_relu_conv2d, (conv.x, conv.weight, conv.bias), {}, activation.produces)


def _fused_alone(program: Program, operators: Sequence[int], call: Call) -> Program:
    """The fused kernel as a program, over the inputs that the separate operators would read."""
    separate = part(program, operators)
    input_by_argument: dict[Any, Input] = {}
    for v, moved in zip(operators, separate.calls, strict=True):
        for old, new in zip(program.calls[v].leaves(), moved.leaves(), strict=True):
            if isinstance(new, Input):
                input_by_argument[old] = new
    fused = call.map(lambda a: input_by_argument[a] if isinstance(a, Output | Input) else a)
    return alone("fused", "opweave.fused", fused, separate.examples)
