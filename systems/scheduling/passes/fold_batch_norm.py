"""Folds batch norms in eval form into the convolutions before them (Nimble, Appendix B, "operator fusion")."""

from functools import partial

import torch
from torch import Tensor

from systems.scheduling.decision import Decision
from systems.scheduling.graph.derived import Derived
from systems.scheduling.graph.patterns import CONCATENATION, convolution, is_norm, only_user, users
from systems.scheduling.graph.program import Call, Output, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Rewritten
from .patterns import name_operators


def fold_batch_norm(program: Program, _: Context) -> Rewritten:
    """Leave out each batch norm that reads one convolution, or a concatenation of convolutions over the channels.

    Invariant: with s = gamma / sqrt(var + eps), an affine map of each channel,

        (conv(x, w) + b - mean) * s + beta  =  conv(x, s * w) + (b - mean) * s + beta.

    It holds through a concatenation, where each convolution takes its own channels' part, and so stands in it once. Nothing
    else may read the convolutions or the concatenation. Nothing is measured: an operator less is never slower.

    Folded weights are computed in float64 and rounded once. A batch norm stays where that costs more than eager's own
    rounding, as where a small gamma makes them denormal in float16; its decision says so.
    """
    readers = users(program)
    replacements: list[Replacement] = []
    decisions: list[Decision] = []
    for v, norm in enumerate(program.calls):
        if not is_norm(norm) or not isinstance(norm.args[0], Output):
            continue
        u = norm.args[0].operator
        if only_user(readers[u]) is None:
            continue
        if convolution(program.calls[u]) is not None:
            folded = [_folded(program, (u, v), norm, 0, v)]
            operators: tuple[int, ...] = (u, v)
        elif _joins_channels(program.calls[u]):
            sources = [s.operator for s in program.calls[u].references()]
            if len({*sources}) != len(program.calls[u].args[0]) or not all(
                convolution(program.calls[s]) is not None and only_user(readers[s]) is not None for s in sources
            ):
                continue
            folded, first_channel = [], 0
            for s in sources:
                folded.append(_folded(program, (s,), norm, first_channel, s))
                first_channel += program.calls[s].args[1].shape[0]
            operator = program.graph.operators[u]
            folded.append(Replacement((u, v), operator.name, operator.target, program.calls[u], {v: None}))
            operators = (*sources, u, v)
        else:
            continue
        pattern = name_operators(program, operators)
        if not all(_is_precise(d) for r in folded for d in r.derived):
            reason = "rounding the folded weights to their dtype costs more than eager's own rounding"
            decisions.append(Decision("fold_batch_norm", pattern, operators, {}, "separate", {"folded": reason}))
            continue
        replacements += folded
        decisions.append(Decision("fold_batch_norm", pattern, operators, {}, "folded"))
    return replace(program, replacements)[0], decisions


def _joins_channels(call: Call) -> bool:
    return call.function is CONCATENATION and len(call.args) > 1 and call.args[1] == 1


def _folded(program: Program, operators: tuple[int, ...], norm: Call, first_channel: int, result: int) -> Replacement:
    """The convolution that is the first of `operators`, with folded weights, in the place of all of them.

    Args:
        norm: the batch norm.
        first_channel: the channel of the batch norm at which the convolution's output starts.
        result: whose output the new operator computes.
    """
    operator, call = program.graph.operators[operators[0]], program.calls[operators[0]]
    weight, bias = call.args[1], call.args[2] if len(call.args) > 2 else None
    _, gamma, beta, mean, variance, _, _, epsilon, *_ = norm.args
    tensor_by_name = {"gamma": gamma, "beta": beta, "mean": mean, "variance": variance, "bias": bias, "weight": weight}
    names = tuple(name for name, tensor in tensor_by_name.items() if tensor is not None)
    sources = [tensor_by_name[name] for name in names]
    channels = slice(first_channel, first_channel + weight.shape[0])
    derived = (
        Derived.of(partial(_weight, names, channels, epsilon, dtype=weight.dtype), *sources),
        Derived.of(partial(_bias, names, channels, epsilon, dtype=weight.dtype), *sources),
    )
    new = Call(call.function, (call.args[0], derived[0].tensor, derived[1].tensor, *call.args[3:]), {}, call.produces)
    return Replacement(operators, operator.name, operator.target, new, {result: None}, derived)


@torch.no_grad()
def _is_precise(derived: Derived) -> bool:
    """Does rounding cost a folded tensor no more than it costs ordinary numbers, in any channel?

    That is half of eps. A denormal number loses more, and one out of range everything.
    """
    exact = derived.compute(*derived.sources, dtype=torch.float64)
    rows = exact.flatten(1) if exact.dim() > 1 else exact[None]  # [K, ...] of a weight, [1, K] of a bias
    errors = derived.tensor.double().view_as(exact).reshape(rows.shape) - rows
    largest = torch.finfo(derived.tensor.dtype).eps / 2 * rows.norm(dim=1)
    return bool((errors.norm(dim=1) <= largest).all())


def _scale(tensor_by_name: dict[str, Tensor], channels: slice, epsilon: float) -> Tensor:
    scale = (tensor_by_name["variance"][channels].double() + epsilon).rsqrt()
    return scale * tensor_by_name["gamma"][channels] if "gamma" in tensor_by_name else scale  # [K]


def _weight(names: tuple[str, ...], channels: slice, epsilon: float, *sources: Tensor, dtype: torch.dtype) -> Tensor:
    tensor_by_name = dict(zip(names, sources, strict=True))
    weight = tensor_by_name["weight"]
    scale = _scale(tensor_by_name, channels, epsilon).view(-1, *[1] * (weight.dim() - 1))  # [K, 1, ...]
    return (weight * scale).to(dtype)  # [K, C / groups, ...], in the weight's own layout


def _bias(names: tuple[str, ...], channels: slice, epsilon: float, *sources: Tensor, dtype: torch.dtype) -> Tensor:
    tensor_by_name = dict(zip(names, sources, strict=True))
    bias = -tensor_by_name["mean"][channels].double()
    if "bias" in tensor_by_name:
        bias = bias + tensor_by_name["bias"]
    bias = bias * _scale(tensor_by_name, channels, epsilon)
    if "beta" in tensor_by_name:
        bias = bias + tensor_by_name["beta"][channels]
    return bias.to(dtype)  # [K]
