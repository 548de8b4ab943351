"""The vendor's convolutions with bias, residual and activation in one kernel, where they are faster."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from systems.scheduling.graph.part import alone, part
from systems.scheduling.graph.program import Call, Input, Output, Program
from systems.scheduling.graph.rewrite import Replacement, only_user, replace, users

from .select_kernels import CONVOLUTION, Cost, cudnn_conv2d, describe

aten = torch.ops.aten
# What oneDNN calls the activations that it can append; it takes their bounds as scalars.
ONEDNN: dict[Any, str] = {
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
class Fusion:
    """What was measured at one place. operators: of the convolution, the addition if there is one, and the activation."""

    operators: tuple[int, ...]
    pattern: str
    separate_ms: float
    fused_ms: float

    @property
    def chosen(self) -> bool:
        return self.fused_ms < self.separate_ms


def fuse_convolution(
    program: Program, cost: Cost, separately: Callable[[Program], Program] = lambda program: program
) -> tuple[Program, list[Fusion]]:
    """Put the vendor's fused kernel where a convolution, perhaps an addition, and an activation follow each other alone.

    cuDNN's ReLU kernels on a GPU, oneDNN's on a CPU (Nimble, Appendix B, "a subset of TensorRT's" fusions). Each distinct
    place is measured both ways; `separately` is what a later pass would make of the operators if they stay apart.
    """
    device = program.device.type
    times: dict[str, tuple[float, float]] = {}
    replacements, fusions = [], []
    for operators, residual in _places(program, device):
        call = _fused(program, operators, residual, device)
        apart = part(program, operators)
        signature = "; ".join(apart.signature(i) for i in range(len(operators)))
        if signature not in times:
            times[signature] = cost(separately(apart)), cost(_together(program, operators, call))
        pattern = " + ".join([describe(program, operators[0]), *(program.graph.operators[v].name for v in operators[1:])])
        fusion = Fusion(operators, pattern, *times[signature])
        fusions.append(fusion)
        if fusion.chosen:
            name = "_".join(program.graph.operators[v].name for v in operators)
            target = f"opweave.fused_{name}"
            replacements.append(Replacement(operators, name, target, call, {operators[-1]: None}))
    return replace(program, replacements)[0], fusions


def _places(program: Program, device: str) -> list[tuple[tuple[int, ...], Any]]:
    """(convolution, activation) and (convolution, addition, activation), with what is added; later convolutions first."""
    readers = users(program)
    activations = CUDNN if device == "cuda" else tuple(ONEDNN)
    taken: set[int] = set()
    places: list[tuple[tuple[int, ...], Any]] = []
    for u in reversed(range(len(program.graph))):
        call = program.calls[u]
        if call.function not in (CONVOLUTION, cudnn_conv2d) or not isinstance(call.args[1], Tensor) or call.kwargs:
            continue
        v = only_user(readers[u])
        chain: tuple[int, ...] = (u,)
        residual = None
        if v is not None and program.calls[v].function is aten.add.Tensor and (other := _added(program, v, u)) is not None:
            chain, residual = (u, v), other
            v = only_user(readers[v])
        if v is not None and program.calls[v].function in activations and not taken & {*chain, v}:
            places.append(((*chain, v), residual))
            taken |= {*chain, v}
    return sorted(places, key=lambda place: place[0])


def _added(program: Program, v: int, u: int) -> Any:
    """What addition v adds to the output of u, where it is a tensor of the same shape and layout."""
    call = program.calls[v]
    if call.kwargs:
        return None
    others = [a for a in call.args if a != Output(u)]
    if len(others) != 1 or not isinstance(others[0], Output | Input):
        return None
    one, other = program.value(Output(u)), program.value(others[0])
    return others[0] if (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride()) else None


def _fused(program: Program, operators: Sequence[int], residual: Any, device: str) -> Call:
    convolution, activation = program.calls[operators[0]], program.calls[operators[-1]]
    given: list[Any] = [*convolution.args, *[None, None, None, 1, 0, 1, 1][len(convolution.args) :]]
    x, weight, bias, stride, padding, dilation, groups = given
    stride, padding, dilation = _pair(stride), _pair(padding), _pair(dilation)
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    if device == "cuda":
        arguments = (bias, stride, padding, dilation, groups)
        if residual is None:
            function, arguments = aten.cudnn_convolution_relu.default, (x, weight, *arguments)
        else:
            function, arguments = aten.cudnn_convolution_add_relu.default, (x, weight, residual, 1.0, *arguments)
    else:
        name, scalars = ONEDNN[activation.function], list(activation.args[1:])
        if name == "hardtanh":
            scalars += ([0.0, 6.0] if activation.function is aten.relu6.default else [-1.0, 1.0])[len(scalars) :]
        pointwise = torch.ops.mkldnn._convolution_pointwise
        arguments = (weight, bias, padding, stride, dilation, groups)
        if residual is None:
            function, arguments = pointwise.default, (x, *arguments, name, scalars, "")
        else:
            function, arguments = pointwise.binary, (x, residual, *arguments, "add", 1.0, name, scalars, "")
    return Call(function, arguments, {}, activation.produces)


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value) * (2 // len(value))


def _together(program: Program, operators: Sequence[int], call: Call) -> Program:
    """The fused kernel as a program, over the inputs that the separate operators would read."""
    apart = part(program, operators)
    read: dict[Any, Input] = {}
    for v, moved in zip(operators, apart.calls, strict=True):
        for old, new in zip(program.calls[v].leaves(), moved.leaves(), strict=True):
            if isinstance(new, Input):
                read[old] = new
    fused = call.map(lambda a: read[a] if isinstance(a, Output | Input) else a)
    return alone("fused", "opweave.fused", fused, apart.examples)
