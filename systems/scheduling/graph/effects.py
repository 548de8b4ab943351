"""What an operator does beside returning its output: arguments written in place, random numbers drawn, views taken."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

# Their schemas do not tell: in training they write the running statistics.
BATCH_NORMS = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
STATISTICS = ("running_mean", "running_var")


def written(operator: OpOverload, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """Those of its arguments that it writes in place: tensors, lists of tensors, or what stands for them."""
    given = _named(operator, arguments, keywords)
    schema = operator._schema
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if schema.name in BATCH_NORMS and given["training"]:
        names += STATISTICS
    return [given[name] for name in names if given.get(name) is not None]


def draws(operator: OpOverload, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Does it take random numbers from the generator, and so change the generator's state?"""
    return (
        torch.Tag.nondeterministic_seeded in operator.tags
        and _named(operator, arguments, keywords).get("dropout_p") != 0  # attention without dropout draws nothing
    )


def is_view(operator: OpOverload) -> bool:
    """Does its output lie in the memory of an argument, unchanged?"""
    aliases = [r.alias_info for r in operator._schema.returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


def _named(operator: OpOverload, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    return {a.name: value for a, value in zip(operator._schema.arguments, arguments, strict=False)} | dict(keywords)
