"""Tensors computed from the module's own at preparation (folded, merged or re-laid weights), kept up to date."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Derived:
    """`tensor` holds `compute(*sources)`; the sources are the module's tensors, or derived before it."""

    tensor: Tensor
    sources: tuple[Tensor, ...]
    compute: Callable[..., Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, compute: Callable[..., Tensor], *sources: Tensor) -> "Derived":
        return cls(compute(*sources), sources, compute)


class Derivations:
    """The derived tensors of a program, in the order of derivation.

    A source that is written in place (an optimizer's step, load_state_dict) bumps its version counter, which `refresh`
    reads. Writing through `.data` bumps none: call `refresh(force=True)` after it.
    """

    def __init__(self, derived: Iterable[Derived] = ()):
        self.derived = tuple(derived)
        # An inference tensor counts no versions, and nothing but inference mode may write it.
        self.sources = [s for d in self.derived for s in d.sources if not s.is_inference()]
        self.versions = self._versions()

    def __add__(self, more: Iterable[Derived]) -> "Derivations":
        return Derivations((*self.derived, *more))

    @torch.no_grad()
    def refresh(self, force: bool = False) -> bool:
        """Derive anew, in place, if a source has been written since; returns whether that was so."""
        if not force and self._versions() == self.versions:
            return False
        for d in self.derived:
            d.tensor.copy_(d.compute(*d.sources))
        self.versions = self._versions()
        return True

    def _versions(self) -> list[int]:
        return [s._version for s in self.sources]
