"""TorchScript: the module traced and frozen. In training the forward is traced; autograd and the optimizer are eager."""

import re
import warnings

import torch
from torch import Tensor, nn

from conf.text import first_line, words_of
from systems.base import Loss, Prepared, PreparedModule, System, Unsupported
from systems.training.restore import state_kept
from systems.training.step import ModuleStep, undone

WARM_UP_RUNS = 3  # the profiling executor specialises in the first runs
OUTPUT = re.compile("Encountering a .* at the output of the tracer|Tracer cannot infer type of")  # how torch refuses one


class TorchScript(System):
    name = "torchscript"
    own_randomness = True  # on a GPU it differentiates dropout in a form of its own

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        if module.training:
            raise Unsupported("torch.jit.freeze takes a model in eval form, and this one is in training form")
        with torch.no_grad(), state_kept(module):
            traced = torch.jit.freeze(_traced(module, inputs))
            for _ in range(WARM_UP_RUNS):
                traced(*inputs)
        return PreparedModule(traced)

    def prepare_training(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, inputs: tuple[Tensor, ...], target: Tensor
    ) -> Prepared:
        with undone(module):
            step = ModuleStep(_traced(module, inputs), optimizer, loss)
            for _ in range(WARM_UP_RUNS):
                step.differentiate(*inputs, target)
        return step


def _traced(module: nn.Module, inputs: tuple[Tensor, ...]) -> torch.jit.ScriptModule:
    copies = tuple(x.detach().clone() for x in inputs)  # a trace takes an input that the module holds too for a constant
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing warns of every Python branch; the output is compared with eager's
        try:
            return torch.jit.trace(module, copies, check_trace=False)
        except (RuntimeError, TypeError, ValueError) as error:
            raise Unsupported(_reason(error)) from error


def _reason(error: Exception) -> str:
    """Why torch.jit.trace refuses a module, in one sentence: torch quotes all of an output before it says what is wrong."""
    if OUTPUT.match(words_of(error)):
        return "torch.jit.trace takes a model that returns tensors or tuples of them, and this one returns something else"
    return f"torch.jit.trace refuses it: {first_line(error)}"
