"""Whether a module answers the same twice: a capture holds one call for ever."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves

from systems.training.restore import restored, state_kept


def repeats_itself(module: nn.Module, inputs: Sequence[Any]) -> bool:
    """Are two calls in a row answered alike, where the second finds the buffers and random numbers that the first one found?

    Whether they are is not asked of what holds no numbers, such as a model of tensors on the meta device.
    """
    buffers = list(module.buffers())
    tensors = [*module.parameters(), *buffers, *(x for x in inputs if isinstance(x, Tensor))]
    if any(x.is_meta or isinstance(x, FakeTensor) for x in tensors):
        return True
    devices = sorted({x.get_device() for x in tensors if x.is_cuda})
    answers = []
    with torch.no_grad(), state_kept(module):
        for _ in range(2):
            with restored(buffers, devices):
                answers.append([x.clone() for x in tree_leaves(module(*inputs)) if isinstance(x, Tensor)])
    first, second = answers
    return len(first) == len(second) and all(map(_is_alike, first, second))


def _is_alike(x: Tensor, y: Tensor) -> bool:
    try:
        torch.testing.assert_close(x, y, equal_nan=True)
    except AssertionError:
        return False
    return True
