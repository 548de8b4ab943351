"""What a program's outputs are in higher precision, and how far from that an execution of it may be."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from systems.arithmetic import disturb, epsilon, without_tf32
from systems.scheduling.graph.program import Program
from systems.tolerance import FLOOR, MULTIPLE, Distance, distance, is_whole

WIDE = {torch.complex64: torch.complex128}  # other floating-point types become float64


class Reference:
    """The program in fp64. An execution may be a multiple as far from it as the program is as it was captured.

    The multiple and the measure are those by which a cell is judged (`runners.measurements.correctness`).

    Args:
        captured: the program before any pass.

    Raises:
        Exception: what PyTorch raises where there is no memory for fp64, or no kernel.
    """

    def __init__(self, captured: Program):
        precision = precision_of(captured)
        own = tensors(captured.run(captured.examples))
        self.outputs, disturbed = _wide_outputs(captured, None), _wide_outputs(captured, precision)
        self.tolerances = [_tolerance(MULTIPLE[precision], *each) for each in zip(own, disturbed, self.outputs, strict=True)]

    def excess(self, outputs: Sequence[Tensor]) -> float:
        """The largest error over its tolerance: up to 1 is precise enough. Infinite where there should be a number."""
        return max(
            (_excess(distance(out, reference), tolerance) for out, reference, tolerance in self._compared(outputs)),
            default=0.0,
        )

    def _compared(self, outputs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Distance]]:
        return [
            each for each in zip(outputs, self.outputs, self.tolerances, strict=True) if bool(torch.isfinite(each[1]).all())
        ]


def precision_of(program: Program) -> str:
    """The precision of a program's arithmetic, a key of MULTIPLE."""
    leaves = [leaf for call in program.calls for leaf in call.leaves()]
    dtypes = {t.dtype for t in (*program.examples, *leaves) if isinstance(t, Tensor)}
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        if dtype in dtypes:
            return name
    is_rounded = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    return "tf32" if program.device.type == "cuda" and is_rounded else "fp32"


def widened(program: Program, disturbed_as: str | None = None) -> Program:
    """The program with floating-point tensors in fp64, and no other conversions within it.

    Args:
        disturbed_as: a precision; weights and inputs are then half a unit of its rounding away, as eager's may be.
    """
    wide_by_id: dict[int, Tensor] = {}

    def wide(leaf: Any) -> Any:
        if isinstance(leaf, torch.dtype):
            return _wide_dtype(leaf)
        if not isinstance(leaf, Tensor) or is_whole(leaf):
            return leaf
        if id(leaf) not in wide_by_id:
            copied = leaf.detach().to(_wide_dtype(leaf.dtype), copy=True)
            if disturbed_as is not None:
                disturb(copied, len(wide_by_id), epsilon(leaf, disturbed_as) / 2)
            wide_by_id[id(leaf)] = copied
        return wide_by_id[id(leaf)]

    calls = [call.map(wide) for call in program.calls]
    outputs, examples = [wide(o) for o in program.outputs], tuple(wide(x) for x in program.examples)
    return Program(program.graph, calls, outputs, program.output_spec, examples)


def _wide_outputs(program: Program, disturbed_as: str | None) -> list[Tensor]:
    with without_tf32():
        wide = widened(program, disturbed_as)
        return tensors(wide.run(wide.examples))


def tensors(outputs: object) -> list[Tensor]:
    return [t for t in tree_leaves(outputs) if isinstance(t, Tensor)]


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return WIDE.get(dtype, torch.float64 if dtype.is_floating_point else dtype)


def _tolerance(multiple: float, own: Tensor, disturbed: Tensor, reference: Tensor) -> Distance:
    eager = distance(own, reference).or_more(distance(disturbed, reference))
    least = 0.0 if is_whole(own) else FLOOR * torch.finfo(own.dtype).eps
    return Distance(*(max(least, multiple * error) for error in eager))


def _excess(error: Distance, tolerance: Distance) -> float:
    """Of a whole number no error is allowed, where eager has none."""
    shares = [e / t if t else float("inf") if e else 0.0 for e, t in zip(error, tolerance, strict=True)]
    return max(share if share == share else float("inf") for share in shares)
