"""Modules on no device: their shapes, without memory and without values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class _Uninitialised(TorchFunctionMode):
    """What `torch.nn.init` would fill stays as it is: on no device that takes PyTorch's compiler, and seconds of imports."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return (kwargs or {}).get("tensor", args[0] if args else None)
        return func(*args, **(kwargs or {}))


@contextmanager
def on_no_device() -> Iterator[None]:
    """Tensors made within are on the device "meta"."""
    with torch.device("meta"), _Uninitialised():
        yield


def allocated(module: AnyModule, device: str | torch.device, dtype: torch.dtype) -> AnyModule:
    """The module with memory on a device and without values; floating-point tensors are of `dtype`.

    As `Module.to_empty`, which takes the compiler as well.
    """

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device=device)

    return module._apply(empty)
