"""The states of a block's dynamic programme, and the endings of each (IOS, Section 4.1)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_TRANSITIONS = 16_000_000  # some 30 bytes each while they are being enumerated
CHUNK = 1 << 14  # endings that are made larger at a time
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


@dataclass(frozen=True)
class _Lists:
    """The endings of some states, those of one state after those of the one before.

    Args:
        masks: of all endings; the empty one is the first of each state.
        num_groups: of each ending.
        first: the endings of state i are the slice first[i]:first[i + 1].
    """

    masks: Array
    num_groups: Array
    first: Array

    def take(self, states: Array) -> "_Lists":
        """Those of some of the states, in this order."""
        lengths = self.first[states + 1] - self.first[states]
        first = np.concatenate([[0], np.cumsum(lengths)])
        at = np.arange(first[-1]) + np.repeat(self.first[states] - first[:-1], lengths)
        return _Lists(self.masks[at], self.num_groups[at], first)

    @classmethod
    def joined(cls, parts: "Sequence[_Lists]") -> "_Lists":
        lengths = np.concatenate([np.diff(part.first) for part in parts])
        masks, num_groups = (np.concatenate([getattr(p, name) for p in parts]) for name in ("masks", "num_groups"))
        return cls(masks, num_groups, np.concatenate([[0], np.cumsum(lengths)]))


def _cuts(lists: _Lists, states: Array) -> list[int]:
    """Where to cut these states, so that each piece begins with few endings (a state with more is a piece)."""
    ends = np.cumsum(lists.first[states + 1] - lists.first[states])
    cuts = [0]
    while cuts[-1] < len(states):
        before = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(ends, before + CHUNK, side="right"))))
    return cuts


def _with_and_without(
    v: int, before: int, smaller: _Lists, states: Array, groups: tuple[Array, Array] | None, s: int | None
) -> _Lists:
    """The endings of states whose last operator is v.

    Args:
        before: the predecessors of v.
        smaller: the endings of each state without v.
        groups: that v is the last operator of, and their direct successors; None where groups have no limit.
        s: most groups of an ending; None for no limit.
    """
    owner = np.repeat(np.arange(len(states)), np.diff(smaller.first))  # the state of each ending
    is_ending = (smaller.masks & before) == 0
    masks, num_groups, owners = [smaller.masks[is_ending]], [smaller.num_groups[is_ending]], [owner[is_ending]]
    if groups is None:
        masks.append(smaller.masks | (1 << v))
        num_groups.append(smaller.num_groups)
        owners.append(owner)
    else:
        may_grow = np.ones(len(masks[0]), bool) if s is None else num_groups[0] < s
        for group, after in zip(groups[0].tolist(), groups[1].tolist(), strict=True):
            is_last = ((group & ~states) == 0) & ((after & states) == 0)
            beside = may_grow & is_last[owners[0]] & ((masks[0] & group) == 0)
            masks.append(masks[0][beside] | group)
            num_groups.append(num_groups[0][beside] + np.uint16(1))
            owners.append(owners[0][beside])
    all_owners = np.concatenate(owners)
    by_owner = np.argsort(all_owners, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(all_owners, minlength=len(states)))])
    return _Lists(np.concatenate(masks)[by_owner], np.concatenate(num_groups)[by_owner], first)


@lru_cache(maxsize=32)  # cells are repeated with other shapes, whose costs differ and whose endings do not
def enumerate_endings(
    predecessors: tuple[tuple[int, ...], ...],
    r: int | None,
    s: int | None,
    max_transitions: int = MAX_TRANSITIONS,
    one_head: bool = False,
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
        max_transitions: pairs of a state and an ending, before `one_head` leaves some out.
        one_head: only endings whose groups each start from one operator, as IOS's released code has them: an operator with
            all of the state that depends on it. Such groups share no operator, so no edge joins two of them.

    Raises:
        TooManyTransitions: there are more.
    """
    n = len(predecessors)
    kind: Any = np.int64 if n <= WORD else object
    before = [sum(1 << u for u in set(p)) for p in predecessors]
    candidates = None if r is None or r >= n else _connected(predecessors, r)
    states, without_last = _states(before, kind)
    all_endings = _Lists(np.zeros(1, kind), np.zeros(1, np.uint16), np.array([0, 1]))  # of the empty state, the empty one
    for v in range(n):
        begin, end = np.searchsorted(states, np.array([1 << v, 2 << v], kind)).tolist()  # whose last operator is v
        parts = [all_endings]
        num_endings = len(all_endings.masks)
        for i, j in pairwise(_cuts(all_endings, without_last[begin:end])):
            chunk = slice(begin + i, begin + j)
            groups = None if candidates is None else candidates[v]
            smaller = all_endings.take(without_last[chunk])
            parts.append(_with_and_without(v, before[v], smaller, states[chunk], groups, s))
            num_endings += len(parts[-1].masks)
            if num_endings - begin - j > max_transitions:  # each state's empty ending is none
                raise TooManyTransitions(f"a block of {n} units has more than {max_transitions:,} transitions")
        all_endings = _Lists.joined(parts)
    size = np.array([int(state).bit_count() for state in states])
    order = np.argsort(size, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    ordered = all_endings.take(order)
    del all_endings
    first = ordered.first - np.arange(len(order) + 1)
    masks = np.delete(ordered.masks, ordered.first[:-1])  # without the empty ones
    of_states = np.repeat(states[order], np.diff(first))
    rest = place[np.searchsorted(states, of_states ^ masks)].astype(np.int32)
    del ordered, of_states
    distinct, ending = np.unique(masks, return_inverse=True)
    groups_of = _components(distinct, _linked(predecessors))
    most = n if s is None else s  # groups, which were not counted above where r sets no limit
    if one_head or (candidates is None and s is not None):
        is_allowed = [
            len(groups) <= most and not (one_head and any(_num_heads(g, before) > 1 for g in groups)) for groups in groups_of
        ]
        allowed = np.array(is_allowed, bool)
        fits = allowed[ending]
        first = np.concatenate([[0], np.cumsum(fits)])[first]
        ending, rest = (np.cumsum(allowed) - 1)[ending[fits]], rest[fits]
        distinct, groups_of = distinct[allowed], list(compress(groups_of, is_allowed))
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


def _num_heads(group: int, before: Sequence[int]) -> int:
    """How many operators of a group depend on none of it."""
    return sum(not before[v] & group for v in bits(group))


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
