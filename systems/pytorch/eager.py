"""PyTorch as it is: it schedules one operator after another at run time."""

import torch
from torch import Tensor, nn

from systems.base import Loss, Prepared, PreparedModule, System
from systems.training.step import ModuleStep


class Eager(System):
    name = "eager"

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        return PreparedModule(module)

    def prepare_training(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, inputs: tuple[Tensor, ...], target: Tensor
    ) -> Prepared:
        return ModuleStep(module, optimizer, loss)
