"""Groups of elementwise operators, each compiled into one kernel by TorchInductor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from systems.scheduling.graph.program import Call, Output, Program
from systems.scheduling.graph.rewrite import Replacement, replace, users

from .fold_batch_norm import CONVOLUTIONS
from .fused_kernel import MOST_INPUTS, VIEW, inputs_of, reads_tensors, replacement

aten = torch.ops.aten
NO_KERNEL = (aten.clone.default,)  # tagged pointwise, but there to change a layout


def fuse_elementwise(program: Program) -> Program:
    """Join every elementwise operator with those that compute its arguments, perhaps in another shape, and that nothing else
    reads but it and what is joined with it.

    Nothing is lost for the scheduler: an operator with one reader could run beside nothing that its reader does not wait
    for. A batch norm in eval form counts as elementwise. On a GPU so does the bias of a convolution, since PyTorch adds it
    in a kernel of its own. The kernel is made by TorchInductor, once for each distinct group.
    """
    readers = users(program)
    groups = _groups(program, readers)
    replacements = []
    cuda = program.device.type == "cuda"
    for members in groups:
        biased = _convolutions_before(program, readers, members) if cuda else []
        if len(members) + len(biased) < 2:
            continue
        replacements.append(replacement(program, members, "elementwise", biased=biased))
        replacements += [_without_bias(program, u) for u in biased]
    return replace(program, replacements)[0]


def _groups(program: Program, readers: list[list[int]]) -> list[list[int]]:
    """The groups, each in the order of capture: the last one is what others read."""
    group: dict[int, list[int]] = {}  # by the last one
    for v in range(len(program.graph)):
        view = is_view(program, v)
        if not view and not is_elementwise(program, v):
            continue
        members, refused = [v], set[int]()
        while inner := _read_within(program, readers, members) & group.keys() - refused:
            joined = sorted([*group[u := max(inner)], *members])
            if len(inputs_of(program, joined)) <= MOST_INPUTS:
                members = joined
                del group[u]
            else:
                refused.add(u)
        if not view or len(members) > 1:
            group[v] = members
    return [_ending_in_an_operator(program, members) for members in group.values()]


def _read_within(program: Program, readers: list[list[int]], members: Sequence[int]) -> set[int]:
    """What computes arguments of the members, and is read by them alone."""
    own = set(members)
    return {u for v in members for u in program.graph.predecessors[v] if u not in own and own.issuperset(readers[u])}


def _ending_in_an_operator(program: Program, members: list[int]) -> list[int]:
    return _ending_in_an_operator(program, members[:-1]) if is_view(program, members[-1]) else members


def is_view(program: Program, v: int) -> bool:
    """Is it another shape for a contiguous tensor, which no kernel computes?"""
    call = program.calls[v]
    return call.function is VIEW and program.value(call.args[0]).is_contiguous()


def is_elementwise(program: Program, v: int) -> bool:
    """Does the operator compute each element of its one output from those that stand at the same place?"""
    function = program.calls[v].function
    if function is aten.batch_norm.default:
        return True
    tags = getattr(function, "tags", ())
    return (
        torch.Tag.pointwise in tags
        and torch.Tag.nondeterministic_seeded not in tags
        and function not in NO_KERNEL
        and isinstance(program.calls[v].produces, Tensor)
        and reads_tensors(program, v)
    )


def _convolutions_before(program: Program, readers: list[list[int]], members: Sequence[int]) -> list[int]:
    """Convolutions with a bias that only this group reads."""
    found = []
    for argument in inputs_of(program, members):
        if isinstance(argument, Output) and set(readers[argument.operator]) <= set(members):
            call = program.calls[argument.operator]
            if call.function in CONVOLUTIONS and len(call.args) > 2 and isinstance(call.args[2], Tensor):
                found.append(argument.operator)
    return found


def _without_bias(program: Program, u: int) -> Replacement:
    operator, call = program.graph.operators[u], program.calls[u]
    new = Call(call.function, (*call.args[:2], None, *call.args[3:]), call.kwargs, call.produces)
    return Replacement((u,), operator.name, operator.target, new, {u: None})
