"""Batch norms in eval form, folded into the weights and biases of the convolutions before them."""

from functools import partial

import torch
from torch import Tensor

from systems.scheduling.graph.derived import Derived
from systems.scheduling.graph.program import Call, Output, Program
from systems.scheduling.graph.rewrite import Replacement, only_user, replace, users

CONVOLUTIONS = (torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default, torch.ops.aten.conv3d.default)


def fold_batch_norm(program: Program) -> Program:
    """Leave out every batch norm whose input is one convolution's output, or a concatenation of such over the channels.

    y = (conv(x, w) + b - mean) * s + beta with s = gamma / sqrt(var + eps) is conv(x, s w) + (b - mean) s + beta: an affine
    map of each channel (Nimble, Appendix B, operator fusion). It holds through a concatenation where nothing else reads
    the convolutions or the concatenation; each convolution then takes its own channels' part.
    """
    readers = users(program)
    replacements: list[Replacement] = []
    for v, call in enumerate(program.calls):
        if call.function is not torch.ops.aten.batch_norm.default or not isinstance(call.args[0], Output):
            continue
        u = call.args[0].operator
        if only_user(readers[u]) is None:
            continue
        if _is_convolution(program, u):
            folded = _fold(program.calls[u], call, 0)
            replacements.append(_convolution(program, (u, v), folded, v))
        elif _joins_channels(program.calls[u]):
            sources = program.calls[u].references()
            if len(sources) != len(program.calls[u].args[0]) or not all(
                _is_convolution(program, s.operator) and only_user(readers[s.operator]) is not None for s in sources
            ):
                continue
            first = 0
            for s in sources:
                convolution = program.calls[s.operator]
                replacements.append(_convolution(program, (s.operator,), _fold(convolution, call, first), s.operator))
                first += convolution.args[1].shape[0]
            operator = program.graph.operators[u]
            replacements.append(Replacement((u, v), operator.name, operator.target, program.calls[u], {v: None}))
    return replace(program, replacements)[0]


def _is_convolution(program: Program, operator: int) -> bool:
    call = program.calls[operator]
    return call.function in CONVOLUTIONS and isinstance(call.args[1], Tensor) and not call.kwargs


def _joins_channels(call: Call) -> bool:
    return call.function is torch.ops.aten.cat.default and len(call.args) > 1 and call.args[1] == 1


def _fold(convolution: Call, batch_norm: Call, first: int) -> tuple[Derived, Derived]:
    """The convolution's new weight and bias; `first`: the channel of the batch norm that its output starts at."""
    weight, bias = convolution.args[1], convolution.args[2] if len(convolution.args) > 2 else None
    _, gamma, beta, mean, variance, _, _, epsilon, *_ = batch_norm.args
    given = {"gamma": gamma, "beta": beta, "mean": mean, "variance": variance, "bias": bias, "weight": weight}
    names = tuple(name for name, tensor in given.items() if tensor is not None)
    sources = [given[name] for name in names]
    part = slice(first, first + weight.shape[0])
    return (
        Derived.of(partial(_weight, names, part, epsilon), *sources),
        Derived.of(partial(_bias, names, part, epsilon), *sources),
    )


def _scale(given: dict[str, Tensor], part: slice, epsilon: float) -> Tensor:
    scale = (given["variance"][part].double() + epsilon).rsqrt()
    return scale * given["gamma"][part] if "gamma" in given else scale


def _weight(names: tuple[str, ...], part: slice, epsilon: float, *sources: Tensor) -> Tensor:
    given = dict(zip(names, sources, strict=True))
    weight = given["weight"]
    scale = _scale(given, part, epsilon).view(-1, *[1] * (weight.dim() - 1))
    return (weight * scale).to(weight.dtype)  # [K, C/groups, ...], in the weight's own layout


def _bias(names: tuple[str, ...], part: slice, epsilon: float, *sources: Tensor) -> Tensor:
    given = dict(zip(names, sources, strict=True))
    bias = -given["mean"][part].double()
    if "bias" in given:
        bias = bias + given["bias"]
    bias = bias * _scale(given, part, epsilon)
    if "beta" in given:
        bias = bias + given["beta"][part]
    return bias.to(given["weight"].dtype)  # [K]


def _convolution(program: Program, operators: tuple[int, ...], folded: tuple[Derived, Derived], read: int) -> Replacement:
    """The convolution that is the first of `operators`, with folded weights, in the place of all of them."""
    operator, call = program.graph.operators[operators[0]], program.calls[operators[0]]
    x, rest = call.args[0], call.args[3:]
    new = Call(call.function, (x, folded[0].tensor, folded[1].tensor, *rest), {}, call.produces)
    return Replacement(operators, operator.name, operator.target, new, {read: None}, folded)
