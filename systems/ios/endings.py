"""The states of a block's dynamic programme, and the endings of each (IOS, Section 4.1)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_TRANSITIONS = 16_000_000  # some 30 bytes each while they are being enumerated
WORD = 62  # operators that a signed machine word has bits for, with room to spare

Array = NDArray[Any]


class TooManyTransitions(ValueError):
    """The block is too wide to be searched within memory."""


@dataclass(frozen=True)
class Endings:
    """The states of a block and the transitions between them; every set of operators is a bit mask.

    Args:
        states: each set of operators that holds all that its members depend on, by size, the empty one first.
        levels: the place of the first state of each size, and the number of states.
        endings: each distinct ending of any state.
        groups: of each ending.
        first: the transitions of state i are the slice first[i]:first[i + 1] of `ending` and `rest`.
        ending: of each transition, a place in `endings`.
        rest: of each transition, the place of the state that remains.
        schedules: number of schedules of the whole block.
    """

    states: Array
    levels: tuple[int, ...]
    endings: Array
    groups: tuple[tuple[int, ...], ...]
    first: Array
    ending: Array
    rest: Array
    schedules: int


@lru_cache(maxsize=32)  # cells are repeated with other shapes, whose costs differ and whose endings do not
def enumerate_endings(
    predecessors: tuple[tuple[int, ...], ...], r: int | None, s: int | None, max_transitions: int = MAX_TRANSITIONS
) -> Endings:
    """Every ending of every state of a block.

    Invariant: each ending of a state is generated once, from the endings of the state without its last operator v. An
    ending without v holds no predecessor of v. An ending with v is v's group beside an ending without v that shares no
    operator with that group. No edge can lead from the one to the other, since an ending holds all that the state has after
    its operators. Without a limit on groups it is v beside any ending of the smaller state.

    Args:
        predecessors: of each operator within the block; topological.
        r: most operators of a group; None for no limit.
        s: most groups of an ending; None for no limit.
        max_transitions: pairs of a state and an ending.

    Raises:
        TooManyTransitions: there are more.
    """
    n = len(predecessors)
    kind: Any = np.int64 if n <= WORD else object
    before = [sum(1 << u for u in set(p)) for p in predecessors]
    candidates = None if r is None or r >= n else _connected(predecessors, r)
    states, without_last = _states(before, kind)
    endings: list[Array] = [np.zeros(1, kind)]  # of each state, the empty one first
    num_groups: list[Array] = [np.zeros(1, np.uint16)]  # of each ending
    total = 0
    for i in range(1, len(states)):
        state = int(states[i])
        v = state.bit_length() - 1
        smaller, count = endings[without_last[i]], num_groups[without_last[i]]
        is_ending = (smaller & before[v]) == 0
        without_v, without_v_count = smaller[is_ending], count[is_ending]
        if candidates is None:
            with_v, with_v_count = smaller | (1 << v), count
        else:
            groups, after = candidates[v]
            groups = groups[((groups & ~state) == 0) & ((after & state) == 0)]
            is_disjoint = (groups[:, None] & without_v[None, :]) == 0  # [groups of v, endings without v]
            if s is not None:
                is_disjoint &= without_v_count < s
            group, beside = np.nonzero(is_disjoint)
            with_v, with_v_count = groups[group] | without_v[beside], without_v_count[beside] + np.uint16(1)
        endings.append(np.concatenate([without_v, with_v]))
        num_groups.append(np.concatenate([without_v_count, with_v_count]))
        total += len(endings[i]) - 1
        if total > max_transitions:
            raise TooManyTransitions(f"a block of {n} units has more than {max_transitions:,} transitions")
    del num_groups
    size = np.array([int(state).bit_count() for state in states])
    order = np.argsort(size, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    first = np.concatenate([[0], np.cumsum([len(endings[i]) - 1 for i in order])])
    rest = np.concatenate([place[np.searchsorted(states, states[i] ^ endings[i][1:])].astype(np.int32) for i in order])
    distinct, ending = np.unique(np.concatenate([endings[i][1:] for i in order]), return_inverse=True)
    del endings
    groups_of = _components(distinct, _linked(predecessors))
    if candidates is None and s is not None:  # the groups were not counted above
        allowed = np.array([len(g) <= s for g in groups_of])
        fits = allowed[ending]
        first = np.concatenate([[0], np.cumsum(fits)])[first]
        ending, rest = (np.cumsum(allowed) - 1)[ending[fits]], rest[fits]
        distinct, groups_of = distinct[allowed], [g for g in groups_of if len(g) <= s]
    levels = tuple(np.searchsorted(size[order], np.arange(n + 2)).tolist())
    whole = _schedules(first, rest)
    return Endings(states[order], levels, distinct, tuple(groups_of), first, ending.astype(np.int32), rest, whole)


def _schedules(first: Array, rest: Array) -> int:
    """The number of schedules, exactly: there may be more than a machine word or a floating-point number can hold."""
    count = [1]
    remain, bounds = rest.tolist(), first.tolist()
    for start, end in pairwise(bounds[1:]):
        count.append(sum(map(count.__getitem__, remain[start:end])))
    return count[-1]


def _states(before: Sequence[int], kind: Any) -> tuple[Array, Array]:
    """The states, ascending, and for each the place of the one without its last operator."""
    states, without_last = np.zeros(1, kind), np.zeros(1, np.int64)
    for v, needed in enumerate(before):
        extended = np.flatnonzero((states & needed) == needed)
        states = np.concatenate([states, states[extended] | (1 << v)])
        without_last = np.concatenate([without_last, extended])
        if len(states) > MAX_TRANSITIONS:
            raise TooManyTransitions(f"a block of {len(before)} units has more than {MAX_TRANSITIONS:,} states")
    return states, without_last


def _connected(predecessors: Sequence[Sequence[int]], r: int) -> list[tuple[Array, Array]]:
    """For each operator the connected sets of at most r operators that it is the last of, and their direct successors."""
    n = len(predecessors)
    kind: Any = np.int64 if n <= WORD else object
    linked = _linked(predecessors)
    successors = [0] * n
    for v, producers in enumerate(predecessors):
        for u in producers:
            successors[u] |= 1 << v
    connected: set[int] = set()
    layer = {1 << v for v in range(n)}
    for _ in range(r):
        connected |= layer
        layer = {g | 1 << v for g in layer for v in bits(_union(linked, g) & ~g)}
    by_last: list[list[int]] = [[] for _ in range(n)]
    for group in sorted(connected):
        by_last[group.bit_length() - 1].append(group)
    return [(np.array(groups, kind), np.array([_union(successors, g) & ~g for g in groups], kind)) for groups in by_last]


def _linked(predecessors: Sequence[Sequence[int]]) -> list[int]:
    """The direct neighbours of each operator, in both directions."""
    linked = [0] * len(predecessors)
    for v, producers in enumerate(predecessors):
        for u in producers:
            linked[u] |= 1 << v
            linked[v] |= 1 << u
    return linked


def _components(endings: Array, linked: Sequence[int]) -> list[tuple[int, ...]]:
    """The groups of each ending: operators that an edge joins are in the same one (IOS, Section 3)."""
    groups: list[list[int]] = []
    rest = endings  # of each ending, the operators that have no group yet
    while rest.any():
        group = grown = rest & -rest
        while grown.any():  # all endings at once, by an edge a time
            around = np.zeros_like(group)
            for v, neighbours in enumerate(linked):
                around[(grown >> v & 1).astype(bool)] |= neighbours
            grown = around & rest & ~group
            group = group | grown
        groups.append(group.tolist())
        rest = rest & ~group
    return [tuple(g for g in ending if g) for ending in zip(*groups, strict=True)]


def _union(masks: Sequence[int], operators: int) -> int:
    union = 0
    for v in bits(operators):
        union |= masks[v]
    return union


def bits(mask: int) -> Iterator[int]:
    """The operators of a set, ascending."""
    while mask:
        v = mask & -mask
        yield v.bit_length() - 1
        mask ^= v
