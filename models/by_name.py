"""A module whose inputs go by name, as one whose inputs go by position."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from models.module_wrapper import ModuleWrapper


class ByName(ModuleWrapper):
    """`ByName(module, ["ids", "mask"])(x, y)` is `module(ids=x, mask=y)`.

    Args:
        module: takes its inputs by name, as those of Hugging Face do.
        names: of its inputs, in the order of their positions.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]):
        super().__init__(module)
        self.names = tuple(names)

    def forward(self, *inputs: Tensor) -> Any:
        return self.module(**dict(zip(self.names, inputs, strict=True)))
