"""Effects of an operator beside its output: arguments written in place, random numbers drawn, views taken."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

# In training these write the running statistics, which their schemas do not declare.
BATCH_NORMS = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
STATISTICS = ("running_mean", "running_var")

aten = torch.ops.aten
# They read memory as it lies, not the tensor that lies in it.
READERS_AT_AN_OFFSET = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)
UNSAID_VIEWS = (aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)  # by schemas
READERS_OF_MEMORY = (*READERS_AT_AN_OFFSET, aten._unsafe_view.default)


def copy_back(buffer: Tensor, value: Tensor, *after: object) -> Tensor:
    """Write `value` into the buffer; `after` are outputs that have to be there first, whose operators read it."""
    return buffer.copy_(value)


class DrawAfter:
    """An operator that draws random numbers once another one has drawn: both read one generator.

    Args:
        operator: of PyTorch's; a call has an output of the other one before its arguments.
    """

    def __init__(self, operator: OpOverload):
        self.operator = operator

    def __call__(self, after: object, *arguments: Any, **keywords: Any) -> Any:
        return self.operator(*arguments, **keywords)


def tensors_written(function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a function of a program writes in place: an operator of PyTorch's, or `copy_back`."""
    values: list[Any] = [arguments[0]] if function is copy_back else []
    if isinstance(function, OpOverload) and function._schema.is_mutable:
        values = written(function, arguments, keywords)
    return [value for value in values if isinstance(value, Tensor)]


def written(operator: OpOverload, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """The arguments that it writes in place: tensors, lists of tensors, or what stands for them."""
    by_name = named(operator, arguments, keywords)
    schema = operator._schema
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if schema.name in BATCH_NORMS and by_name["training"]:
        names += STATISTICS
    return [by_name[name] for name in names if by_name.get(name) is not None]


def draws(operator: OpOverload, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Does it draw random numbers, and so change the generator's state?"""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    defaults = {a.name: a.default_value for a in operator._schema.arguments if a.has_default_value()}
    return (defaults | named(operator, arguments, keywords)).get("dropout_p") != 0  # attention without it draws nothing


def is_view(function: object) -> bool:
    """Is it an operator of PyTorch whose output lies in the memory of an argument, unchanged?"""
    if not isinstance(function, OpOverload):
        return False
    if function in UNSAID_VIEWS:
        return True
    aliases = [r.alias_info for r in function._schema.returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


def named(operator: OpOverload, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names that the operator's schema gives them, without those that were not passed."""
    return {a.name: value for a, value in zip(operator._schema.arguments, arguments, strict=False)} | dict(keywords)
