"""Which attention an engine has, by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor

from ..layout import Layout
from . import split
from .cross import CrossAttention

if TYPE_CHECKING:
    from .cross_fused import FusedCrossAttention

ATTENTIONS = ("split", "fused")


def attention_of(name: str) -> ModuleType:
    """A decoder's: `store` and `attend`."""
    if name == "split":
        return split
    from . import fused  # it needs Triton

    return fused


def across_of(name: str, num_positions: int) -> Callable[[Tensor, Layout], CrossAttention | FusedCrossAttention]:
    """An encoder-decoder's attention of one iteration, of all layers' cache and a layout."""
    if name == "split":
        return CrossAttention
    from .cross_fused import FusedCrossAttention, Tables

    return partial(FusedCrossAttention, tables=Tables(num_positions))
