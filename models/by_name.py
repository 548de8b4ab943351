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

    Raises:
        TypeError: `names` is a text and no sequence of them; in a call: the inputs are not as many as the names.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]):
        if isinstance(names, str):
            raise TypeError(f"names is a sequence of them: [{names!r}]")
        super().__init__(module)
        self.names = tuple(names)

    def forward(self, *inputs: Tensor) -> Any:
        if len(inputs) != len(self.names):
            raise TypeError(f"{len(inputs)} inputs, but names of {len(self.names)}: {', '.join(self.names)}")
        return self.module(**dict(zip(self.names, inputs, strict=True)))
