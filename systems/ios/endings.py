"""All that a block's dynamic programme goes through: its states, and the endings of each (IOS, Section 4.1)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_TRANSITIONS = 16_000_000  # some 30 bytes each while they are being enumerated
WORD = 62  # operators that a signed machine word has bits for, with room to spare

Array = NDArray[Any]


class TooManyTransitions(ValueError):
    """The block is too wide to be searched within memory."""


@dataclass(frozen=True)
class Endings:
    """The states of a block and the transitions between them; every set of operators is a bit mask.

    states: each set that holds all its operators depend on, by size, the empty one first; levels: the place of the first of
    each size, and their number. endings: each distinct ending of any state. groups: those of each ending. The transitions
    of state i are the slice first[i]:first[i + 1] of `ending` (a place in `endings`) and `rest` (the place of the state that
    remains). schedules: how many there are of the whole block.
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
    predecessors: tuple[tuple[int, ...], ...], r: int | None, s: int | None, most: int = MOST_TRANSITIONS
) -> Endings:
    """Every ending of every state of the block: at most s groups of at most r operators, None for no such limit.

    The endings of a state follow from those of the state without its last operator v. One without v has none of v's
    predecessors. One with v is v's group beside an ending without v that shares no operator with that group: no edge can
    lead from the one to the other, since an ending holds all that the state has after its operators. Without a limit on
    groups it is v beside any ending of the smaller state. Either way each is found once, by a few operations on arrays.

    Raises TooManyTransitions beyond `most`.
    """
    n = len(predecessors)
    kind: Any = np.int64 if n <= WORD else object
    before = [sum(1 << u for u in set(p)) for p in predecessors]
    candidates = None if r is None or r >= n else _connected(predecessors, r)
    states, without_last = _states(before, kind)
    found: list[Array] = [np.zeros(1, kind)]  # of each state its endings, the empty one first
    sizes: list[Array] = [np.zeros(1, np.uint16)]  # the number of groups of each
    total = 0
    for i in range(1, len(states)):
        state = int(states[i])
        v = state.bit_length() - 1
        smaller, count = found[without_last[i]], sizes[without_last[i]]
        stays = (smaller & before[v]) == 0
        kept, kept_count = smaller[stays], count[stays]
        if candidates is None:
            more, more_count = smaller | (1 << v), count
        else:
            groups, after = candidates[v]
            groups = groups[((groups & ~state) == 0) & ((after & state) == 0)]
            apart = (groups[:, None] & kept[None, :]) == 0
            if s is not None:
                apart &= kept_count < s
            group, beside = np.nonzero(apart)
            more, more_count = groups[group] | kept[beside], kept_count[beside] + np.uint16(1)
        found.append(np.concatenate([kept, more]))
        sizes.append(np.concatenate([kept_count, more_count]))
        total += len(found[i]) - 1
        if total > most:
            raise TooManyTransitions(f"a block of {n} units has more than {most:,} transitions")
    del sizes
    size = np.array([int(state).bit_count() for state in states])
    order = np.argsort(size, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    first = np.concatenate([[0], np.cumsum([len(found[i]) - 1 for i in order])])
    rest = np.concatenate([place[np.searchsorted(states, states[i] ^ found[i][1:])].astype(np.int32) for i in order])
    distinct, ending = np.unique(np.concatenate([found[i][1:] for i in order]), return_inverse=True)
    del found
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
    """Exactly, for there may be more than a machine word or a floating-point number can tell."""
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
        if len(states) > MOST_TRANSITIONS:
            raise TooManyTransitions(f"a block of {len(before)} units has more than {MOST_TRANSITIONS:,} states")
    return states, without_last


def _connected(predecessors: Sequence[Sequence[int]], r: int) -> list[tuple[Array, Array]]:
    """For each operator the connected sets of at most r of which it is the last, and what directly follows each of those."""
    n = len(predecessors)
    kind: Any = np.int64 if n <= WORD else object
    linked = _linked(predecessors)
    successors = [0] * n
    for v, producers in enumerate(predecessors):
        for u in producers:
            successors[u] |= 1 << v
    found: set[int] = set()
    layer = {1 << v for v in range(n)}
    for _ in range(r):
        found |= layer
        layer = {g | 1 << v for g in layer for v in bits(_union(linked, g) & ~g)}
    by_last: list[list[int]] = [[] for _ in range(n)]
    for group in sorted(found):
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
    left = endings
    while left.any():
        group = grown = left & -left
        while grown.any():  # all endings at once, by an edge a time
            around = np.zeros_like(group)
            for v, neighbours in enumerate(linked):
                around[(grown >> v & 1).astype(bool)] |= neighbours
            grown = around & left & ~group
            group = group | grown
        groups.append(group.tolist())
        left = left & ~group
    return [tuple(g for g in of if g) for of in zip(*groups, strict=True)]


def _union(masks: Sequence[int], of: int) -> int:
    union = 0
    for v in bits(of):
        union |= masks[v]
    return union


def bits(mask: int) -> Iterator[int]:
    """The operators of a set, ascending."""
    while mask:
        v = mask & -mask
        yield v.bit_length() - 1
        mask ^= v
