"""Parameters and multiply-accumulates of a module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Counts:
    """The size of a module.

    Attributes:
        parameters: elements of all parameters; shared ones count once, buffers do not count.
        macs: multiply-accumulates of one call.
        convolution_macs: those of its convolutions.
    """

    parameters: int
    macs: int
    convolution_macs: int = 0


def count(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Counts:
    """Count the parameters, and the multiply-accumulates of `module(*inputs)` in its present mode.

    A multiply-accumulate is two of torch's FLOPs. As in the papers, convolutions, matrix products and attention count;
    normalisation, activation and pooling do not. The call runs on fake tensors: it computes nothing and changes no buffer.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functional_call
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Groups(TorchDispatchMode):
        """Products of groups are of any type: torch 2.11 knows their shape in bf16 alone."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._grouped_mm.default and (args[0].ndim, args[1].ndim) == (2, 3):
                return args[0].new_empty(args[0].shape[0], args[1].shape[2])
            return func(*args, **(kwargs or {}))

    parameters = sum(parameter.numel() for parameter in module.parameters())
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # The fake mode would still write to real buffers, such as a batch norm's number of batches.
    state: dict[str, torch.Tensor] = {name: mode.from_tensor(value) for name, value in _state(module)}
    is_fast_path_on = torch.backends.mha.get_fastpath_enabled()
    # The counter has no rule for the fused encoder layer, which is one operator.
    torch.backends.mha.set_fastpath_enabled(False)
    counter = FlopCounterMode(display=False)
    try:
        # The mathematical form of attention is two matrix products on every device.
        with mode, Groups(), sdpa_kernel(SDPBackend.MATH), torch.no_grad(), counter:
            functional_call(module, state, tuple(mode.from_tensor(value) for value in inputs))
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast_path_on)
    convolutions = counter.get_flop_counts()["Global"].get(torch.ops.aten.convolution, 0)
    return Counts(parameters, counter.get_total_flops() // 2, convolutions // 2)


def _state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer with its name."""
    yield from module.named_parameters()
    yield from module.named_buffers()
