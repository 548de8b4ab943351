"""What eager may come out as where its model chooses, since rounding decides there."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from time import perf_counter
from typing import Any

import torch
from torch import nn

from systems.arithmetic import disturb, epsilon
from systems.tolerance import OUTCOMES

from .reference import SECONDS, Inputs, state


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
