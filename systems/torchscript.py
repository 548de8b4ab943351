"""TorchScript: the module traced and frozen."""

import warnings

import torch
from torch import Tensor, nn

from systems.base import Prepared, PreparedModule, System, Unsupported

WARM_UP_RUNS = 3  # the profiling executor specialises in the first runs


class TorchScript(System):
    name = "torchscript"

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tracing warns of every Python branch; the output is compared with eager's
            try:
                traced = torch.jit.freeze(torch.jit.trace(module, inputs, check_trace=False))
            except (RuntimeError, TypeError, ValueError) as error:
                raise Unsupported(f"torch.jit.trace refuses it: {str(error).strip().splitlines()[0]}") from error
            for _ in range(WARM_UP_RUNS):
                traced(*inputs)
        return PreparedModule(traced)
