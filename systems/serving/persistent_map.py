"""A mapping that never changes, and of which another version costs little: with it a book of many blocks is a value."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Self, TypeVar

K = TypeVar("K")
V = TypeVar("V")
LEAST_CHANGES = 16  # from the base, which a version may have whatever its size


class PersistentMap(Mapping[K, V]):
    """Versions share a base, and each has few changes to it. More than the root of its size make a base of its own.

    Keys come in the order in which they were set last.

    Args:
        base: that others may share.
        new: values that are not the base's.
        hidden: keys of the base that have another value, or none.
    """

    __slots__ = ("_base", "_hidden", "_new")

    def __init__(self, base: dict[K, V] | None = None, new: dict[K, V] | None = None, hidden: frozenset[K] = frozenset()):
        base, new = base or {}, new or {}
        if len(new) + len(hidden) > max(LEAST_CHANGES, len(base) ** 0.5):
            base = base.copy()
            for key in hidden:
                del base[key]
            base.update(new)
            new, hidden = {}, frozenset()
        self._base, self._new, self._hidden = base, new, hidden

    def __getitem__(self, key: K) -> V:
        if key in self._new:
            return self._new[key]
        if key in self._hidden:
            raise KeyError(key)
        return self._base[key]

    def __iter__(self) -> Iterator[K]:
        return chain((key for key in self._base if key not in self._hidden), self._new)

    def __len__(self) -> int:
        return len(self._base) - len(self._hidden) + len(self._new)

    def updated(self, items: Mapping[K, V]) -> Self:
        """The version that has these values, the last in its order."""
        return self._changed(items, items) if items else self

    def without(self, keys: Collection[K]) -> Self:
        """The version that has none of these keys."""
        return self._changed(keys, {}) if keys else self

    def _changed(self, keys: Collection[K], items: Mapping[K, V]) -> Self:
        new = self._new.copy()
        for key in keys:
            new.pop(key, None)
        new.update(items)
        return type(self)(self._base, new, self._hidden.union([key for key in keys if key in self._base]))
