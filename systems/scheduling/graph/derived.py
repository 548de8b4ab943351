"""Tensors that preparation derives from the module's own (folded, merged or re-laid weights), and how they stay current."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from systems.preparing import as_captured

_num_fused_steps = 0


@dataclass(frozen=True, eq=False)
class Derived:
    """A tensor that holds `compute(*sources)`.

    Args:
        sources: Tensors of the module, or tensors derived before this one.
    """

    tensor: Tensor
    sources: tuple[Tensor, ...]
    compute: Callable[..., Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, compute: Callable[..., Tensor], *sources: Tensor) -> "Derived":
        return cls(compute(*sources), sources, compute)


class Derivations:
    """The derived tensors of a program, in the order of derivation.

    A write in place (an optimizer's step, load_state_dict) raises the source's version counter, which `refresh` reads. The
    step of a fused optimizer does not, and is counted apart. Nor does a write through `.data`, or to a tensor that was made
    in inference mode: call `refresh(force=True)` after it.

    Invariant: `versions` are the sources' versions at the last derivation, and the number of fused steps then.
    """

    def __init__(self, derived: Iterable[Derived] = ()):
        self.derived = tuple(derived)
        if self.derived:
            _watch_optimizers()
        own = {id(d.tensor) for d in self.derived}
        # An inference tensor has no version counter, and only inference mode may write it.
        sources = {id(s): s for d in self.derived for s in d.sources if not s.is_inference() and id(s) not in own}
        self.sources = list(sources.values())
        self.versions = self._versions()

    def __add__(self, more: Iterable[Derived]) -> "Derivations":
        return Derivations(dict.fromkeys((*self.derived, *more)))  # several operators may read one

    def refresh(self, force: bool = False) -> bool:
        """Derive all again, in place, if a source was written since the last derivation; returns whether one was."""
        if not force and self._versions() == self.versions:
            return False
        with torch.no_grad():
            for d in self.derived:
                with as_captured(d.tensor.device.type):
                    d.tensor.copy_(d.compute(*d.sources))
        self.versions = self._versions()
        return True

    def _versions(self) -> list[int]:
        return [*(s._version for s in self.sources), _num_fused_steps]


def _count_fused(optimizer: Optimizer, *_: object) -> None:
    global _num_fused_steps
    _num_fused_steps += any(group.get("fused") for group in optimizer.param_groups)


@cache
def _watch_optimizers() -> None:
    """Have the fused steps of all optimizers counted: PyTorch raises no version counter for them."""
    register_optimizer_step_post_hook(_count_fused)
