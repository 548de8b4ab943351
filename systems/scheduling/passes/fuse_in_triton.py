"""Puts in kernels of our own for convolutions and what stands around them, where they are faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from systems.scheduling.decision import Decision
from systems.scheduling.graph.derived import Derived
from systems.scheduling.graph.part import Examples, part
from systems.scheduling.graph.patterns import Convolution
from systems.scheduling.graph.program import Call, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Rewritten, fastest
from .convolution_places import KIND, Place, parts_of, places, signature_of
from .own_kernels import (
    SEPARATE,
    compile_unmeasured,
    has_kernels,
    milliseconds_of,
    nearest_tf32,
    num_cores,
    target_of,
    tickets,
    without_unread_activations,
)
from .patterns import name_operators, shape_of

aten = torch.ops.aten
WORTH = 0.95  # of the time of what is there, that a kernel has to stay below in its place


def fuse_in_triton(program: Program, context: Context) -> Rewritten:
    """Replace each convolution, with an activation before it and a sum and an activation after it, by one kernel of
    `systems.kernels`, where that is faster; a pointwise one with the depthwise one before it (in none of the papers). To
    one that is depthwise alone nothing is added.

    Invariants:
        - Of the operators of a place only the last is read from outside, and a sum is fused only where its other addend is
          computed before the place begins: so no parallelism is lost.
        - An activation before a place may have other readers. The kernel computes it itself; where no reader is left, it
          goes.

        - A place of which no operator goes is taken only where it is at least 1 / WORTH times as fast alone. Beside others
          a kernel of many blocks takes longer: it holds more SMs. A part of a concatenation may save that one's kernel.

    Each distinct place is measured separate, as the passes before leave it, and with each tile worth a trial. A depthwise
    convolution and the pointwise one after it, left separate, are places of their own, and take what these do together.
    """
    if not has_kernels(program.device):
        return program, []
    examples: Examples = {}  # of all trials, which are measured one after the other
    trials = [_trial(program, place, examples) for place in places(program)]
    distinct: dict[str, _Trial] = {}
    for trial in trials:
        for each in (trial, *trial.parts):
            distinct.setdefault(each.signature, each)  # the first, which is the one that is measured
    compile_unmeasured(program, (call for trial in distinct.values() for call in trial.calls.values()), context)
    measured: dict[tuple[str, bool], _Times] = {}
    replacements: list[Replacement] = []
    decisions: list[Decision] = []
    for trial in trials:
        pending = [trial]
        while pending:
            one = pending.pop()
            decisions.append(_decide(program, one, context, measured))
            chosen = decisions[-1].chosen
            if chosen != SEPARATE:
                call = one.calls[chosen]
                name = "_".join(program.graph.operators[v].name for v in one.place.operators)
                results: dict[int, int | None] = {one.place.operators[-1]: None}
                replacements.append(Replacement(one.place.operators, name, target_of(call), call, results, one.derived))
            else:
                pending += reversed(one.parts)
    return without_unread_activations(replace(program, replacements)[0]), decisions


@dataclass(frozen=True)
class _Trial:
    """A place and its alternatives.

    Args:
        program: the one that holds the place.
        separate: its operators as a program.
        signature: equal for places that take equally long.
        parts: those that it consists of where it is left separate, each with alternatives of its own.
    """

    program: Program
    place: Place
    separate: Program
    signature: str
    parts: tuple[_Trial, ...]

    @property
    def calls(self) -> dict[str, Call]:
        """The kernel by the name of its tile."""
        return self._kernels[0]

    @property
    def derived(self) -> tuple[Derived, ...]:
        """The weights that were laid out for it."""
        return self._kernels[1]

    @cached_property
    def _kernels(self) -> tuple[dict[str, Call], tuple[Derived, ...]]:
        """Both, made when one is asked for: few places need them, and weights take long to lay out."""
        kernels, derived = _calls(self.program, self.place, num_cores(self.program.device))
        return {str(call.function.tile): call for call in kernels}, derived  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Times:
    """Milliseconds of a place by alternative, why an alternative has none, and the one that the pass takes by its rule."""

    by_name: dict[str, float | None]
    reasons: dict[str, str]
    own: str


def _trial(program: Program, place: Place, examples: Examples) -> _Trial:
    separate = part(program, place.operators, examples_of=examples)
    signature = signature_of(separate, place)
    parts = tuple(_trial(program, each, examples) for each in parts_of(program, place))
    return _Trial(program, place, separate, signature, parts)


def _decide(program: Program, trial: _Trial, context: Context, measured: dict[tuple[str, bool], _Times]) -> Decision:
    place, times = trial.place, _times(program, trial, context, measured)
    weights = [shape_of(conv.weight) for conv in (place.depthwise, place.conv) if conv]
    words = f"{shape_of(program.value(place.x))}, weight {' and '.join(weights)}"
    pattern = f"{words}: {name_operators(program, place.operators)}"
    return context.decide(KIND, pattern, place.operators, trial.signature, times.by_name, times.reasons, times.own)


def _times(program: Program, trial: _Trial, context: Context, measured: dict[tuple[str, bool], _Times]) -> _Times:
    """What is `measured` of equal places, which it adds to. A place of parts takes as long as these, each at its fastest."""
    key = trial.signature, trial.place.is_part
    if key not in measured:
        if trial.parts:
            parts = [_times(program, each, context, measured) for each in trial.parts]
            separate = sum(times.by_name[times.own] or 0.0 for times in parts)
        else:
            separate = context.cost(context.later(trial.separate))
        by_name, reasons = milliseconds_of(program, trial.calls, context)
        by_name = {SEPARATE: separate, **by_name}
        is_kernel_saved = len(trial.place.operators) > 1 or trial.place.is_part
        measured[key] = _Times(by_name, reasons, _own_choice(by_name, is_kernel_saved))
    return measured[key]


def _own_choice(times: dict[str, float | None], is_kernel_saved: bool) -> str:
    """The alternative that the pass takes by its own rule."""
    measured = {name: t for name, t in times.items() if t is not None}
    best = fastest(measured)
    return best if is_kernel_saved or measured[best] < WORTH * measured[SEPARATE] else SEPARATE


def _calls(program: Program, place: Place, cores: int) -> tuple[list[Call], tuple[Derived, ...]]:
    """The kernel with each tile worth a trial, and the weights that were laid out for it."""
    produces = program.calls[place.operators[-1]].produces
    is_contiguous = produces.is_contiguous()
    if not is_contiguous and not produces.is_contiguous(memory_format=torch.channels_last):
        return [], ()
    is_fp32 = place.conv.weight.dtype is torch.float32
    precision = "tf32" if not is_fp32 or torch.backends.cudnn.allow_tf32 else "ieee"
    if place.depthwise is not None:
        return _separable_calls(program, place, place.depthwise, produces, precision, cores)
    if place.conv.groups > 1:
        return _depthwise_calls(place, produces)
    return _dense_calls(program, place, produces, precision, cores)


def _separable_calls(
    program: Program, place: Place, depthwise: Convolution, produces: Tensor, precision: str, cores: int
) -> tuple[list[Call], tuple[Derived, ...]]:
    from systems.kernels.separable import Separable, tiles  # imports Triton

    weight = place.conv.weight
    numbers = _numbers(depthwise)
    taps = Derived.of(_taps, depthwise.weight)
    arguments = place.x, taps.tensor, depthwise.bias, weight, place.conv.bias, place.addend
    acts = place.before, place.between, place.after
    num_pixels, num_taps = produces.numel() // produces.shape[1], depthwise.weight[0, 0].numel()
    calls = []
    for tile in tiles(weight.shape[1], weight.shape[0], num_taps, num_pixels, cores):
        kernel = Separable(*numbers, *acts, precision, not produces.is_contiguous(), tile)
        calls.append(Call(kernel, (*arguments, tickets(program, tile, num_pixels, produces.shape[1])), {}, produces))
    return calls, (taps,)


def _depthwise_calls(place: Place, produces: Tensor) -> tuple[list[Call], tuple[Derived, ...]]:
    from systems.kernels.depthwise import Depthwise, tiles  # imports Triton

    taps = Derived.of(_channels_apart, place.conv.weight)
    calls = []
    numbers = kernel_size, stride, _, dilation = _numbers(place.conv)
    for tile in tiles(produces.shape[1], kernel_size, stride, dilation):
        kernel = Depthwise(*numbers, place.before, place.after, not produces.is_contiguous(), tile)
        calls.append(Call(kernel, (place.x, taps.tensor, place.conv.bias), {}, produces))
    return calls, (taps,)


def _dense_calls(
    program: Program, place: Place, produces: Tensor, precision: str, cores: int
) -> tuple[list[Call], tuple[Derived, ...]]:
    from systems.kernels.dense import Dense, tiles  # imports Triton

    conv = place.conv
    is_rounded = precision == "tf32" and conv.weight.dtype is torch.float32
    rows = Derived.of(_rounded_rows if is_rounded else _rows, conv.weight)
    num_pixels = produces.numel() // produces.shape[1]
    calls = []
    for tile in tiles(num_pixels, produces.shape[1], conv.weight.shape[1], conv.weight[0, 0].numel(), cores):
        kernel = Dense(*_numbers(conv), place.before, place.after, precision, not produces.is_contiguous(), tile)
        own_tickets = tickets(program, tile, num_pixels, produces.shape[1])
        calls.append(Call(kernel, (place.x, rows.tensor, conv.bias, place.addend, own_tickets), {}, produces))
    return calls, (rows,)


def _numbers(conv: Convolution) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]]:
    return _pair(conv.weight.shape[2:]), _pair(conv.stride), _pair(conv.padding), _pair(conv.dilation)


def _taps(weight: Tensor) -> Tensor:
    """The weight of a depthwise convolution, [C, 1, height, width], as [height * width, C]."""
    return weight.flatten(1).t().contiguous()


def _channels_apart(weight: Tensor) -> Tensor:
    """The weight of a depthwise convolution, [C, 1, height, width], as [C, height * width], with strides (1, C)."""
    return _taps(weight).t()


def _rows(weight: Tensor) -> Tensor:
    """The weight of a convolution, [K, C, height, width], as [K, height * width * C]."""
    return weight.permute(0, 2, 3, 1).flatten(1).contiguous()


def _rounded_rows(weight: Tensor) -> Tensor:
    """`_rows`, each number rounded to the nearest that TF32 holds."""
    return nearest_tf32(_rows(weight))


def _pair(sizes: Sequence[int]) -> tuple[int, int]:
    height, width = sizes
    return int(height), int(width)
