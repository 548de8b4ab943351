"""The form of a call's inputs, compared in one step: every call asks whether it is that of a call before."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards


class InputForm:
    """Classes, shapes, strides, dtypes, devices and flags of tensors, as the modes of this thread have them.

    Python takes some microseconds to compare one input, and a recommender has dozens, all before its graph is launched.

    Args:
        inputs: they lie in memory by strides.
    """

    def __init__(self, inputs: Sequence[Tensor]):
        sizes, strides = [list(x.shape) for x in inputs], [list(x.stride()) for x in inputs]
        self.count = len(inputs)
        # torch's stubs have one list for all inputs; its parser takes a list an input.
        self.guards = TensorGuards(*inputs, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]

    def is_of(self, inputs: Sequence[object]) -> bool:
        """Have they this form? False, too, where one tensor stands in two places."""
        return len(inputs) == self.count and bool(self.guards.check(*inputs))


def lie_by_strides(inputs: Sequence[object]) -> bool:
    return all(isinstance(x, Tensor) and x.layout is torch.strided for x in inputs)
