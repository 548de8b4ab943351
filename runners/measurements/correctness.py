"""Correctness: the largest relative error against eager, on inputs drawn anew after preparation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from results.record import Correctness as CorrectnessPart
from results.record import Record

from .base import Column, Measurement, Part, Row, number_or_dash
from .subject import Subject

if TYPE_CHECKING:
    from torch import Tensor

# Relative error of a whole output that rounding alone may cause, by the precision of the arithmetic. A wrong operator, a
# wrong buffer or a wrong order gives errors near 1.
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 3e-2, "bf16": 1e-1}
# TF32 keeps 10 bits, and how far one rounding of 5e-4 grows depends on the depth of the model. So, where TF32 can be
# switched off, what it costs eager itself is measured, and another system may be that far off this many times over: a valid
# reordering (batch norm folded into its convolution, say) rounds differently from eager, not more.
ROUNDINGS = 3.0
DRAWS = 3


def measure(
    module: Callable[..., object],
    prepared: Callable[..., object],
    draws: Sequence[tuple[Tensor, ...]],
    precision: str,
) -> CorrectnessPart:
    """Compare `prepared` with the eager `module`.

    The relative error is the largest ||out - eager|| / ||eager|| over outputs and draws. Rounding is the same between eager
    and eager without TF32; it is measured only where it is needed to judge.

    Args:
        module, prepared: both take the tensors of a draw.
        draws: inputs that neither has seen.
        precision: of the arithmetic, a key of TOLERANCE.
    """
    import torch

    worst, rounding, reason, tolerance = 0.0, None, None, TOLERANCE[precision]
    for inputs in draws:
        expected, outputs = _tensors(module, inputs), _tensors(prepared, inputs)
        if [t.shape for t in outputs] != [t.shape for t in expected]:
            shapes, eagers = ([list(t.shape) for t in tensors] for tensors in (outputs, expected))
            reason = f"outputs of shape {shapes}, eager's are {eagers}"
            break
        for out, reference in zip(outputs, expected, strict=True):
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
    return CorrectnessPart(reason is None, reason, worst, rounding, tolerance, inputs=len(draws))


def _rounding(module: Callable[..., object], draws: Sequence[tuple[Tensor, ...]]) -> float:
    """What TF32 costs eager: the largest relative error against eager without it."""
    import torch

    errors = [0.0]
    for inputs in draws:
        rounded = _tensors(module, inputs)
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
            exact = _tensors(module, inputs)
        errors += [relative_error(r, e) for r, e in zip(rounded, exact, strict=True)]
    return max(errors)


def _tensors(call: Callable[..., object], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    import torch
    from torch.utils._pytree import tree_leaves

    with torch.no_grad():
        return [leaf for leaf in tree_leaves(call(*inputs)) if isinstance(leaf, torch.Tensor)]


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference||, in double precision."""
    reference, out = reference.double(), out.double()
    scale = reference.norm().item()
    return (out - reference).norm().item() / (scale if scale > 0 else 1.0)


def _error(record: Record) -> str:
    return number_or_dash(record.correctness.relative_error if record.correctness else None, "{:.1e}")


class Correctness(Measurement):
    """Compared with eager, before anything is timed; what is incorrect is not timed at all."""

    name = "correctness"
    place = 60
    columns = (Column("error", 2, _error),)
    rows = (Row("relative error against eager", _error),)

    def measure(self, session: Subject) -> Part:
        return session.compare()
