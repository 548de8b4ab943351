"""A module whose inputs go by name, as one whose inputs go by position."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


class ByName(nn.Module):
    """`ByName(module, ["ids", "mask"])(x, y)` is `module(ids=x, mask=y)`.

    Its parameters, buffers and submodules are those of `module` itself, under the same names.

    Args:
        module: takes its inputs by name, as those of Hugging Face do.
        names: of its inputs, in the order of their positions.
    """

    module: nn.Module

    def __init__(self, module: nn.Module, names: Sequence[str]):
        super().__init__()
        # Not a submodule: the names in state_dict are to stay the module's own.
        self.__dict__["module"] = module
        for own in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[own] = getattr(module, own)
        self.names = tuple(names)

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(**dict(zip(self.names, inputs, strict=True)))

    @property
    def training(self) -> bool:
        """The module's own form."""
        return bool(self.module.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in self.__dict__:  # not as nn.Module begins
            self.module.training = mode
