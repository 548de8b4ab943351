"""What a program's outputs are in higher precision, and how far from that an execution of it may be."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from systems.arithmetic import disturb, epsilon, without_tf32
from systems.scheduling.graph.program import Program
from systems.tolerance import FLOOR, MULTIPLE, OUTCOMES, Distance, Span, distance, is_whole, jump

WIDE = {torch.complex64: torch.complex128}  # other floating-point types become float64
# A kernel of another type may lay its output out in another way, as attention does.
OF_ANY_STRIDES: dict[Any, Any] = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}


class Reference:
    """The program in fp64. An execution may be a multiple as far from it as the program is as it was captured.

    The multiple and the measure are those by which a cell is judged (`runners.measurements.correctness`), and so is what
    follows where a model chooses: it is held to what the program's outcomes span.

    Args:
        captured: the program before any pass.

    Raises:
        Exception: what PyTorch raises where there is no memory for fp64, or no kernel.
    """

    def __init__(self, captured: Program):
        self.captured, self.precision = captured, precision_of(captured)
        with captured.undone():
            self.own = tensors(captured.run(captured.examples))
        self.outputs, self.disturbed = wide_outputs(captured), wide_outputs(captured, self.precision)
        cases = zip(self.own, self.disturbed, self.outputs, strict=True)
        self.eager = [_distance(own, reference).or_more(_distance(moved, reference)) for own, moved, reference in cases]
        multiple = MULTIPLE[self.precision]
        self.tolerances = [_tolerance(multiple, own, error) for own, error in zip(self.own, self.eager, strict=True)]
        # What is no number, such as a masked logit, has to be the same where eager's is.
        self._fixed = [
            ~torch.isfinite(wide) & _is_same(own, wide) if wide.is_floating_point() else None
            for own, wide in zip(self.own, self.outputs, strict=True)
        ]

    def excess(self, outputs: Sequence[Tensor]) -> float:
        """The largest error over its tolerance: up to 1 is precise enough. Infinite where there should be a number."""
        share = self._share(outputs)
        if share <= 1 or not any(self._spans):
            return share
        pairs = zip(outputs, self.outputs, self._spans, strict=True)
        return self._share([span.held(out, reference) if span else out for out, reference, span in pairs])

    def _share(self, outputs: Sequence[Tensor]) -> float:
        share = 0.0
        for out, wide, most, fixed in zip(outputs, self.outputs, self.tolerances, self._fixed, strict=True):
            if fixed is not None and bool((fixed & ~_is_same(out, wide)).any()):
                return inf
            share = max(share, _excess(_distance(out, wide), most))
        return share

    @cached_property
    def _spans(self) -> list[Span | None]:
        """Of each output what its outcomes span; None where it does not depend on a choice."""
        others = [
            self.own,
            self.disturbed,
            *(rounded_outputs(self.captured, self.precision, seed) for seed in range(OUTCOMES)),
        ]
        spans: list[Span | None] = []
        for i, (reference, eager, most) in enumerate(zip(self.outputs, self.eager, self.tolerances, strict=True)):
            are_numbers = reference.is_floating_point() and bool(torch.isfinite(reference).all())
            span = Span(reference) if are_numbers else None
            if span is not None:
                for outcome in others:
                    span.widen(outcome[i])
                if not span.num_beyond(jump(eager.element, most.element, reference)):
                    span = None
            spans.append(span)
        return spans


def _distance(out: Tensor, wide: Tensor) -> Distance:
    """Between those elements that are numbers in the reference."""
    is_finite = torch.isfinite(wide)
    if bool(is_finite.all()):
        return distance(out, wide)
    return distance(torch.where(is_finite, out, 0), torch.where(is_finite, wide, 0))


def _is_same(out: Tensor, wide: Tensor) -> Tensor:
    """By element: are both the same, or neither of them a number?"""
    return (out == wide) | (torch.isnan(out) & torch.isnan(wide))


def precision_of(program: Program) -> str:
    """The precision of a program's arithmetic, a key of MULTIPLE."""
    leaves = [leaf for call in program.calls for leaf in call.leaves()]
    dtypes = {t.dtype for t in (*program.examples, *leaves) if isinstance(t, Tensor)}
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        if dtype in dtypes:
            return name
    is_rounded = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return "tf32" if program.device.type == "cuda" and is_rounded else "fp32"


def wide_outputs(program: Program, disturbed_as: str | None = None) -> list[Tensor]:
    """A program's outputs with floating-point tensors in fp64, and no other conversions within it.

    Args:
        disturbed_as: a precision; weights and inputs are then half a unit of its rounding away, as eager's may be.
    """

    def wide(tensor: Tensor, number: int) -> Tensor:
        copied = tensor.detach().to(_wide_dtype(tensor.dtype), copy=True)
        if disturbed_as is not None:
            disturb(copied, number, epsilon(tensor, disturbed_as) / 2)
        return copied

    with without_tf32():
        return _outputs_with(program, wide, _wide_dtype)


def rounded_outputs(program: Program, precision: str, seed: int) -> list[Tensor]:
    """A program's outputs with its weights half a unit of rounding away, each seed another way."""
    inputs = {id(x) for x in program.examples}

    def moved(tensor: Tensor, number: int) -> Tensor:
        if id(tensor) in inputs:
            return tensor
        copied = tensor.detach().clone()
        disturb(copied, OUTCOMES * number + seed, epsilon(tensor, precision) / 2)
        return copied

    return _outputs_with(program, moved)


@torch.no_grad()
def _outputs_with(
    program: Program,
    tensor_of: Callable[[Tensor, int], Tensor],
    dtype_of: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
) -> list[Tensor]:
    """A program's outputs with another tensor in the place of each that is not of whole numbers.

    A tensor is made where an operator reads it, and again for the next: a large model's in fp64 would not fit beside it. One
    that the program writes is made once, and the program's own stays as it is.

    Args:
        tensor_of: makes it of the program's, and of how many were met before it.
        dtype_of: the type in the place of one that the program converts to.
    """
    numbers_by_id: dict[int, int] = {}
    written: dict[int, Tensor | None] = {id(tensor): None for tensor in program.changed}

    def made(leaf: Tensor) -> Tensor:
        if is_whole(leaf):
            return leaf.clone() if id(leaf) in written else leaf
        return tensor_of(leaf, numbers_by_id.setdefault(id(leaf), len(numbers_by_id)))

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, torch.dtype):
            return dtype_of(leaf)
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in written:
            return made(leaf)
        if (own := written[id(leaf)]) is None:
            own = written[id(leaf)] = made(leaf)
        return own

    inputs = [changed(x) for x in program.examples]
    values: list[Any] = [None] * len(program.graph)
    for v, (call, last) in enumerate(zip(program.calls, program.last_consumers(), strict=True)):
        function = OF_ANY_STRIDES.get(call.function, call.function)
        values[v] = replace(call.map(changed), function=function).launch(values, inputs)
        for u in last:
            values[u] = None
    return tensors(program.returns.map(changed).launch(values, inputs))


def tensors(outputs: object) -> list[Tensor]:
    return [t for t in tree_leaves(outputs) if isinstance(t, Tensor)]


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return WIDE.get(dtype, torch.float64 if dtype.is_floating_point else dtype)


def _tolerance(multiple: float, own: Tensor, eager: Distance) -> Distance:
    least = 0.0 if is_whole(own) else FLOOR * torch.finfo(own.dtype).eps
    return Distance(*(max(least, multiple * error) for error in eager))


def _excess(error: Distance, tolerance: Distance) -> float:
    """Of a whole number no error is allowed, where eager has none."""
    shares = [e / t if t else float("inf") if e else 0.0 for e, t in zip(error, tolerance, strict=True)]
    return max(share if share == share else float("inf") for share in shares)
