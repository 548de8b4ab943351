"""A module as a captured step of training holds it: its parts' forms, its tensors, and which of them are trained."""

import operator
from typing import Any

import torch
from torch import Tensor, nn

from .optimizers import fits


class HeldModule:
    """What a step was captured with.

    Args:
        module: as it is now.
    """

    def __init__(self, module: nn.Module):
        self.modules = list(module.modules())
        self.forms = [m.training for m in self.modules]
        self.owners: list[dict[str, Any]] = [d for m in self.modules for d in (m._modules, m._parameters, m._buffers)]
        self.members_by_owner = [dict(owner) for owner in self.owners]
        self.members = _members(self.owners)
        self.tensors = [x for x in self.members if isinstance(x, Tensor)]
        self.addresses = [t.data_ptr() for t in self.tensors]
        self.differentiated = [t.requires_grad for t in self.tensors]

    def check(self) -> None:
        """Runs before each step, so it compares whole lists first, and looks closer only where they differ.

        Raises:
            RuntimeError: the module has been switched between training and eval form, or a parameter or buffer has been
                replaced, moved, frozen or unfrozen.
        """
        forms = [m.training for m in self.modules]
        if forms != self.forms:
            i = next(i for i, (now, then) in enumerate(zip(forms, self.forms, strict=True)) if now != then)
            form = "training" if self.forms[i] else "eval"
            raise RuntimeError(
                f"{type(self.modules[i]).__name__} was in {form} form when the step was prepared: prepare it again"
            )
        members = _members(self.owners)
        if len(members) != len(self.members) or not all(map(operator.is_, members, self.members)):
            self._take_buffers_over()
        if list(map(Tensor.data_ptr, self.tensors)) != self.addresses:
            raise RuntimeError("a parameter or buffer of the module has moved since the step was prepared: prepare it again")
        if [t.requires_grad for t in self.tensors] != self.differentiated:
            raise RuntimeError("a parameter was frozen, or no more, since the step was prepared: prepare it again")

    def replaced(self) -> list[str]:
        """Names of members that are others than those it holds."""
        pairs = zip(self.owners, self.members_by_owner, strict=True)
        return [name for now, then in pairs for name in now.keys() | then.keys() if now.get(name) is not then.get(name)]

    def put_back(self) -> None:
        """Give the module the members that it holds."""
        for owner, members in zip(self.owners, self.members_by_owner, strict=True):
            owner.clear()
            owner.update(members)

    def _take_buffers_over(self) -> None:
        """An eager forward may assign a new buffer: the captured one takes its value and its place."""
        for owner, members in zip(self.owners, self.members_by_owner, strict=True):
            for name in owner.keys() | members.keys():
                now: Any = owner.get(name)
                then = members.get(name)
                if now is then:
                    continue
                if isinstance(then, nn.Parameter) or not isinstance(then, Tensor) or not fits(now, then):
                    raise RuntimeError(
                        f"{name} of the module has been replaced since the step was prepared: prepare it again"
                    )
                with torch.no_grad():
                    owner[name] = then.copy_(now)


def _members(owners: list[dict[str, Any]]) -> list[Any]:
    return [x for owner in owners for x in owner.values()]
