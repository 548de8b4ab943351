"""Groups of operators that one kernel may compute without taking parallelism from the scheduler."""

from collections.abc import Callable, Sequence

from torch import Tensor

from systems.scheduling.graph.fused_kernel import MAX_INPUTS, inputs_of
from systems.scheduling.graph.patterns import CONVOLUTIONS
from systems.scheduling.graph.program import Output, Program


def groups(
    program: Program,
    readers: list[list[int]],
    is_member: Callable[[int], bool],
    is_free: Callable[[int], bool],
    is_small: Callable[[list[int]], bool] | None = None,
) -> list[list[int]]:
    """Groups of operators, each in the order of capture, of which others read the last member alone. It is no free one.

    Args:
        readers: for each operator those that read it.
        is_member: may it be in a group?
        is_free: the same of one that no kernel computes.
        is_small: may these be one group? By default those that read no more than MAX_INPUTS.
    """
    is_small = is_small or (lambda members: len(inputs_of(program, members)) <= MAX_INPUTS)
    group_by_last: dict[int, list[int]] = {}
    for v in range(len(program.graph)):
        if not is_free(v) and not is_member(v):
            continue
        members, refused = [v], set[int]()
        # A group joins as a whole, at its last operator: only that one is read by what follows.
        while producers := _read_within(program, readers, members) & group_by_last.keys() - refused:
            joined = sorted([*group_by_last[u := max(producers)], *members])
            if is_small(joined):
                members = joined
                del group_by_last[u]
            else:
                refused.add(u)
        if not is_free(v) or len(members) > 1:
            group_by_last[v] = members
    return [_without_trailing(members, is_free) for members in group_by_last.values()]


def _read_within(program: Program, readers: list[list[int]], members: Sequence[int]) -> set[int]:
    """The operators that compute arguments of the members, and that the members alone read."""
    own = set(members)
    return {u for v in members for u in program.graph.predecessors[v] if u not in own and own.issuperset(readers[u])}


def _without_trailing(members: list[int], is_free: Callable[[int], bool]) -> list[int]:
    return _without_trailing(members[:-1], is_free) if members and is_free(members[-1]) else members


def convolutions_before(program: Program, readers: list[list[int]], members: Sequence[int]) -> list[int]:
    """Convolutions with a bias that only this group reads."""
    convolutions = []
    for argument in inputs_of(program, members):
        if isinstance(argument, Output) and set(readers[argument.operator]) <= set(members):
            call = program.calls[argument.operator]
            if call.function in CONVOLUTIONS and len(call.args) > 2 and isinstance(call.args[2], Tensor):
                convolutions.append(argument.operator)
    return convolutions
