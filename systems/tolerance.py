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
