"""A model as the harness sees it: a module with example inputs, on one device, in one precision and layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from models.registry import Input

if TYPE_CHECKING:
    import torch
    from torch import nn

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
LAYOUTS = ("contiguous", "channels_last")


@dataclass(frozen=True)
class Model:
    """A network and inputs it can be called with: `module(*inputs)`.

    `inputs` lie on the module's device. `drawn` describes them for a network of the zoo; it is None for a custom one.
    """

    name: str
    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    drawn: tuple[Input, ...] | None = None

    def fresh_inputs(self, seed: int) -> tuple[torch.Tensor, ...]:
        """New random inputs with the shapes, dtypes, devices and memory formats of `inputs`; the same for a seed.

        The zoo draws from its own distribution (standard normal images, uniform token ids). Nothing is known of a
        custom model's inputs but its example, so each tensor's own values are shuffled, which keeps every value valid
        (token ids, masks, ranges); only a floating tensor with a single value in it is drawn from the standard normal.
        """
        import torch

        generator = torch.Generator().manual_seed(seed)
        if self.drawn is not None:
            fresh = [of.draw(like.shape[0], generator) for of, like in zip(self.drawn, self.inputs, strict=True)]
        else:
            fresh = [_shuffled(like, generator) for like in self.inputs]
        return tuple(torch.empty_like(like).copy_(new) for like, new in zip(self.inputs, fresh, strict=True))


def place(model: Model, *, device: str | torch.device, precision: str, layout: str) -> Model:
    """The model on a device, in a precision (fp32, tf32, fp16, bf16) and a layout (contiguous, channels_last).

    fp16 and bf16 convert floating parameters, buffers and inputs; fp32 and tf32 leave them as they are (the switch
    between these two is torch's global one, and the runner's to set). channels_last is the memory format of every
    4-D parameter and floating input. The module is moved in place, as `nn.Module.to` does. Raises ValueError for an
    unknown precision or layout.
    """
    import torch

    if precision not in PRECISIONS:
        raise ValueError(f"no precision {precision!r}; there is {', '.join(PRECISIONS)}")
    if layout not in LAYOUTS:
        raise ValueError(f"no layout {layout!r}; there is {', '.join(LAYOUTS)}")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    channels_last = torch.channels_last if layout == "channels_last" else None
    module = model.module.to(device=device, dtype=dtype)
    if channels_last:
        module = module.to(memory_format=channels_last)

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.to(device)
        tensor = tensor.to(device, dtype)
        return tensor.to(memory_format=channels_last) if channels_last and tensor.dim() == 4 else tensor

    return replace(model, module=module, inputs=tuple(placed(tensor) for tensor in model.inputs))


def _shuffled(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The values of a tensor in a random order, on the CPU."""
    import torch

    values = tensor.detach().cpu().flatten()
    if tensor.is_floating_point() and bool((values == values[:1]).all()):
        return torch.randn(tensor.shape, generator=generator)
    return values[torch.randperm(values.numel(), generator=generator)].reshape(tensor.shape)
