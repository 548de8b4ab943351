"""Decision trees as arrays.

Invariant: a row goes left at a node exactly where its feature is at most the node's threshold; where the feature is
missing, exactly where the node says so. Every library's trees are brought into this form before they come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ZERO = float(np.float32(1e-35))  # LightGBM takes what is at most this far from 0 for 0
ALIGNMENT = 4  # numbers of float32 in 16 bytes, to which tensor cores want the rows of a matrix aligned


@dataclass(frozen=True)
class Tree:
    """One tree of n nodes and l leaves. Its root is node 0; a tree of one leaf has no nodes.

    Attributes:
        feature: [n], the column of X that a node looks at.
        threshold: [n], float64.
        children: [n, 2], to the left and to the right: the number of a node, or -1 - the number of a leaf.
        value: [l, K], float64, what a leaf adds to each of K outputs.
        missing_left: [n], whether a missing value goes left.
        takes_missing: [n], whether NaN is missing at this node; elsewhere NaN counts as 0.
        zero_is_missing: [n], whether 0 is missing too.
    """

    feature: NDArray[np.int64]
    threshold: NDArray[np.float64]
    children: NDArray[np.int64]
    value: NDArray[np.float64]
    missing_left: NDArray[np.bool_]
    takes_missing: NDArray[np.bool_]
    zero_is_missing: NDArray[np.bool_]


@dataclass(frozen=True)
class TreeEnsemble:
    """T trees side by side, padded to equal numbers of nodes N and leaves L, which ALIGNMENT divides.

    Attributes:
        num_features: columns of X.
        num_nodes, num_leaves: [T], without padding.
        feature to zero_is_missing: as of a Tree, [T, N], [T, L, K] for `value`.
        children: [T, N, 2]; node n is n, leaf l is N + l.
        base: [K], float64, what the outputs begin with.
        rounds_inputs: whether the library compares inputs that are rounded to float32.
    """

    num_features: int
    num_nodes: NDArray[np.int64]
    num_leaves: NDArray[np.int64]
    feature: NDArray[np.int64]
    threshold: NDArray[np.float64]
    children: NDArray[np.int64]
    value: NDArray[np.float64]
    missing_left: NDArray[np.bool_]
    takes_missing: NDArray[np.bool_]
    zero_is_missing: NDArray[np.bool_]
    base: NDArray[np.float64]
    rounds_inputs: bool

    @classmethod
    def of(cls, trees: Sequence[Tree], num_features: int, base: NDArray[np.float64], rounds_inputs: bool) -> TreeEnsemble:
        """The trees side by side; `base` is [K]."""
        num_nodes = np.array([len(tree.feature) for tree in trees])
        num_leaves = np.array([len(tree.value) for tree in trees])
        nodes, leaves = aligned(max(1, num_nodes.max())), aligned(num_leaves.max())

        def padded(name: str, fill: float, dtype: type) -> NDArray[Any]:
            whole: NDArray[Any] = np.full((len(trees), nodes), fill, dtype=dtype)
            for row, tree in zip(whole, trees, strict=True):
                row[: len(tree.feature)] = getattr(tree, name)
            return whole

        children = np.full((len(trees), nodes, 2), nodes, dtype=np.int64)
        value = np.zeros((len(trees), leaves, len(base)))
        for t, tree in enumerate(trees):
            children[t, : len(tree.feature)] = np.where(tree.children < 0, nodes - 1 - tree.children, tree.children)
            value[t, : len(tree.value)] = tree.value
        return cls(
            num_features,
            num_nodes,
            num_leaves,
            padded("feature", 0, np.int64),
            padded("threshold", 0.0, np.float64),
            children,
            value,
            padded("missing_left", False, np.bool_),
            padded("takes_missing", False, np.bool_),
            padded("zero_is_missing", False, np.bool_),
            np.asarray(base, dtype=np.float64),
            rounds_inputs,
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Trees T, nodes N, leaves L."""
        return (*self.feature.shape, self.value.shape[1])

    @property
    def is_node(self) -> NDArray[np.bool_]:
        """[T, N], False for padding."""
        return np.arange(self.shape[1]) < self.num_nodes[:, None]

    @property
    def is_leaf(self) -> NDArray[np.bool_]:
        """[T, L], False for padding."""
        return np.arange(self.shape[2]) < self.num_leaves[:, None]

    @cached_property
    def signs(self) -> NDArray[np.int8]:
        """[T, N, L], +1 where a leaf lies to the right of a node, -1 to the left, 0 elsewhere."""
        signs = np.zeros(self.shape, dtype=np.int8)
        for t in np.flatnonzero(self.num_nodes):
            pending: list[tuple[int, list[tuple[int, int]]]] = [(0, [])]  # a place, and the branches taken to it
            while pending:
                place, taken = pending.pop()
                if place >= self.shape[1]:
                    for node, sign in taken:
                        signs[t, node, place - self.shape[1]] = sign
                else:
                    left, right = self.children[t, place]
                    pending += [(left, [*taken, (place, -1)]), (right, [*taken, (place, 1)])]
        return signs

    @cached_property
    def depth(self) -> int:
        """The nodes above the deepest leaf."""
        depth = 0
        pending = [np.array([0]) if n else np.array([], dtype=np.int64) for n in self.num_nodes]
        while any(len(places) for places in pending):
            depth += 1
            below = [self.children[t, places].reshape(-1) for t, places in enumerate(pending)]
            pending = [places[places < self.shape[1]] for places in below]
        return depth

    def without_outputs(self) -> TreeEnsemble:
        """The trees where only the leaf counts that a row falls into: K is 0."""
        return replace(self, value=np.zeros((*self.is_leaf.shape, 0)), base=np.zeros(0))

    def with_thresholds_between(self, values: NDArray[np.float64]) -> TreeEnsemble:
        """The trees with each threshold in the middle of the two values around it. No decision about `values` changes.

        LightGBM's split of a feature of 0 and 1 has the threshold 1e-35, where tanh could not tell 0 from the threshold.

        Args:
            values: [rows, num_features], such as the training rows; NaN is passed over.
        """
        threshold = self.threshold.copy()
        for column in np.unique(self.feature[self.is_node]):
            seen = np.unique(values[:, column])
            seen = seen[np.isfinite(seen)]
            nodes = self.is_node & (self.feature == column)
            place = np.searchsorted(seen, threshold[nodes], side="right")
            is_between = (place > 0) & (place < len(seen))
            if is_between.any():
                below, above = seen[place[is_between] - 1], seen[place[is_between]]
                moved = threshold[nodes]
                moved[is_between] = below + (above - below) / 2
                threshold[nodes] = moved
        return replace(self, threshold=threshold)


def aligned(count: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-int(count) // ALIGNMENT) * ALIGNMENT


def floored(threshold: NDArray[np.float64], dtype: torch.dtype) -> Tensor:
    """The largest value of a dtype that is at most the threshold: it parts that dtype's numbers as the threshold does."""
    if dtype == torch.float64:
        return torch.from_numpy(threshold)
    exact = torch.from_numpy(threshold)
    rounded = exact.to(dtype)
    below = torch.nextafter(rounded, torch.full_like(rounded, -torch.inf))
    return torch.where(rounded.to(torch.float64) > exact, below, rounded)
