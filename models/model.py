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
    """A network and the inputs of one call: `module(*inputs)`.

    Attributes:
        inputs: example tensors on the module's device, [batch, ...].
        drawn: how the zoo draws each input; None for a custom model.
    """

    name: str
    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    drawn: tuple[Input, ...] | None = None

    def fresh_inputs(self, seed: int) -> tuple[torch.Tensor, ...]:
        """New random inputs with the shapes, dtypes, devices and memory formats of `inputs`; the same for a seed.

        The zoo draws from its own distribution: standard normal images, uniform token ids. A custom model's inputs are its
        example's values shuffled, so that every value stays valid (token ids, masks, ranges). A floating-point tensor
        whose values are all equal is drawn from the standard normal instead.
        """
        import torch

        generator = torch.Generator().manual_seed(seed)
        if self.drawn is not None:
            pairs = zip(self.drawn, self.inputs, strict=True)
            fresh = [description.draw(example.shape[0], generator) for description, example in pairs]
        else:
            fresh = [_shuffled(example, generator) for example in self.inputs]
        return tuple(torch.empty_like(example).copy_(new) for example, new in zip(self.inputs, fresh, strict=True))


def place(model: Model, *, device: str | torch.device, precision: str, layout: str) -> Model:
    """The model on a device, in a precision and a layout. The module is changed in place, as by `nn.Module.to`.

    Args:
        device: where the module and the inputs go.
        precision: fp16 and bf16 convert floating-point parameters, buffers and inputs. fp32 and tf32 convert nothing:
            torch's global switch distinguishes them, and the runner sets it.
        layout: channels_last is the memory format of every 4-D parameter and every 4-D floating-point input.

    Raises:
        ValueError: the precision or the layout does not exist.
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
    """The values of a tensor in a random order, on the CPU; standard normal ones where all values are equal."""
    import torch

    values = tensor.detach().cpu().flatten()
    if tensor.is_floating_point() and bool((values == values[:1]).all()):
        return torch.randn(tensor.shape, generator=generator)
    return values[torch.randperm(values.numel(), generator=generator)].reshape(tensor.shape)
