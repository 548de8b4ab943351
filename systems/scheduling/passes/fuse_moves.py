"""Fuses what only moves elements with the elementwise operators around it, where one kernel is faster."""

from math import prod

import torch
from torch import Tensor

from conf.text import first_line
from systems.scheduling.decision import Decision
from systems.scheduling.graph.effects import READERS_OF_MEMORY, is_view
from systems.scheduling.graph.fused_kernel import MAX_INPUTS, fuse, inputs_of
from systems.scheduling.graph.part import part
from systems.scheduling.graph.patterns import is_elementwise, reads_tensors, users
from systems.scheduling.graph.program import Output, Program
from systems.scheduling.graph.rewrite import Replacement, replace

from .context import Context, Rewritten
from .groups import convolutions_before, groups
from .own_kernels import has_kernels
from .patterns import SUMS, name_operators

aten = torch.ops.aten
# Each element of their output is one of an input's, or what pads it.
JOINS = (aten.cat.default, aten.stack.default)
COPIES = (aten.clone.default, aten.repeat.default, aten.roll.default, aten.flip.default, aten.pad.default)
LOOKUPS = (aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default)
MOVES = (*JOINS, *COPIES, *LOOKUPS)
MAX_LOOKUP_INPUTS = 200  # tensors that a fused operator with lookups reads: a kernel's arguments take 4 kB at most
FEW_ADDENDS = 8  # of a sum, up to which TorchInductor adds them one by one: its unroll_reductions_threshold
ONE_KERNEL = {"force_pointwise_cat": True}  # TorchInductor's option: a concatenation of many parts is one kernel too


def fuse_moves(program: Program, context: Context) -> Rewritten:
    """Fuse each concatenation, copy and lookup with the elementwise operators around it, where one kernel for all is faster.

    A rotary embedding is such a group: halves change places, and each is multiplied with a table. Views between members are
    members as well, since TorchInductor computes with places and not with memory. So are sums of a few rows, as of what a
    token's experts return.

    Invariant: of a group only the last operator is read from outside, as of `fuse_elementwise`, which fuses what is
    elementwise where the group stays separate. So fusing takes no parallelism from the scheduler. A kernel may compute
    elements anew for each part of a concatenation: each distinct group is measured both ways, as a whole. A group takes in
    the dozens of lookups that a recommender concatenates, whose kernels are launched for longer than they run.
    """
    if not has_kernels(program.device):
        return program, []
    readers = users(program)
    by_signature: dict[str, tuple[dict[str, float | None], dict[str, str]]] = {}
    replacements: list[Replacement] = []
    decisions: list[Decision] = []

    def is_member(v: int) -> bool:
        return is_elementwise(program, v) or is_move(program, v) or is_sum_of_few(program, v)

    for members in groups(program, readers, is_member, lambda v: is_free(program, v), lambda m: _is_small(program, m)):
        computed = [v for v in members if not is_free(program, v)]
        is_worth_it = len(computed) > 1 and any(is_move(program, v) for v in computed)
        if not is_worth_it or convolutions_before(program, readers, members):  # whose biases fuse_elementwise takes over
            continue
        separate = part(program, members)
        options = ONE_KERNEL if _has_many_lookups(program, members) else {}
        fused = replace(separate, [fuse(separate, range(len(members)), "moves", options=options)])[0]
        signature = fused.signature(0)
        if signature not in by_signature:
            by_signature[signature] = _measured(context, context.later(separate), fused)
        times, reasons = by_signature[signature]
        pattern = name_operators(program, computed)
        decision = context.decide("fuse_moves", pattern, tuple(members), signature, times, reasons)
        decisions.append(decision)
        if decision.chosen == "fused":
            replacements.append(fuse(program, members, "moves", options=options))
    return replace(program, replacements)[0], decisions


def _measured(context: Context, separate: Program, fused: Program) -> tuple[dict[str, float | None], dict[str, str]]:
    separate_ms = context.cost(separate)
    try:
        return {"separate": separate_ms, "fused": context.cost(fused)}, {}
    except Exception as error:  # whatever a compiler raises, or a GPU of a kernel that does not fit
        return {"separate": separate_ms, "fused": None}, {"fused": first_line(error)}


def _is_small(program: Program, members: list[int]) -> bool:
    """Does the group read no more than MAX_INPUTS beside what lookups read and return?"""
    read = inputs_of(program, [v for v in members if program.calls[v].function not in LOOKUPS])
    others = [a for a in read if not (isinstance(a, Output) and program.calls[a.operator].function in LOOKUPS)]
    return len(others) <= MAX_INPUTS and len(inputs_of(program, members)) <= MAX_LOOKUP_INPUTS


def _has_many_lookups(program: Program, members: list[int]) -> bool:
    return sum(program.calls[v].function in LOOKUPS for v in members) > MAX_INPUTS // 2


def is_move(program: Program, v: int) -> bool:
    """Does the operator only move elements?"""
    return program.calls[v].function in MOVES and reads_tensors(program, v)


def is_sum_of_few(program: Program, v: int) -> bool:
    """Does it add up FEW_ADDENDS rows at most? Rows themselves are `fuse_reductions`' to add up."""
    call = program.calls[v]
    if call.function not in SUMS or not reads_tensors(program, v) or len(call.args) < 2 or not call.args[1]:
        return False
    x = program.value(call.args[0])
    dims = {dim % x.dim() for dim in call.args[1]} if x.dim() else set()
    return bool(dims) and x.dim() - 1 not in dims and 0 < prod(x.shape[dim] for dim in dims) <= FEW_ADDENDS


def is_free(program: Program, v: int) -> bool:
    """Is it another view of a tensor, which no kernel computes?"""
    call = program.calls[v]
    is_one = isinstance(call.produces, Tensor) and reads_tensors(program, v)
    return is_one and is_view(call.function) and call.function not in READERS_OF_MEMORY
