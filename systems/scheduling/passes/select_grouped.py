"""Selects for each grouped product, a layer of experts, the fastest kernel: the library's or one of our own."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conf.text import first_line
from systems.base import Unsupported
from systems.scheduling.decision import Decision
from systems.scheduling.graph.part import part
from systems.scheduling.graph.patterns import GROUPED, only_user, users
from systems.scheduling.graph.program import Call, Output, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Rewritten, fastest
from .own_kernels import DTYPES, activation, by_signature, compile_unmeasured, has_kernels, milliseconds_of, target_of
from .patterns import SPLITS, name_operators, shape_of

aten = torch.ops.aten
LIBRARY = "library"
MIN_GAIN = 1.03  # less may be scatter
NAME = "_grouped_mm"  # of the operator, by which its work is counted


@dataclass(frozen=True)
class GroupedPlace:
    """A grouped product, what fetches its rows and what gates its outputs.

    Args:
        operators: of all that, in the order of capture.
        product: the one of them that is the product.
        x, weight, ends: references to what it reads, or tensors.
        rows: the numbers of the rows of x; None for all in their order.
        gate: the activation of one half, by the name that kernels have for it; "" where nothing is gated.
    """

    operators: tuple[int, ...]
    product: int
    x: Any
    weight: Any
    ends: Any
    rows: Any
    gate: str


def select_grouped(program: Program, context: Context) -> Rewritten:
    """Give each grouped product the kernel that is the fastest (in none of the papers), of:
        - library: the operators as captured, what stands around the product as the later passes leave it.
        - a kernel of `systems.kernels` by the name of its tile, which fetches rows and gates by itself.

    Invariants:
        - Equal places are measured once, alone, with groups of equal length, and treated alike.
        - The captured form stays unless a kernel of our own is `MIN_GAIN` times as fast.
    """
    if not has_kernels(program.device):
        return program, []
    readers = users(program)
    places = [place for v in range(len(program.graph)) if (place := _place(program, readers, v)) is not None]
    equal_by_signature = by_signature(program, places)
    own_by_signature = {signature: _own(program, equal[0]) for signature, equal in equal_by_signature.items()}
    compile_unmeasured(program, (call for own in own_by_signature.values() for call in own.values()), context)
    replacements: list[Replacement] = []
    decisions: list[Decision] = []
    for signature, equal in equal_by_signature.items():
        by_own, reasons = milliseconds_of(program, own_by_signature[signature], context)
        times: dict[str, float | None] = {LIBRARY: None, **by_own}
        try:
            times[LIBRARY] = context.cost(context.later(part(program, equal[0].operators)))
        except Unsupported as error:  # no CUDA Graph holds PyTorch's of fp16, which waits for the lengths of groups
            reasons[LIBRARY] = first_line(error)
        known = {name: t for name, t in times.items() if t is not None}
        if not known:
            continue
        best = fastest(known)
        chosen = best if LIBRARY not in known or known[LIBRARY] >= MIN_GAIN * known[best] else LIBRARY
        for each in equal:
            value = shape_of(program.value(each.x))
            pattern = f"{name_operators(program, each.operators)} of {value}, weight {shape_of(program.value(each.weight))}"
            decided = context.decide("select_grouped", pattern, each.operators, signature, times, reasons, chosen)
            decisions.append(decided)
            if decided.chosen != LIBRARY:
                call = _own(program, each)[decided.chosen]
                replacements.append(Replacement(each.operators, NAME, target_of(call), call, {each.operators[-1]: None}))
    return replace(program, replacements)[0], decisions


def _place(program: Program, readers: list[list[int]], v: int) -> GroupedPlace | None:
    """The place around operator v; None where it is no grouped product that kernels take."""
    call = program.calls[v]
    if call.function is not GROUPED or call.kwargs or len(call.args) != 3:
        return None
    x, weight, ends = call.args
    operators, rows = [v], None
    if isinstance(x, Output) and only_user(readers[x.operator]) == v and _is_fetching(program, x.operator):
        operators.insert(0, x.operator)
        x, (rows,) = program.calls[x.operator].args
    gating = _gating(program, readers, v)
    gate = (activation(program, gating[1]) or "") if gating else ""
    values = [program.value(a) for a in (x, weight)]
    is_taken = all(isinstance(t, Tensor) and _is_small(t) and t.dtype in DTYPES for t in (*values, call.produces))
    if not is_taken or values[0].dim() != 2 or values[0].stride(1) != 1 or values[1].dim() != 3:
        return None
    last = (*operators, *gating)[-1]
    if not program.calls[last].produces.is_contiguous() or not program.value(ends).is_contiguous():
        return None
    return GroupedPlace((*operators, *gating), v, x, weight, ends, rows, gate)


def _is_small(tensor: Tensor) -> bool:
    """Has it places, which 32 bits number?"""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > 0 and last < 2**31


def _is_fetching(program: Program, v: int) -> bool:
    """Does it take rows of a matrix by their numbers?"""
    call = program.calls[v]
    if call.function is not aten.index.Tensor or call.kwargs or len(call.args[1]) != 1:
        return False
    x, rows = program.value(call.args[0]), program.value(call.args[1][0])
    is_number = rows.dtype in (torch.int32, torch.int64) and rows.dim() == 1 and rows.is_contiguous()
    return bool(x.dim() == 2 and x.stride(1) == 1 and is_number)


def _gating(program: Program, readers: list[list[int]], v: int) -> tuple[int, ...]:
    """What alone reads the product: its halves, the activation of the first, their product; nothing where others do."""
    halves = only_user(readers[v])
    if halves is None:
        return ()
    call, columns = program.calls[halves], program.calls[v].produces.shape[1]
    if call.function not in SPLITS or call.kwargs or len(call.args) != 3 or call.args[2] not in (-1, 1):
        return ()
    if columns % 2 or call.args[1] not in (columns // 2, [columns // 2] * 2):
        return ()
    first, second = Output(halves, 0), Output(halves, 1)
    acts = [u for u in readers[halves] if u >= 0 and activation(program, u) and program.calls[u].args == (first,)]
    last = only_user(readers[acts[0]]) if len(acts) == 1 else None
    if last is None or sorted(readers[halves]) != sorted([acts[0], last]):
        return ()
    product = program.calls[last]
    is_product = product.function is aten.mul.Tensor and not product.kwargs
    return (halves, acts[0], last) if is_product and set(product.args) == {Output(acts[0]), second} else ()


def _own(program: Program, place: GroupedPlace) -> dict[str, Call]:
    """The kernels of our own for a place, by the names of their tiles."""
    from systems.kernels.dense import THRICE  # imports Triton
    from systems.kernels.grouped import Grouped, tiles_of

    produces = program.calls[place.operators[-1]].produces
    groups, features, _ = program.value(place.weight).shape
    is_exact = produces.dtype is torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    tiles = tiles_of(produces.shape[0], groups, produces.shape[1], features)
    kernels = [Grouped(place.gate, THRICE if is_exact else "tf32", tile) for tile in tiles]
    return {str(k.tile): Call(k, (place.x, place.weight, place.ends, place.rows), {}, produces) for k in kernels}
