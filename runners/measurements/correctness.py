"""Correctness: errors against eager in a higher precision, beside eager's own, on inputs drawn anew after preparation.

Eager's own error is the larger of two: its distance from the reference, and how far the reference moves with weights and
inputs half a unit of rounding away. A system may have a multiple of it. Where other inputs move the output by no more than
that, the system has to be nearer to the reference than to what they move it to; else, as where eager's output is not finite,
no wrong execution could be seen: the cell is `unchecked`.
Where an error is too large, the model may have chosen otherwise, as a router does among experts whose scores are nearly
level. What follows from a choice is then held to what eager's own outcomes span: those with weights half a unit of rounding
away. A model that does not choose has no element that spans much more than rounding, and is held to the reference alone.
tests/test_correctness.py and tests/test_training_runner.py keep tables of wrong executions (MUTANTS) that must be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

from models.model import TF32
from results.calls import Correctness as CorrectnessPart
from results.record import Record
from systems.tolerance import FLOOR, MULTIPLE, NONE, Distance, Span, distance, is_whole, jump

from .base import Column, Measurement, Part, Row, number_or_dash
from .subject import Subject

if TYPE_CHECKING:
    from torch import Tensor

NEAR = 0.5  # of what other inputs do to the output: with a smaller error it is not the output of other inputs
DRAWS = 3

ANY = Distance(inf, inf)


@dataclass
class Errors:
    """Of one tensor, the largest over draws.

    Args:
        least: what the system may be off by in any case.
        multiple: how many times eager's error it may have.
        system: against the reference.
        eager: against the reference, and the reference against itself with weights and inputs half a unit of rounding away.
        effect: of a wrong execution: how far from the reference it is with other inputs, or without the optimizer.
    """

    least: float
    multiple: float
    system: Distance = NONE
    eager: Distance = NONE
    effect: Distance = NONE

    @property
    def tolerance(self) -> Distance:
        return Distance(*(max(self.least, self.multiple * error) for error in self.eager))

    @property
    def shows_effect(self) -> bool:
        """Would that wrong execution not have been ok?"""
        return self.effect.norm > self.tolerance.norm or self.system.norm < NEAR * self.effect.norm

    @property
    def unseen(self) -> float:
        """The largest error of the norm that is ok, where the effect shows."""
        tolerance, effect = self.tolerance.norm, self.effect.norm
        return tolerance if effect > tolerance else NEAR * effect


def measure(
    module: Callable[..., object],
    prepared: Callable[..., object],
    draws: Sequence[tuple[Tensor, ...]],
    precision: str,
) -> CorrectnessPart:
    """Compare `prepared` with `module` in a higher precision. What it may be off by is a multiple of eager's own error.

    Args:
        module: eager, in the precision that is measured.
        prepared: takes the same inputs.
        draws: inputs that neither has seen; two at least, since one cannot show whether the output depends on them.
        precision: of the arithmetic, a key of MULTIPLE. On a CPU those of TF32 are fp32.
    """
    from runners.cell.reference import references

    reference = references(module, draws, precision)
    multiple = MULTIPLE["fp32" if precision in TF32 and not draws[0][0].is_cuda else precision]
    trial = _Trial(multiple)
    for inputs, expected, disturbed in zip(draws, reference.outputs, reference.disturbed, strict=False):
        trial.add(_called(module, inputs), _called(prepared, inputs), expected, disturbed)
        if trial.reason:
            break
    norm, element = trial.largest
    reason = trial.reason or beyond(norm, element, f"of {precision}")
    jumps = None
    if reason and not trial.reason:
        jumps = trial.hold_to_spans(module, draws, precision)
        norm, element = trial.largest
        reason = beyond(norm, element, f"of {precision}")
    is_correct, is_checked = reason is None, trial.is_checked
    effect = max(trial.errors.values(), key=lambda e: (e.shows_effect, e.effect.norm - e.tolerance.norm), default=None)
    if is_correct and not (effect and effect.shows_effect):
        is_correct = is_checked = False
        reason = "its output holds no tensors to compare" if effect is None else _vacuous(effect)
    return CorrectnessPart(
        is_correct=is_correct,
        reason=reason,
        relative_error=norm.system.norm if norm else None,
        rounding=norm.eager.norm if norm else None,
        tolerance=(norm.unseen if is_correct and norm is effect else norm.tolerance.norm) if norm else None,
        inputs=trial.num_draws,
        is_checked=is_checked,
        reference=reference.precision,
        element_error=element.system.element if element else None,
        element_tolerance=element.tolerance.element if element else None,
        equals_eager=trial.equals_eager,
        input_effect=effect.effect.norm if effect and isfinite(effect.effect.norm) else None,
        jumps=jumps or None,
    )


def accepted(module: Callable[..., object], choices: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The first inputs that the module takes and makes finite numbers of; the last where it does so of none."""
    import torch

    for inputs in choices[:-1]:
        try:
            leaves = dict(_leaves(_called(module, inputs))).values()
        except Exception:  # what a model raises of values that it is not made for
            continue
        if all(bool(torch.isfinite(leaf).all()) for leaf in leaves if isinstance(leaf, torch.Tensor)):
            return inputs
    return choices[-1]


class _Trial:
    """What draws have shown so far.

    Args:
        multiple: of Errors.
        errors: of each tensor, by its place in the output.
        reason: why no further draw need be compared.
        is_checked: False where nothing can be compared.
        equals_eager: every tensor has been eager's bit for bit.
    """

    def __init__(self, multiple: float):
        self.multiple, self.num_draws = multiple, 0
        self.errors: dict[str, Errors] = {}
        self.earlier: dict[str, Tensor] = {}  # the reference on the draw before
        self.leaves: list[tuple[dict[str, Any], ...]] = []  # of each draw: the system's, eager's, the reference's, disturbed
        self.reason: str | None = None
        self.is_checked = self.equals_eager = True

    def add(self, eager: object, out: object, expected: object, disturbed: object) -> None:
        """Compare one draw's outputs: eager's, the system's, the reference's, the disturbed reference's."""
        import torch

        self.num_draws += 1
        outs, owns, references, disturbeds = leaves = tuple(dict(_leaves(x)) for x in (out, eager, expected, disturbed))
        self.leaves.append(leaves)
        if reason := _other_form(outs, owns):
            self.reason = reason
            return
        if not owns.keys() == references.keys() == disturbeds.keys():
            self._give_up("eager's output is of another structure in a higher precision")
            return
        for place, own in owns.items():
            if isinstance(own, torch.Tensor):
                self._compare_tensors(place, outs[place], own, references[place], disturbeds[place])
            elif own != references[place]:
                hint = ": no two of that type are equal, so return tensors" * (type(own).__eq__ is object.__eq__)
                self._give_up(f"two calls of eager do not agree on {place}, {own!r}{hint}")
            elif outs[place] != own:
                self.reason = f"{place} is {outs[place]!r}, eager's is {own!r}"
            if self.reason:
                return

    @property
    def largest(self) -> tuple[Errors | None, Errors | None]:
        """By the norm, and by the largest element."""
        return largest(self.errors.values(), by=0), largest(self.errors.values(), by=1)

    def hold_to_spans(self, module: Callable[..., object], draws: Sequence[tuple[Tensor, ...]], precision: str) -> int:
        """Take the system's errors anew: tensors of which elements jump are held to what eager's outcomes span.

        Args:
            module, draws, precision: of `measure`.

        Returns:
            The number of elements that jump, of all draws.
        """
        from runners.cell.spans import outcomes

        jumps, systems = 0, dict.fromkeys(self.errors, NONE)
        for inputs, (out, own, expected, disturbed) in zip(draws, self.leaves, strict=False):
            others = [disturbed, own, *(dict(_leaves(outcome)) for outcome in outcomes(module, inputs, precision))]
            for place, errors in self.errors.items():
                tensor = out[place]
                if tensor.is_floating_point():
                    span = Span(expected[place])
                    for outcome in others:
                        span.widen(outcome[place])
                    usual = jump(errors.eager.element, errors.tolerance.element, expected[place])
                    if num_jumps := span.num_beyond(usual):
                        jumps, tensor = jumps + num_jumps, span.held(tensor, expected[place])
                systems[place] = systems[place].or_more(distance(tensor, expected[place]))
        for place, errors in self.errors.items():
            errors.system = systems[place]
        return jumps

    def _give_up(self, reason: str) -> None:
        self.reason, self.is_checked = reason, False

    def _compare_tensors(self, place: str, out: Tensor, own: Tensor, reference: Tensor, disturbed: Tensor) -> None:
        import torch

        if not own.shape == reference.shape == disturbed.shape:
            self._give_up(f"eager's {place} is of another shape in a higher precision")
        elif not all(bool(torch.isfinite(t).all()) for t in (own, reference, disturbed)):
            self._give_up(f"eager's own {place} is not finite, so nothing can be compared")
        elif not torch.isfinite(out).all():
            self.reason = f"the {place} is not finite"
        else:
            least = 0.0 if is_whole(own) else FLOOR * torch.finfo(own.dtype).eps
            errors = self.errors.setdefault(place, Errors(least, self.multiple))
            self.equals_eager = self.equals_eager and torch.equal(out, own)
            errors.system = errors.system.or_more(distance(out, reference))
            errors.eager = errors.eager.or_more(distance(own, reference)).or_more(distance(disturbed, reference))
            earlier = self.earlier.get(place, reference)
            is_alike = earlier.shape == reference.shape
            errors.effect = errors.effect.or_more(distance(earlier, reference) if is_alike else ANY)
            self.earlier[place] = reference


def largest(errors: Iterable[Errors], by: int) -> Errors | None:
    """The one that goes furthest towards its tolerance, or beyond; by 0 the norm, by 1 the largest element."""

    def share(one: Errors) -> float:
        error, tolerance = one.system[by], one.tolerance[by]
        return error / tolerance if tolerance else inf * error if error else 0.0

    return max(errors, key=share, default=None)


def beyond(norm: Errors | None, element: Errors | None, where: str) -> str | None:
    """How the largest errors exceed their tolerance, or None."""
    if norm and not norm.system.norm <= norm.tolerance.norm:
        return f"relative error {norm.system.norm:.1e} exceeds the tolerance {norm.tolerance.norm:.1e} {where}"
    if element and not element.system.element <= element.tolerance.element:
        error, tolerance = element.system.element, element.tolerance.element
        return f"relative error {error:.1e} of the largest element exceeds the tolerance {tolerance:.1e} {where}"
    return None


def _vacuous(errors: Errors) -> str:
    return (
        f"a wrong execution could not be seen: other inputs change the output by {errors.effect.norm:.1e}, "
        f"and an error of {errors.tolerance.norm:.1e} may be rounding"
    )


def _called(call: Callable[..., object], inputs: tuple[Tensor, ...]) -> object:
    """On inputs of its own, which it may write to."""
    import torch

    with torch.no_grad():
        return call(*(x.clone() for x in inputs))


def _leaves(value: object, place: str = "output") -> Iterator[tuple[str, Any]]:
    """Each tensor and value of an output by its place, and each type. A floating-point number counts as a tensor."""
    import torch
    from torch.utils._pytree import keystr, tree_flatten_with_path

    if not isinstance(value, torch.Tensor):
        yield f"the type of {place}", type(value).__name__
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{place}[{key!r}]")
    elif isinstance(value, tuple | list):
        for i, part in enumerate(value):
            yield from _leaves(part, f"{place}[{i}]")
    else:
        for path, leaf in tree_flatten_with_path(value)[0]:
            yield place + keystr(path), torch.as_tensor(leaf) if isinstance(leaf, float | complex) else leaf


def _other_form(outs: Mapping[str, Any], owns: Mapping[str, Any]) -> str | None:
    """How the form of an output differs from that of eager's: structure, types, shapes."""
    import torch

    for place, own in owns.items():
        if place not in outs:
            return f"the output lacks {place}"
        out = outs[place]
        if isinstance(own, torch.Tensor) and (out.dtype, out.shape) != (own.dtype, own.shape):
            shapes = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (out, own)]
            return f"{place} is of shape {shapes[0]}, eager's of {shapes[1]}"
        if place.startswith("the type of") and out != own:
            return f"{place} is {out}, eager's is {own}"
    return next((f"the output has {place}, eager's has not" for place in outs if place not in owns), None)


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference||, in double precision."""
    return distance(out, reference).norm


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
