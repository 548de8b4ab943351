"""Correctness: the largest relative error against eager, on inputs drawn anew after preparation."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Relative error of a whole output that rounding alone may cause, by the precision of the arithmetic. TF32 and fp16 keep 10
# bits: one rounding is 5e-4, and a valid reordering (batch norm folded into its convolution, say) was measured to grow
# that to 1.4e-2 over GoogLeNet's depth. A wrong operator, buffer or order gives errors near 1.
TOLERANCE = {"fp32": 1e-4, "tf32": 3e-2, "fp16": 3e-2, "bf16": 1e-1}
DRAWS = 3


def measure(
    module: Callable[..., Any], prepared: Callable[..., Any], draws: Sequence[tuple[Tensor, ...]], precision: str
) -> dict[str, Any]:
    """Compare `prepared` with the eager `module` on each of `draws`.

    relative_error is the largest ||out - eager|| / ||eager|| over outputs and draws; reason says, where `correct` is false,
    what is wrong.
    """
    tolerance, worst, reason = TOLERANCE[precision], 0.0, None
    for inputs in draws:
        with torch.no_grad():
            expected = [t for t in tree_leaves(module(*inputs)) if isinstance(t, Tensor)]
        got = [t for t in tree_leaves(prepared(*inputs)) if isinstance(t, Tensor)]
        if [t.shape for t in got] != [t.shape for t in expected]:
            reason = f"outputs of shape {[list(t.shape) for t in got]}, eager's are {[list(t.shape) for t in expected]}"
            break
        for out, reference in zip(got, expected, strict=True):
            if not torch.isfinite(reference).all():
                reason = "eager's own output is not finite, so nothing can be compared"
            elif not torch.isfinite(out).all():
                reason = "the output is not finite"
            else:
                worst = max(worst, relative_error(out, reference))
        if reason:
            break
    if reason is None and worst > tolerance:
        reason = f"relative error {worst:.1e} exceeds the tolerance {tolerance:.0e} of {precision}"
    return {
        "correct": reason is None,
        "reason": reason,
        "relative_error": worst,
        "tolerance": tolerance,
        "inputs": len(draws),
    }


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference||, in double precision."""
    reference, out = reference.double(), out.double()
    scale = reference.norm().item()
    return (out - reference).norm().item() / (scale if scale > 0 else 1.0)
