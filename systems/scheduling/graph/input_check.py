"""The check of a call's inputs, in one step where they have the form of the call before: each call waits for it."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from .program import check_inputs


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


class InputCheck:
    """Compares the inputs of each call with those that an executable was prepared for.

    Args:
        examples: what it was prepared for.
    """

    def __init__(self, examples: Sequence[Tensor]):
        self.examples = examples
        self.form: InputForm | None = None  # of the last inputs that were right; None where some have no strides

    def is_known(self, inputs: Sequence[Tensor]) -> bool:
        """Have they the form of the last call's? Raises ValueError, as check_inputs, unless they are right."""
        if self.form is not None and self.form.is_of(inputs):
            return True
        check_inputs(inputs, self.examples)
        self.form = InputForm(inputs) if all(x.layout is torch.strided for x in inputs) else None
        return False
