"""Fuses sums with the pools that they alone read, where one kernel is faster."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from systems.scheduling.decision import Decision
from systems.scheduling.graph.part import part
from systems.scheduling.graph.patterns import ADDITION, CONCATENATION, only_user, users
from systems.scheduling.graph.program import Call, Input, Output, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Rewritten
from .own_kernels import SEPARATE, activation, has_kernels, is_plain, kernel_alone, target_of
from .patterns import name_operators, shape_of

if TYPE_CHECKING:
    from systems.kernels.pooled import Window

aten = torch.ops.aten
AVERAGE, MAX = aten.avg_pool2d.default, aten.max_pool2d.default
ARGUMENTS = {  # by name, in their order
    AVERAGE: ("x", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
    MAX: ("x", "kernel_size", "stride", "padding", "dilation", "ceil_mode"),
}
FUSED = "one kernel"  # the alternative to pools, a sum and an activation
MOST_TAPS = 25  # of a window: its elements are read one after the other


@dataclass(frozen=True)
class _Sum:
    """A sum of two tensors with pools of its own, or a pool alone.

    Args:
        operators: that one kernel replaces, in the order of capture; the last alone is read from outside.
        call: of the kernel.
    """

    operators: tuple[int, ...]
    call: Call


def fuse_pools(program: Program, context: Context) -> Rewritten:
    """Replace each sum, with the pools that it alone reads and an activation after it, by one kernel of `systems.kernels`,
    where that is faster (in none of the papers); likewise a pool that a concatenation reads, which a kernel of ours can
    write to (`fuse_concatenations`). Cells of NASNet and AmoebaNet add pools up.

    Invariants:
        - Of the operators of a place only the last is read from outside.
        - A pool waits for what is added to it, and else nothing for more than before. So it costs parallelism, as far as one
          addend is there sooner.

    Each distinct place is measured separate, as the passes before and the unmeasured ones leave it, and as one kernel.
    """
    if not has_kernels(program.device):
        return program, []
    readers = users(program)
    times_by_signature: dict[str, dict[str, float]] = {}
    replacements: list[Replacement] = []
    decisions: list[Decision] = []
    for v in range(len(program.graph)):
        one = _place(program, readers, v)
        if one is None:
            continue
        separate = part(program, one.operators)
        signature = "; ".join([*(separate.signature(i) for i in range(len(one.operators))), str(one.call.function)])
        if signature not in times_by_signature:
            fused = kernel_alone(program, one.call, program.device)
            separate_ms = context.cost(context.later(separate))
            times_by_signature[signature] = {SEPARATE: separate_ms, FUSED: context.cost(fused)}
        pattern = f"{name_operators(program, one.operators)}, {shape_of(one.call.produces)}"
        times = times_by_signature[signature]
        decisions.append(context.decide("fuse_pools", pattern, one.operators, signature, times))
        if decisions[-1].chosen == FUSED:
            name = "_".join(program.graph.operators[u].name for u in one.operators)
            replacements.append(Replacement(one.operators, name, target_of(one.call), one.call, {one.operators[-1]: None}))
    return replace(program, replacements)[0], decisions


def _place(program: Program, readers: Sequence[list[int]], v: int) -> _Sum | None:
    """The place of sum or pool v, or None where it is neither or a kernel does not take it."""
    from systems.kernels.pooled import Pooled, Window  # imports Triton

    call = program.calls[v]
    operators: list[int] = []
    terms: list[tuple[Any, Window]] = []
    if call.function is ADDITION and not call.kwargs and len(call.args) == 2:
        for argument in call.args:
            window = _window(program, argument) if _reads_alone(readers, argument, v) else None
            if window is not None:
                operators.append(argument.operator)
                terms.append((program.calls[argument.operator].args[0], window))
            else:
                terms.append((argument, Window()))
        if not operators:
            return None
    else:
        window = _window(program, Output(v))
        is_part = bool(readers[v]) and all(u >= 0 and program.calls[u].function is CONCATENATION for u in readers[v])
        if window is None or not is_part:
            return None
        terms.append((call.args[0], window))
    last, after = v, "none"
    if (reader := only_user(readers[v])) is not None and (name := activation(program, reader)):
        last, after = reader, name
    produces = program.calls[last].produces
    if not isinstance(produces, Tensor) or not is_plain(produces):
        return None
    is_channels_last = not produces.is_contiguous()
    if is_channels_last and not produces.is_contiguous(memory_format=torch.channels_last):
        return None
    for reference, window in terms:
        if not isinstance(reference, Output | Input) or not _fits(program.value(reference), window, produces):
            return None
    (x, first), *others = terms
    y, second = others[0] if others else (None, None)
    height, width = produces.shape[2:]
    kernel = Pooled(first, second, after, height, width, is_channels_last)
    members = tuple(sorted({*operators, v, last}))
    return _Sum(members, Call(kernel, (x, y), {}, produces))


def _reads_alone(readers: Sequence[list[int]], argument: object, v: int) -> bool:
    return isinstance(argument, Output) and argument.index is None and set(readers[argument.operator]) == {v}


def _fits(value: Any, window: "Window", produces: Tensor) -> bool:
    """Does a kernel read such a tensor for such an output? Nothing is broadcast."""
    if not isinstance(value, Tensor) or not is_plain(value) or value.dtype != produces.dtype:
        return False
    return value.shape[:2] == produces.shape[:2] and (window.kind != "same" or value.shape == produces.shape)


def _window(program: Program, reference: Output) -> "Window | None":
    """What the operator reads of its argument, where it is a pool that a kernel takes."""
    from systems.kernels.pooled import Window

    call = program.calls[reference.operator]
    if call.function not in ARGUMENTS or call.kwargs:
        return None
    arguments = dict(zip(ARGUMENTS[call.function], call.args, strict=False))
    kernel = _pair(arguments["kernel_size"])
    sizes = kernel, _pair(arguments.get("stride") or kernel), _pair(arguments.get("padding", 0))
    if arguments.get("divisor_override") is not None or _pair(arguments.get("dilation", 1)) != (1, 1):
        return None
    is_average = call.function is AVERAGE
    window = Window("average" if is_average else "max", *sizes, is_average and arguments.get("count_include_pad", True))
    return window if kernel[0] * kernel[1] <= MOST_TAPS else None


def _pair(size: Any) -> tuple[int, int]:
    """(height, width) of a number for both, or of a list of one or two."""
    sizes = [size] if isinstance(size, int) else [*size]
    return int(sizes[0]), int(sizes[-1])
