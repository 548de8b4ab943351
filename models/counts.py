"""Parameters and multiply-accumulates of a module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Counts:
    """`parameters`: elements of all parameters, shared ones once, buffers left out. `macs`: of one call."""

    parameters: int
    macs: int


def count(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Counts:
    """Counts the parameters, and the multiply-accumulates of `module(*inputs)` in its present mode.

    A multiply-accumulate is two of torch's FLOPs: those of convolutions, matrix products and attention, as the papers
    count them; normalisation, activation and pooling count nothing. The call runs on fake tensors, so that nothing is
    computed and no buffer changes.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functional_call
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    parameters = sum(parameter.numel() for parameter in module.parameters())
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Real buffers would be written to even under the fake mode: a batch norm's number of batches, for one.
    state: dict[str, torch.Tensor] = {name: mode.from_tensor(value) for name, value in _state(module)}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # The fused encoder layer is one operator that the counter knows nothing of.
    torch.backends.mha.set_fastpath_enabled(False)
    counter = FlopCounterMode(display=False)
    try:
        # The mathematical form of attention is two matrix products whatever the device.
        with mode, sdpa_kernel(SDPBackend.MATH), torch.no_grad(), counter:
            functional_call(module, state, tuple(mode.from_tensor(value) for value in inputs))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    return Counts(parameters, counter.get_total_flops() // 2)


def _state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
