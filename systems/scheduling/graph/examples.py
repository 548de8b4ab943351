"""The inputs that a module is captured with."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from systems.base import Unsupported

from .program import describe, lazily


def stand_ins(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors like the inputs, each in memory of its own; their values mean nothing.

    A trace knows a tensor by its identity. It takes an input that is a second one too, or a parameter, or a constant of the
    module, for that one in every later call. So a module is traced with tensors that are nothing else.

    Args:
        inputs: of the module, in any memory.

    Returns:
        Tensors of the same shapes, strides, dtypes and devices.

    Raises:
        Unsupported: as `check_dense`.
    """
    check_dense(inputs)
    return tuple(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs)


def check_dense(inputs: Sequence[object]) -> None:
    """Raise Unsupported unless all inputs are tensors that lie in memory by strides, and as they are there: none is sparse,
    quantized, nested, or negated by a flag.
    """
    if isinstance(inputs, Mapping):
        raise Unsupported("its inputs go by name: models.by_name.ByName(module, names) takes them by position")
    for i, x in enumerate(inputs):
        if not isinstance(x, Tensor):
            raise Unsupported(f"input {i} is {describe(x)}, not a tensor")
        if x.layout is not torch.strided or x.is_quantized or x.is_nested:
            kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout).removeprefix("torch.")
            raise Unsupported(f"input {i} is a {kind} tensor, and only dense tensors are captured")
        if lazy := lazily(x):
            raise Unsupported(f"input {i} is {lazy}")
