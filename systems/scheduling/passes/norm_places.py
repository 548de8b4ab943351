"""Where a program has a group norm that kernels of this project take, and those kernels."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from systems.scheduling.graph.patterns import ADDITION, only_user
from systems.scheduling.graph.program import Call, Input, Output, Program
from systems.scheduling.graph.rewrite import Replacement

from .own_kernels import activation, is_plain, num_cores, target_of
from .patterns import GROUP_NORMS


@dataclass(frozen=True)
class NormPlace:
    """A group norm of images with what only it reads, and what alone reads it.

    Args:
        operators: an addition to each channel, the norm, an activation; all but the norm may be absent.
        norm: the one of them that is the norm.
        x: a reference to [N, C, H, W], in one of the two layouts.
        addend: a reference to [N or 1, C, 1, 1], or a tensor; None where nothing is added.
        after: the activation, by the name that kernels have for it.
    """

    operators: tuple[int, ...]
    norm: int
    x: Any
    addend: Any
    after: str


def norm_place(program: Program, readers: list[list[int]], v: int) -> NormPlace | None:
    """The place around operator v; None where it is no group norm that kernels take.

    Args:
        readers: for each operator those that read it.
    """
    call = program.calls[v]
    if call.function not in GROUP_NORMS or call.kwargs:
        return None
    x, _, weight, bias = (*call.args, None, None)[:4]
    if not isinstance(x, Output | Input) or not all(isinstance(t, Tensor) for t in (weight, bias)):
        return None
    operators, addend = [v], None
    if isinstance(x, Output) and x.index is None and only_user(readers[x.operator]) == v:
        before = program.calls[x.operator]
        is_addition = before.function is ADDITION and len(before.args) == 2 and not before.kwargs
        if is_addition and isinstance(before.args[0], Output | Input) and _is_of_channels(program, *before.args):
            operators.insert(0, x.operator)
            x, addend = before.args
    after = only_user(readers[v])
    name = activation(program, after) if after is not None else None
    if after is not None and name is not None:
        operators.append(after)
    value = program.value(x)
    if not _is_taken(value) or call.produces.stride() != value.stride():
        return None
    return NormPlace(tuple(operators), v, x, addend, name or "none")


def _is_taken(x: Any) -> bool:
    """Do kernels take it? It is an image in one of the two layouts."""
    if not isinstance(x, Tensor) or not is_plain(x):
        return False
    return x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)


def _is_of_channels(program: Program, x: Any, addend: Any) -> bool:
    """Is the addend one number for each channel of x, of the same type?"""
    own, added = program.value(x), program.value(addend)
    if not isinstance(own, Tensor) or not isinstance(added, Tensor) or own.dim() != 4 or added.dtype is not own.dtype:
        return False
    return added.shape[0] in (1, own.shape[0]) and tuple(added.shape[1:]) == (own.shape[1], 1, 1)


def norm_kernels(program: Program, place: NormPlace) -> tuple[Call, Call]:
    """The moments, and what is made of the numbers with them."""
    from systems.kernels.group_norm import GroupMoments, GroupNorm, splits_of  # imports Triton

    norm = program.calls[place.norm]
    _, groups, weight, bias, epsilon = (*norm.args, 1e-5)[:5]
    x = program.value(place.x)
    splits = splits_of(x, groups, num_cores(program.device))
    produced = torch.empty(x.shape[0] * groups, splits, 2, dtype=torch.float32, device="meta")
    moments = Call(GroupMoments(groups, splits), (place.x, place.addend), {}, produced)
    kernel = GroupNorm(groups, float(epsilon), place.after)
    return moments, Call(kernel, (place.x, place.addend, moments, weight, bias), {}, norm.produces)


def own_norm(program: Program, place: NormPlace) -> Replacement:
    """The kernels in the place of its operators."""
    _, call = norm_kernels(program, place)
    return Replacement(place.operators, "group_norm", target_of(call), call, {place.operators[-1]: None})
