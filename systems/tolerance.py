"""How far an output may be from what it should be; imports no torch before it compares."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

# A system may be this many times as far from the reference as eager is, by the precision of the arithmetic. In fp32 other
# algorithms than eager's round more: Winograd's convolutions, some ten times as much. Lower precisions round what is stored
# and multiplied, whatever the algorithm: another order of the same operators rounds differently from eager, not more. In
# bf16 eager itself is off by half of what other inputs do to Inception-v3's output, so that more would hide everything.
MULTIPLE = {"fp32": 16.0, "tf32": 4.0, "tf32_products": 4.0, "fp16": 2.0, "bf16": 1.0}
FLOOR = 2.0  # units of rounding that any output may be off by, so that nothing has to be exact because eager happens to be
OUTCOMES = 16  # of eager with weights half a unit of rounding away, at most
JUMP = 4.0  # times eager's own error: what eager's outcomes of an element span only where the model chooses


class Distance(NamedTuple):
    """How far a tensor is from a reference: ||a - b|| / ||b||, and max |a - b| / max |b|.

    Of whole numbers and truth values both are the share of elements that differ.
    """

    norm: float
    element: float

    def or_more(self, other: Distance) -> Distance:
        return Distance(max(self.norm, other.norm), max(self.element, other.element))


NONE = Distance(0.0, 0.0)


def is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def distance(out: Tensor, reference: Tensor, typical: float = 0.0) -> Distance:
    """How far `out` is from `reference`, of the same shape, in double precision.

    Args:
        typical: of an element. It stands in where the reference's own are smaller.
    """
    import torch

    if not reference.numel():
        return NONE
    if is_whole(reference):
        share = (out != reference).double().mean().item()
        return Distance(share, share)
    wide = torch.complex128 if reference.is_complex() else torch.float64
    apart, size = (out.to(wide) - reference.to(wide)).abs(), reference.to(wide).abs()
    norm, element = max(size.norm().item(), typical * sqrt(size.numel())), max(size.max().item(), typical)
    return Distance(apart.norm().item() / (norm or 1.0), apart.max().item() / (element or 1.0))


class Span:
    """The least and the largest outcome of each element of a real tensor.

    Where a model chooses, as a router chooses experts, rounding decides between them.

    Args:
        outcome: the first.
    """

    def __init__(self, outcome: Tensor):
        self.low = self.high = outcome.double()

    def widen(self, outcome: Tensor) -> None:
        """By one of the same shape; one of another is no outcome of the same elements."""
        if outcome.shape == self.low.shape:
            self.low, self.high = self.low.minimum(outcome.double()), self.high.maximum(outcome.double())

    def num_beyond(self, width: float) -> int:
        """How many elements span more."""
        return int((self.high - self.low > width).sum())

    def held(self, out: Tensor, reference: Tensor) -> Tensor:
        """A tensor as far from `reference` as `out` is from the span."""
        wide = out.double()
        return reference.double() + (wide - wide.clamp(self.low, self.high))


def jump(own: float, tolerance: float, reference: Tensor) -> float:
    """What an element spans at most where nothing chooses.

    Args:
        own: eager's largest error of an element, as a share of the reference's largest element.
        tolerance: what a system may be off by, alike.
        reference: the tensor in higher precision.
    """
    return max(tolerance, JUMP * own) * reference.abs().max().item()
