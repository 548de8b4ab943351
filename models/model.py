"""A model as the harness sees it: a module with example inputs, on one device, in one precision and layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from models.registry import Input

if TYPE_CHECKING:
    import torch
    from torch import nn

TF32 = ("tf32", "tf32_products")  # fp32 tensors, which a GPU rounds as it multiplies them: in convolutions alone, or always
PRECISIONS = ("fp32", *TF32, "fp16", "bf16")
LAYOUTS = ("contiguous", "channels_last")


@dataclass(frozen=True)
class Variation:
    """How a trial's inputs differ from the example.

    Args:
        sign, scale: factors of floating-point values.
        share: of a mask's elements that change; whole numbers are the smaller, the larger it is.
    """

    sign: float
    scale: float
    share: float


VARIATIONS = (Variation(-1.0, 1.0, 0.75), Variation(1.0, 4.0, 0.25), Variation(-1.0, 0.25, 0.5))


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
        return self._placed(seed, _shuffled)

    def trial_inputs(self, seed: int) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Inputs for a check, the most telling first; a model may refuse all but the last, which are `fresh_inputs`.

        A custom model's differ from its example in sum, sign and scale, whole numbers and masks included: whatever branch
        the example takes, one of VARIATIONS takes another. Without changes of sign they are the second choice.

        Args:
            seed: seeds that follow each other have the variations in turn.
        """
        if self.drawn is not None:
            return (self.fresh_inputs(seed),)
        variation = VARIATIONS[seed % len(VARIATIONS)]
        kinds = variation, replace(variation, sign=1.0)
        varied = [self._placed(seed, partial(_varied, kind)) for kind in kinds]
        return (*varied, self.fresh_inputs(seed))

    def _placed(self, seed: int, draw: Callable[[torch.Tensor, torch.Generator], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """One draw for each input, as `inputs` are placed; the zoo's own where it says how to draw."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        if self.drawn is not None:
            pairs = zip(self.drawn, self.inputs, strict=True)
            fresh = [description.draw(example.shape[0], generator) for description, example in pairs]
        else:
            fresh = [draw(example, generator) for example in self.inputs]
        return tuple(torch.empty_like(example).copy_(new) for example, new in zip(self.inputs, fresh, strict=True))


def place(model: Model, *, device: str | torch.device, precision: str, layout: str) -> Model:
    """The model on a device, in a precision and a layout. The module is changed in place, as by `nn.Module.to`.

    Args:
        device: where the module and the inputs go.
        precision: fp16 and bf16 convert floating-point parameters, buffers and inputs. fp32, tf32 and
            tf32_products convert nothing: torch's global switches distinguish them, and the runner sets those.
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


def _varied(variation: Variation, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Other values, on the CPU. Whole numbers stay between the example's least and largest, infinities where they are."""
    import torch

    values = tensor.detach().cpu()
    if values.is_floating_point() or values.is_complex():
        is_finite = values.isfinite()
        finite = _shuffled(values[is_finite], generator).to(values.dtype)
        return values.masked_scatter(is_finite, finite * (variation.sign * variation.scale))
    if not values.numel():
        return values
    low, high = int(values.min()), int(values.max())
    if values.dtype == torch.bool or (low >= 0 and high == 1):
        return _remasked(values, variation.share, generator)
    if low == high and low:  # between 1 and it: 0 may be no length and no divisor
        low, high = min(low, 1) if low > 0 else low, max(high, -1) if high < 0 else high
    power = 2 * variation.share / (1 - variation.share)
    places = torch.rand(values.shape, generator=generator, dtype=torch.float64) ** power
    return (low + (places * (high - low + 1)).long()).to(values.dtype)


def _remasked(mask: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """Truth values of which a share is the opposite; a row's first stays, so that no row loses all that it may see."""
    import torch

    if mask.numel() == 1:
        return (1 - mask.int()).to(mask.dtype) if share >= 0.5 else mask
    is_other = torch.rand(mask.shape, generator=generator) < share
    if mask.dim() and mask.shape[-1] > 1:
        is_other[..., 0] = False
    return torch.where(is_other, 1 - mask.int(), mask.int()).to(mask.dtype)
