"""Selects for what orders few numbers, as a router of experts does, the library's kernels or one of our own."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from systems.scheduling.decision import Decision
from systems.scheduling.graph.part import UNINITIALIZED, part
from systems.scheduling.graph.patterns import is_cast, only_user, users
from systems.scheduling.graph.program import Call, Input, Output, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Rewritten
from .own_kernels import DTYPES, SEPARATE, has_kernels, milliseconds_of, target_of
from .patterns import name_operators, shape_of

aten = torch.ops.aten
OWN = "own kernel"
INTEGERS = (torch.int32, torch.int64)
# What arguments behind the first two, or the first one, are where a call leaves them out.
TOPK: tuple[Any, ...] = (-1, True, True)
HISTC: tuple[Any, ...] = (100, 0, 0)


@dataclass(frozen=True)
class SortPlace:
    """Operators that one kernel of our own stands for.

    Args:
        operators: of it, in the order of capture.
        main: the one of them whose name it takes.
        x: a reference to what they read.
        call: of the kernel.
        results: for those that others read, the output of the kernel; None for the same one.
    """

    operators: tuple[int, ...]
    main: int
    x: Any
    call: Call
    results: dict[int, int | None]


def select_sorts(program: Program, context: Context) -> Rewritten:
    """Give what orders few numbers the kernels that are faster (in none of the papers), of:
        - separate: the operators as captured, and what stands around them as the later passes leave it.
        - own kernel: one of `systems.kernels.ordering`.

    They are: the largest of each row; a sort of integers, with its inverse where that is scattered; and where the groups of
    such integers end, as the running sum of their counts.

    Invariant: equal places are measured once and treated alike.
    """
    if not has_kernels(program.device):
        return program, []
    readers = users(program)
    measured: dict[str, tuple[dict[str, float | None], dict[str, str]]] = {}
    replacements: list[Replacement] = []
    decisions: list[Decision] = []
    for place in _places(program, readers):
        separate = part(program, place.operators)
        signature = "; ".join(separate.signature(i) for i in range(len(place.operators)))
        if signature not in measured:
            by_own, reasons = milliseconds_of(program, {OWN: place.call}, context)
            measured[signature] = {SEPARATE: context.cost(context.later(separate)), **by_own}, reasons
        times, reasons = measured[signature]
        pattern = f"{name_operators(program, place.operators)} of {shape_of(program.value(place.x))}"
        decisions.append(context.decide("select_sorts", pattern, place.operators, signature, times, reasons))
        if decisions[-1].chosen == OWN:
            name = program.graph.operators[place.main].name
            replacements.append(Replacement(place.operators, name, target_of(place.call), place.call, place.results))
    return replace(program, replacements)[0], decisions


def _places(program: Program, readers: list[list[int]]) -> Iterator[SortPlace]:
    for v, call in enumerate(program.calls):
        if call.function is aten.topk.default:
            place = _top(program, v)
        elif call.function is aten.sort.default:
            place = _sort(program, readers, v)
        elif call.function is aten.cumsum.default:
            place = _ends(program, readers, v)
        else:
            continue
        if place is not None:
            yield place


def _top(program: Program, v: int) -> SortPlace | None:
    from systems.kernels.ordering import MOST_COLUMNS, MOST_COUNT, Top  # imports Triton

    call = program.calls[v]
    x, count, dim, is_largest, _ = (*call.args, *TOPK[len(call.args) - 2 :])
    value = program.value(x)
    if call.kwargs or not is_largest or not isinstance(x, Output | Input) or not 0 < count <= MOST_COUNT:
        return None
    is_taken = value.dim() > 0 and dim in (-1, value.dim() - 1) and value.is_contiguous() and value.dtype in DTYPES
    if not is_taken or not 0 < value.shape[-1] <= MOST_COLUMNS or not 0 < value.numel() < 2**31:
        return None
    return SortPlace((v,), v, x, Call(Top(int(count)), (x,), {}, call.produces), {v: None})


def _sort(program: Program, readers: list[list[int]], v: int) -> SortPlace | None:
    """A sort, and the scattering of 0, 1, ... to the places that it returns, which is its inverse."""
    from systems.kernels.ordering import MOST_SORTED, Sort  # imports Triton

    call = program.calls[v]
    x, *options = call.args
    if call.kwargs or options not in ([], [-1], [0], [-1, False], [0, False]) or not isinstance(x, Output | Input):
        return None
    if not _is_line(program.value(x)) or len(program.value(x)) > MOST_SORTED:
        return None
    scattering = next((u for u in readers[v] if u >= 0 and _scatters(program, u, Output(v, 1))), None)
    if scattering is None:
        return SortPlace((v,), v, x, Call(Sort(is_inverted=False), (x,), {}, call.produces), {v: None})
    memory, _, numbers = program.calls[scattering].args
    beside = [a.operator for a in (memory, numbers) if isinstance(a, Output)]
    operators = sorted({v, scattering, *(u for u in beside if only_user(readers[u]) == scattering)})
    produces = (*call.produces, program.calls[scattering].produces)
    results = {v: None, scattering: len(call.produces)}
    return SortPlace(tuple(operators), v, x, Call(Sort(is_inverted=True), (x,), {}, produces), results)


def _scatters(program: Program, u: int, places: Output) -> bool:
    """Does it write 0, 1, ... to these places of memory that holds nothing yet?"""
    call = program.calls[u]
    if call.function is not aten.index_put.default or call.kwargs or len(call.args) != 3 or list(call.args[1]) != [places]:
        return False
    memory, _, numbers = call.args
    is_empty = isinstance(memory, Output) and program.calls[memory.operator].function in UNINITIALIZED
    return is_empty and _is_line(call.produces) and call.produces.dtype is torch.int64 and _counts(program, numbers, call)


def _counts(program: Program, numbers: Any, call: Call) -> bool:
    """Are they 0, 1, ..., as many as the call returns, and stay so? A tensor of the module's own may be written."""
    size = len(call.produces)
    if isinstance(numbers, Tensor):
        is_constant = any(d.tensor is numbers and not d.sources for d in program.derived.derived)
        return is_constant and tuple(numbers.shape) == (size,) and numbers.tolist() == list(range(size))
    made = program.calls[numbers.operator] if isinstance(numbers, Output) else None
    return made is not None and made.function is aten.arange.default and made.args == (size,)


def _ends(program: Program, readers: list[list[int]], v: int) -> SortPlace | None:
    """The running sum of the counts of integers, each in a bin of its own."""
    from systems.kernels.ordering import GroupEnds  # imports Triton

    call = program.calls[v]
    counts = call.args[0]
    if call.args[1:] not in ((0,), (-1,)) or call.kwargs != {"dtype": torch.int32} or not isinstance(counts, Output):
        return None
    binning = program.calls[counts.operator]
    if binning.function is not aten.histc.default or binning.kwargs or only_user(readers[counts.operator]) != v:
        return None
    x, bins, first, last = (*binning.args, *HISTC[len(binning.args) - 1 :])
    if (first, last) != (0, bins - 1) or bins < 2 or not isinstance(x, Output | Input):
        return None
    operators = [counts.operator, v]
    if isinstance(x, Output) and is_cast(program.calls[x.operator]):
        copied, kept = program.calls[x.operator].args[0], program.value(x).dtype in (*INTEGERS, torch.float32, torch.float64)
        if kept and isinstance(copied, Output | Input) and _is_line(program.value(copied)):
            if only_user(readers[x.operator]) == counts.operator:
                operators.insert(0, x.operator)
            x = copied
    if not _is_line(program.value(x)):
        return None
    return SortPlace(tuple(operators), v, x, Call(GroupEnds(bins), (x,), {}, call.produces), {v: None})


def _is_line(tensor: Any) -> bool:
    """Is it a row of integers beside each other?"""
    is_row = isinstance(tensor, Tensor) and tensor.dim() == 1 and tensor.dtype in INTEGERS
    return is_row and tensor.is_contiguous() and 0 < tensor.numel() < 2**31
