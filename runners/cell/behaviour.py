"""What a model itself does wrong, whatever the system: it fails, changes its inputs, or answers differently each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runners.measurements.correctness import relative_error
from systems.base import Unsupported

# Two answers of eager to the same inputs differ by less: kernels may add in whatever order.
SAME = {"fp32": 1e-4, "tf32": 1e-2, "tf32_products": 1e-2, "fp16": 3e-2, "bf16": 1e-1}


@contextmanager
def refused_by_the_system(run_eagerly: Callable[[], object]) -> Iterator[None]:
    """Where a system refuses the model within, run the model eagerly.

    Args:
        run_eagerly: one call of the model.

    Raises:
        Unsupported: the system alone refuses the model.
        Exception: what the model raises, which is its own failure under every system.
    """
    try:
        yield
    except Unsupported:
        run_eagerly()
        raise


@torch.no_grad()
def not_comparable(module: nn.Module, inputs: Sequence[Tensor], tolerance: float) -> str | None:
    """Why no answer of a system can be compared with eager's, in one line; None where it can.

    Args:
        module: in eval form. It runs twice, on copies of the inputs.
        inputs: of the module; they stay as they are.
        tolerance: relative error between two answers by which they are the same; kernels may add in whatever order.
    """
    copies = [x.detach().clone() for x in inputs]
    before = _state(module)
    first = _answer(module, copies)
    changed = [i for i, (x, copy) in enumerate(zip(inputs, copies, strict=True)) if not _is_alike([x], [copy], 0.0)]
    written = [name for name, now in _state(module).items() if before.get(name) != now]
    if changed:
        reason = f"changes its input {changed[0]} in place"
    elif _is_alike(first, _answer(module, [x.detach().clone() for x in inputs]), tolerance):
        return None
    elif written:
        reason = f"changes its own state in a forward pass ({written[0]})"
    else:
        reason = "answers the same inputs differently each time"
    return f"the model {reason}, so nothing can be compared"


def _answer(module: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the tensors that the module returns."""
    return [leaf.clone() for leaf in tree_leaves(module(*inputs)) if isinstance(leaf, Tensor)]


def _state(module: nn.Module) -> dict[str, tuple[int, int]]:
    """By the name of a parameter or buffer, which tensor it is and how often that was written."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: (id(t), 0 if t.is_inference() else t._version) for name, t in tensors}


def _is_alike(first: Sequence[Tensor], second: Sequence[Tensor], tolerance: float) -> bool:
    """Are the tensors equal within a relative error? What is not finite is told where answers are compared."""
    if [t.shape for t in first] != [t.shape for t in second]:
        return False
    pairs = [(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in zip(first, second, strict=True)]
    return all(relative_error(a, b) <= tolerance for a, b in pairs)
