"""Where a model chooses, as a router chooses experts, rounding decides: what eager's own outcomes span there."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from systems.arithmetic import disturb, epsilon

from .reference import SECONDS, Inputs, state

OUTCOMES = 16  # of eager with other weights, at most


def outcomes(module: object, inputs: Inputs, precision: str) -> Iterator[Any]:
    """Eager's outputs with its weights half a unit of rounding away, each time another way, as far as SECONDS last.

    Args:
        module: eager; it does not change. What is no module has none.
        inputs: of a call.
        precision: in which it computes.
    """
    if not isinstance(module, nn.Module):
        return
    begin, copy = perf_counter(), deepcopy(module)
    pairs = list(zip(state(copy), state(module), strict=True))
    for outcome in range(OUTCOMES):
        with torch.no_grad():
            for i, (weight, own) in enumerate(pairs):
                weight.copy_(own)
                if by := epsilon(own, precision):
                    disturb(weight, outcome * len(pairs) + i, by / 2)
            made = copy(*(x.clone() for x in inputs))
        yield made
        if perf_counter() - begin > SECONDS:
            return


class Span:
    """The least and the largest outcome of each element of a real tensor.

    Args:
        outcome: the first.
    """

    def __init__(self, outcome: Tensor):
        self.low = self.high = outcome.double()

    def widen(self, outcome: Tensor) -> None:
        """By one of the same shape; one of another is no outcome of the same elements."""
        if outcome.shape == self.low.shape:
            self.low, self.high = torch.minimum(self.low, outcome.double()), torch.maximum(self.high, outcome.double())

    def num_beyond(self, width: float) -> int:
        """How many elements span more."""
        return int((self.high - self.low > width).sum())

    def held(self, out: Tensor, reference: Tensor) -> Tensor:
        """A tensor as far from `reference` as `out` is from the span."""
        wide = out.double()
        return reference.double() + (wide - wide.clamp(self.low, self.high))
