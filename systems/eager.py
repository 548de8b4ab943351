"""PyTorch as it is: one operator after another, scheduled at run time."""

from torch import Tensor, nn

from systems.base import Prepared, PreparedModule, System


class Eager(System):
    name = "eager"

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        return PreparedModule(module)
