"""Correctness: the largest relative error against eager, on inputs drawn anew after preparation."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Relative error of a whole output that rounding alone may cause, by the precision of the arithmetic. A wrong operator, a
# wrong buffer or a wrong order gives errors near 1.
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 3e-2, "bf16": 1e-1}
# TF32 keeps 10 bits, and how far one rounding of 5e-4 grows depends on the depth of the model. So, where TF32 can be
# switched off, what it costs eager itself is measured, and another system may be that far off this many times over: a valid
# reordering (batch norm folded into its convolution, say) rounds differently from eager, not more.
ROUNDINGS = 3.0
DRAWS = 3


def measure(
    module: Callable[..., Any], prepared: Callable[..., Any], draws: Sequence[tuple[Tensor, ...]], precision: str
) -> dict[str, Any]:
    """Compare `prepared` with the eager `module` on each of `draws`.

    relative_error is the largest ||out - eager|| / ||eager|| over outputs and draws; rounding, where it was needed to judge,
    is the same between eager and eager without TF32. Where `correct` is false, reason says what is wrong.
    """
    worst, rounding, reason, tolerance = 0.0, None, None, TOLERANCE[precision]
    for inputs in draws:
        expected, got = _tensors(module, inputs), _tensors(prepared, inputs)
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
    if reason is None and worst > tolerance and precision == "tf32" and draws[0][0].is_cuda:
        rounding = _rounding(module, draws)
        tolerance = max(tolerance, ROUNDINGS * rounding)
    if reason is None and worst > tolerance:
        reason = f"relative error {worst:.1e} exceeds the tolerance {tolerance:.1e} of {precision}"
    return {
        "correct": reason is None,
        "reason": reason,
        "relative_error": worst,
        "rounding": rounding,
        "tolerance": tolerance,
        "inputs": len(draws),
    }


def _rounding(module: Callable[..., Any], draws: Sequence[tuple[Tensor, ...]]) -> float:
    """What TF32 costs eager: the largest relative error against eager without it."""
    errors = [0.0]
    for inputs in draws:
        rounded = _tensors(module, inputs)
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
            exact = _tensors(module, inputs)
        errors += [relative_error(r, e) for r, e in zip(rounded, exact, strict=True)]
    return max(errors)


@torch.no_grad()
def _tensors(call: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [t for t in tree_leaves(call(*inputs)) if isinstance(t, Tensor)]


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference||, in double precision."""
    reference, out = reference.double(), out.double()
    scale = reference.norm().item()
    return (out - reference).norm().item() / (scale if scale > 0 else 1.0)
