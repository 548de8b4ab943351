"""A module in the place of another."""

from typing import Any

from torch import nn


class ModuleWrapper(nn.Module):
    """Has the parameters, buffers, submodules and form of the module that it wraps, under the same names.

    Args:
        module: stays as it is.
    """

    module: nn.Module

    def __init__(self, module: nn.Module):
        super().__init__()
        # Not a submodule: the names in state_dict are to stay the module's own.
        self.__dict__["module"] = module
        for own in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[own] = getattr(module, own)

    @property
    def training(self) -> bool:
        """The module's own form."""
        return bool(self.module.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in self.__dict__:  # not as nn.Module begins
            self.module.training = mode

    def train(self, mode: bool = True) -> "ModuleWrapper":
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)
