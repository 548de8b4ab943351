"""Where a program attends: an operator of the library's, or the operators that compute the same step by step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from systems.scheduling.graph.derived import Derived
from systems.scheduling.graph.patterns import ADDITION, VIEW, is_cast, only_user, users
from systems.scheduling.graph.program import Input, Output, Program

from .own_kernels import DTYPES, is_plain

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")  # in their order
PRODUCT, SOFTMAX, TRANSPOSE = aten.matmul.default, aten.softmax.int, aten.transpose.int
PERMUTATION, COPY = aten.permute.default, aten.clone.default
MULTIPLICATION, DIVISION = aten.mul.Tensor, aten.div.Tensor


@dataclass(frozen=True)
class AttentionPlace:
    """One attention.

    Args:
        operators: that compute it, in the order of capture; the last alone is read from outside.
        query, key, value: references to [N, heads, queries, D], [N, K/V heads, keys, D] and [N, K/V heads, keys, E].
        mask: a reference, or a tensor, that is broadcast to [N, heads, queries, keys]; None where there is none.
        produces: its output: [N, heads, queries, E], or [N, queries, heads, E] where `is_moved`.
        scale, is_causal: as the operator's.
        is_whole: the library has one operator for the attention.
        is_moved: the output is copied so that the heads of a token lie beside each other.
        derived: the mask, where it was computed for the place.
    """

    operators: tuple[int, ...]
    query: Any
    key: Any
    value: Any
    mask: Any
    produces: Tensor
    scale: float
    is_causal: bool = False
    is_whole: bool = False
    is_moved: bool = False
    derived: tuple[Derived, ...] = ()


def attention_places(program: Program, most_numbers: int) -> list[AttentionPlace]:
    """Those that a kernel takes. most_numbers: of a head."""
    readers = users(program)
    places = []
    for v, call in enumerate(program.calls):
        place = None
        if call.function is ATTENTION:
            place = _whole(program, v)
        elif call.function is SOFTMAX:
            place = _step_by_step(program, readers, v)
        if place is not None and _is_taken(program, place, most_numbers):
            places.append(_moved(program, readers, place))
    return places


def _whole(program: Program, v: int) -> AttentionPlace | None:
    call = program.calls[v]
    arguments = dict(zip(ARGUMENTS, call.args, strict=False)) | call.kwargs
    query, key, value, mask = (arguments.get(name) for name in ARGUMENTS[:4])
    heads, kv_heads = (program.value(a).shape[1:2] for a in (query, key))
    if (
        arguments.get("dropout_p")
        or not isinstance(call.produces, Tensor)
        or (heads != kv_heads and not arguments.get("enable_gqa"))
    ):
        return None
    scale = arguments.get("scale")
    scale = program.value(query).shape[-1] ** -0.5 if scale is None else float(scale)
    is_causal = bool(arguments.get("is_causal"))
    return AttentionPlace((v,), query, key, value, mask, call.produces, scale, is_causal, is_whole=True)


def _moved(program: Program, readers: Sequence[list[int]], place: AttentionPlace) -> AttentionPlace:
    """The place with the copy that follows, where that alone reads its output and puts the heads of a token together."""
    transposed = only_user(readers[place.operators[-1]])
    copy = None if transposed is None else only_user(readers[transposed])
    if transposed is None or copy is None or program.calls[copy].function is not COPY:
        return place
    call, produces = program.calls[transposed], program.calls[copy].produces
    is_transposed = call.function is PERMUTATION and [a % 4 for a in call.args[1]] == [0, 2, 1, 3]
    is_transposed |= call.function is TRANSPOSE and {a % 4 for a in call.args[1:]} == {1, 2}
    if not is_transposed or not produces.is_contiguous():
        return place
    return replace(place, operators=(*place.operators, transposed, copy), produces=produces, is_moved=True)


def _step_by_step(program: Program, readers: Sequence[list[int]], v: int) -> AttentionPlace | None:
    """The place whose softmax is v: a product with transposed keys, what is added and multiplied, softmax, a product.

    Scores may be computed in a wider type than queries, keys and values have.
    """
    softmax = program.calls[v]
    operators = [v]
    last = only_user(readers[v])
    if last is not None and _is_cast(program, last):
        operators.append(last)
        last = only_user(readers[last])
    num_dimensions = softmax.produces.dim()
    is_wide = softmax.args[2:] in ((), (None,), (torch.float32,)) and not softmax.kwargs
    if (
        not (is_wide and softmax.args[1] in (-1, num_dimensions - 1))
        or last is None
        or program.calls[last].function is not PRODUCT
        or program.calls[last].args[0] != Output(operators[-1])
    ):
        return None
    operators.append(last)
    steps = list[tuple[str, Any]]()
    tensors: list[Any] = []
    at, scale = softmax.args[0], 1.0
    while isinstance(at, Output) and at.index is None and only_user(readers[at.operator]) == operators[0]:
        call = program.calls[at.operator]
        operators.insert(0, at.operator)
        if call.function is PRODUCT:
            break
        step = _step(program, at.operator)
        if step is None:
            return None
        kind, argument, at = step
        if kind == "add":
            tensors.insert(0, argument)
        scale *= argument if kind == "multiply" else 1.0
        steps.insert(0, (kind, None if kind == "add" else argument))
    else:
        return None
    product = program.calls[operators[0]]
    query, keys = product.args
    if not isinstance(keys, Output) or keys.index is not None:
        return None
    transposed = program.calls[keys.operator]
    is_transposed = transposed.function is TRANSPOSE and {a % 4 for a in transposed.args[1:]} == {2, 3}
    if not is_transposed or program.calls[keys.operator].produces.dim() != 4:
        return None
    first, key = operators[0], transposed.args[0]
    if only_user(readers[keys.operator]) == first:
        operators.insert(0, keys.operator)
        if isinstance(key, Output) and only_user(readers[key.operator]) == keys.operator and _is_cast(program, key.operator):
            operators.insert(0, key.operator)
            key = program.calls[key.operator].args[0]
    reader = first
    while isinstance(query, Output) and query.index is None and only_user(readers[query.operator]) == reader:
        step = _step(program, query.operator)
        if step is not None and step[0] == "multiply":
            scale *= step[1]
        elif not _is_cast(program, query.operator):
            break
        reader = query.operator
        operators.insert(0, reader)
        query = program.calls[reader].args[0]
    produces, derived = program.calls[last].produces, tuple[Derived, ...]()
    value, mask = program.calls[last].args[1], None
    if len(tensors) == 1 and not isinstance(tensors[0], Tensor):
        if steps[-1][0] != "add":
            return None  # the mask is computed in each call, and would have to be changed in each
        (mask,) = tensors
    elif not all(isinstance(t, Tensor) for t in tensors):
        return None
    elif tensors:
        scores = product.produces
        is_viewed = any(kind == "view" for kind, _ in steps)
        shape = tuple(scores.shape) if is_viewed else tuple(torch.broadcast_shapes(*(t.shape for t in tensors)))
        derived = (Derived.of(partial(_added, steps, shape, scores.dtype), *tensors),)
        mask = derived[0].tensor
    return AttentionPlace(tuple(sorted(operators)), query, key, value, mask, produces, scale, derived=derived)


def _is_cast(program: Program, v: int) -> bool:
    """Does the operator change the type of numbers between two that kernels take, and nothing else?"""
    call = program.calls[v]
    return is_cast(call) and all(t.dtype in DTYPES for t in (call.produces, program.value(call.args[0])))


def _step(program: Program, v: int) -> tuple[str, Any, Any] | None:
    """What an operator between scores and softmax does: its kind, its argument, and what it does it to."""
    function, arguments = program.calls[v].function, program.calls[v].args
    if len(arguments) != 2 or program.calls[v].kwargs:
        return None
    first, second = arguments
    if function is ADDITION:
        if isinstance(second, Tensor):
            return "add", second, first
        if isinstance(first, Tensor):
            return "add", first, second
        return ("add", second, first) if isinstance(second, Output | Input) else None
    if function is VIEW or function is aten._unsafe_view.default:
        return "view", second, first
    if function in (MULTIPLICATION, DIVISION) and isinstance(second, int | float):
        return "multiply", float(second) if function is MULTIPLICATION else 1.0 / second, first
    return None


def _added(steps: Sequence[tuple[str, Any]], shape: tuple[int, ...], dtype: torch.dtype, *tensors: Tensor) -> Tensor:
    """What the steps make of scores of zero."""
    x = torch.zeros(shape, dtype=dtype, device=tensors[0].device)
    others = iter(tensors)
    for kind, argument in steps:
        match kind:
            case "add":
                x = x + next(others)
            case "view":
                x = x.view(argument)
            case "multiply":
                x = x * argument
    return x


def _is_taken(program: Program, place: AttentionPlace, most_numbers: int) -> bool:
    """Does a kernel take it? Its tensors are of four dimensions, and the numbers of a head neighbours."""
    references = (place.query, place.key, place.value)
    if not all(isinstance(a, Output | Input) for a in references):
        return False
    query, key, value = (program.value(a) for a in references)
    out, mask = place.produces, None if place.mask is None else program.value(place.mask)
    for tensor in (query, key, value, out):
        if not is_plain(tensor) or tensor.stride(3) != 1 or tensor.dtype is not out.dtype:
            return False
    (n, heads, num_queries, size), (kv_heads, num_keys, value_size) = query.shape, value.shape[1:]
    is_shaped = key.shape == (n, kv_heads, num_keys, size) and value.shape[0] == n and heads % kv_heads == 0
    if not is_shaped or max(size, value_size) > most_numbers or tuple(out.shape) != (n, heads, num_queries, value_size):
        return False
    if mask is not None:
        sizes = zip(reversed(mask.shape), (num_keys, num_queries, heads, n), strict=False)
        is_broadcast = mask.dim() <= 4 and all(own in (1, size) for own, size in sizes)
        if not is_broadcast or mask.dtype not in (out.dtype, torch.float32, torch.bool) or prod(mask.shape) >= 2**31:
            return False
    return bool(out.is_contiguous() or out.transpose(1, 2).is_contiguous())
