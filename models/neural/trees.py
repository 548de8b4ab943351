"""Decision trees as tensors: exact ones, and the two hidden layers of WindTunnel (dissertation, section 5.2.2).

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
from torch import Tensor, nn

LEVELS = (1, 2, 3, 4)
STRATEGIES = ("auto", "gather", "traverse")
ALL = slice(None)  # nodes, tree by tree
LARGE = 1e30  # stands for infinity where something is multiplied
MOST_GATHERED = 2**24  # trees x nodes x leaves up to which "auto" gathers
DEFAULT_LEVEL = 4
DEFAULT_DROPOUT = 0.1  # section 5.3
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


def _known(x: Tensor) -> Tensor:
    """NaN as 0, and infinities as they are."""
    return x.nan_to_num(0.0, torch.inf, -torch.inf)


class _Missing(nn.Module):
    """What counts as missing at each node, and where it goes."""

    missing_left: Tensor
    takes_missing: Tensor
    zero_is_missing: Tensor

    def __init__(self, ensemble: TreeEnsemble):
        super().__init__()
        for name in ("missing_left", "takes_missing", "zero_is_missing"):
            self.register_buffer(name, torch.from_numpy(getattr(ensemble, name)).reshape(-1))
        self.has_missing = bool(ensemble.takes_missing.any())
        self.has_zero = bool(ensemble.zero_is_missing.any())

    @property
    def is_possible(self) -> bool:
        return self.has_missing or self.has_zero

    def at(self, x: Tensor, nodes: Tensor | slice) -> Tensor:
        """Whether what nodes look at is missing.

        Args:
            x: what each node looks at, NaN in it.
            nodes: which nodes these are, tree by tree.
        """
        is_missing = x.isnan() & self.takes_missing[nodes]
        if self.has_zero:
            is_missing |= (_known(x).abs() <= ZERO) & self.zero_is_missing[nodes]
        return is_missing

    def decided(self, goes_left: Tensor, x: Tensor, nodes: Tensor | slice) -> Tensor:
        """The decisions at nodes, with those about missing values in their place."""
        return torch.where(self.at(x, nodes), self.missing_left[nodes], goes_left) if self.is_possible else goes_left


class HardForest(nn.Module):
    """Trees, exactly: [B, F] -> [B, K].

    Strategy "gather" evaluates every node and picks the leaf whose literals are all true. Strategy "traverse" walks from
    the root, a step for each level of the deepest tree. Strategy "auto" gathers where that takes little memory.

    Args:
        ensemble: the trees.
        strategy: one of STRATEGIES.
        dtype: float32 is exact for inputs that float32 holds; float64 for all.
    """

    feature: Tensor
    threshold: Tensor
    signs: Tensor
    num_literals: Tensor
    value: Tensor
    base: Tensor
    branches: Tensor
    trees: Tensor

    def __init__(self, ensemble: TreeEnsemble, strategy: str = "auto", dtype: torch.dtype = torch.float32):
        super().__init__()
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
        if strategy == "auto":
            strategy = "gather" if int(np.prod(ensemble.shape)) <= MOST_GATHERED else "traverse"
        self.strategy, self.rounds_inputs, self.shape = strategy, ensemble.rounds_inputs, ensemble.shape
        self.register_buffer("feature", torch.from_numpy(ensemble.feature).reshape(-1))
        self.register_buffer("threshold", floored(ensemble.threshold, dtype).reshape(-1))
        # Cloned, since numpy gives an array without outputs strides of 0, which no exporter of weights takes.
        self.register_buffer(
            "value", torch.from_numpy(ensemble.value).to(dtype).clone(memory_format=torch.contiguous_format)
        )
        self.register_buffer("base", torch.from_numpy(ensemble.base).to(dtype).clone(memory_format=torch.contiguous_format))
        self.missing = _Missing(ensemble)
        self.depth = max(1, ensemble.depth)  # a tree of one leaf has a node of padding, which leads to it
        if strategy == "gather":
            self.register_buffer("signs", torch.from_numpy(ensemble.signs).to(dtype))
            num_literals = np.where(ensemble.is_leaf, np.abs(ensemble.signs).sum(1, dtype=np.int64), -1)
            self.register_buffer("num_literals", torch.from_numpy(num_literals).to(dtype)[:, None])
        else:
            self.register_buffer("branches", torch.from_numpy(ensemble.children).reshape(-1, 2))
            self.register_buffer("trees", torch.arange(ensemble.shape[0]))

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] -> [B, K]"""
        if self.strategy == "gather":
            return self.base + torch.bmm(self.leaves(x), self.value).sum(0)
        return self.base + self.value[self.trees, self._reached(x)].sum(1)

    def leaves(self, x: Tensor) -> Tensor:
        """[B, F] -> [T, B, L], 1 at the leaf that a row falls into, else 0."""
        if self.strategy == "traverse":
            return nn.functional.one_hot(self._reached(x), self.shape[2]).to(self.value.dtype).transpose(0, 1)
        num_trees, num_nodes, _ = self.shape
        looked_at = self._compared(x)[:, self.feature]  # [B, T·N]
        goes_left = self.missing.decided(_known(looked_at) <= self.threshold, looked_at, ALL)
        decisions = 1 - 2 * goes_left.to(self.value.dtype)  # +1 to the right
        decisions = decisions.view(-1, num_trees, num_nodes).transpose(0, 1)  # [T, B, N]
        return (torch.bmm(decisions, self.signs) == self.num_literals).to(self.value.dtype)

    def _compared(self, x: Tensor) -> Tensor:
        x = x.to(self.value.dtype)
        return x.float().double() if self.rounds_inputs and x.dtype == torch.float64 else x

    def _reached(self, x: Tensor) -> Tensor:
        """[B, F] -> [B, T], the leaf that a row falls into."""
        x = self._compared(x)
        num_trees, num_nodes, _ = self.shape
        first = self.trees * num_nodes
        place = torch.zeros(len(x), num_trees, dtype=torch.long, device=x.device)
        for _ in range(self.depth):
            node = first + place.clamp_max(num_nodes - 1)
            looked_at = x.gather(1, self.feature[node])
            goes_left = self.missing.decided(_known(looked_at) <= self.threshold[node], looked_at, node)
            child = self.branches[node].gather(2, (~goes_left).long()[..., None]).squeeze(2)
            place = torch.where(place < num_nodes, child, place)
        return place - num_nodes


class _Gathered(torch.autograd.Function):
    """Columns of x. Its gradient multiplies with one-hot rows, since sums into few columns would wait for each other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: Tensor, one_hot: Tensor) -> Tensor:
        ctx.save_for_backward(one_hot)
        return x.index_select(1, columns)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), (one_hot,) = gradients, ctx.saved_tensors
        return gradient @ one_hot, None, None


def _gathered(x: Tensor, columns: Tensor, one_hot: Tensor) -> Tensor:
    """[B, F] -> [B, T·N]; without gradients a plain gather, which exporters know."""
    if torch.is_grad_enabled() and x.requires_grad:
        nodes: Tensor = _Gathered.apply(x, columns, one_hot)  # type: ignore[no-untyped-call]
        return nodes
    return x.index_select(1, columns)


class SoftForest(nn.Module):
    """Trees as two hidden layers of tanh: [B, F] -> [B, K].

    Node n is tanh((x·w_n - threshold_n) / temperature), +1 to the right. Leaf l of C nodes above it is
    tanh((sum of signed nodes - C + 1) / temperature). The output is the sum of value / 2 · (1 + leaf), over all trees.
    Levels add what trains: 1 the values, 2 the thresholds, 3 the weights of all features, 4 the second layer whole.
    At levels 1 and 2 a node's feature is gathered. A missing value is a decided node, without a gradient.

    Args:
        ensemble: the trees.
        level: one of LEVELS.
        temperature: above 0; the trees are exact in its limit 0.
        dropout: the probability with which each node and leaf is 0 in train mode.
    """

    feature: Tensor
    node_mask: Tensor
    leaf_mask: Tensor
    shift: Tensor
    scale: Tensor
    one_hot: Tensor

    def __init__(
        self,
        ensemble: TreeEnsemble,
        level: int = DEFAULT_LEVEL,
        temperature: float = 1.0,
        dropout: float = DEFAULT_DROPOUT,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        if level not in LEVELS or isinstance(level, bool):
            raise ValueError(f"level must be 1, 2, 3 or 4, not {level!r}")
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, not {temperature!r}; HardForest is the exact one")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {dropout!r}")
        self.level, self.temperature, self.dropout, self.shape = level, temperature, dropout, ensemble.shape
        self.sees_missing = True  # whoever knows that no input is NaN or infinite may say False
        num_features, num_nodes = ensemble.num_features, ensemble.feature.size
        self.register_buffer("feature", torch.from_numpy(ensemble.feature).reshape(-1))
        self.register_buffer("node_mask", torch.from_numpy(ensemble.is_node).to(dtype)[:, :, None])
        self.register_buffer("leaf_mask", torch.from_numpy(ensemble.is_leaf).to(dtype)[:, :, None])
        self.register_buffer("shift", torch.zeros(num_features, dtype=dtype))  # `standardize` sets these two
        self.register_buffer("scale", torch.ones(num_features, dtype=dtype))
        self.is_padded = not (ensemble.is_node.all() and ensemble.is_leaf.all())
        self.missing = _Missing(ensemble)
        self.threshold = nn.Parameter(_bounded(ensemble.threshold, dtype), requires_grad=level >= 2)
        weight = torch.zeros(num_features, num_nodes, dtype=dtype)
        weight[self.feature, torch.arange(num_nodes)] = self.node_mask.reshape(-1)
        if level >= 3:
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer("one_hot", weight.t().contiguous())
        num_literals = np.abs(ensemble.signs).sum(1, dtype=np.int64)  # [T, L]
        self.signs = nn.Parameter(torch.from_numpy(ensemble.signs).to(dtype), requires_grad=level >= 4)
        leaf_bias = torch.from_numpy(1.0 - num_literals).to(dtype)[:, None]  # [T, 1, L]
        self.leaf_bias = nn.Parameter(leaf_bias, requires_grad=level >= 4)
        if len(ensemble.base):
            self.value = nn.Parameter(torch.from_numpy(ensemble.value / 2).to(dtype))
            self.bias = nn.Parameter(torch.from_numpy(ensemble.base + ensemble.value.sum((0, 1)) / 2).to(dtype))

    @torch.no_grad()
    def standardize(self, ensemble: TreeEnsemble, shift: NDArray[np.float64], scale: NDArray[np.float64]) -> None:
        """Take the inputs as (x - shift) / scale from now on, and the thresholds likewise: no decision changes.

        Args:
            ensemble: the trees that this forest was made of, their thresholds perhaps moved.
            shift, scale: [num_features], the scale above 0.
        """
        self.shift.copy_(torch.from_numpy(shift))
        self.scale.copy_(torch.from_numpy(scale))
        threshold = (ensemble.threshold - shift[ensemble.feature]) / scale[ensemble.feature]
        self.threshold.copy_(_bounded(threshold, self.threshold.dtype))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """A cold start: what trains takes random values, as torch's linear layers do. The structure stays."""
        num_trees, num_nodes, num_leaves = self.shape
        if hasattr(self, "value"):
            nn.init.zeros_(self.bias)
        for parameter, num_inputs in (
            *([(self.value, num_trees * num_leaves)] if hasattr(self, "value") else []),
            (self.threshold, len(self.shift) if self.level >= 3 else 1),
            (self.signs, num_nodes),
            (self.leaf_bias, num_nodes),
            *([(self.weight, len(self.shift))] if self.level >= 3 else []),
        ):
            if parameter.requires_grad:
                parameter.uniform_(-(num_inputs**-0.5), num_inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] -> [B, K]"""
        value = self.value * self.leaf_mask if self.is_padded else self.value
        return self.bias + torch.bmm(self._leaves(x), value).sum(0)

    def leaves(self, x: Tensor) -> Tensor:
        """[B, F] -> [T, B, L], near 1 at the leaf that a row falls into, near 0 elsewhere."""
        return (1 + self._leaves(x)) / 2

    def _leaves(self, x: Tensor) -> Tensor:
        num_trees, num_nodes, _ = self.shape
        x = x.to(self.signs.dtype)
        known = ((x.nan_to_num(0.0, LARGE, -LARGE) if self.sees_missing else x) - self.shift) / self.scale
        steepness = 1 / self.temperature
        if self.level >= 3:
            nodes = torch.addmm(self.threshold, known, self.weight, beta=-steepness, alpha=steepness)  # [B, T·N]
        else:
            nodes = (_gathered(known, self.feature, self.one_hot) - self.threshold) * steepness
        nodes = torch.tanh(nodes)
        if self.sees_missing and self.missing.is_possible:
            is_missing = self.missing.at(x[:, self.feature], ALL)
            nodes = torch.where(is_missing, 1 - 2 * self.missing.missing_left.to(nodes.dtype), nodes)
        nodes = nn.functional.dropout(nodes, self.dropout, self.training)
        nodes = nodes.view(-1, num_trees, num_nodes).transpose(0, 1)  # [T, B, N]
        signs = self.signs * self.node_mask if self.is_padded else self.signs
        leaves = torch.tanh(torch.baddbmm(self.leaf_bias, nodes, signs, beta=steepness, alpha=steepness))
        return nn.functional.dropout(leaves, self.dropout, self.training)


class ForestLeaves(nn.Module):
    """The leaves of a forest as features, tree by tree: [B, F] -> [B, leaves]."""

    places: Tensor

    def __init__(self, forest: HardForest | SoftForest, ensemble: TreeEnsemble):
        super().__init__()
        self.forest = forest
        self.register_buffer("places", torch.from_numpy(np.flatnonzero(ensemble.is_leaf)))
        self.is_padded = not ensemble.is_leaf.all()

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] -> [B, leaves]"""
        leaves = self.forest.leaves(x).transpose(0, 1).reshape(len(x), -1)
        return leaves[:, self.places] if self.is_padded else leaves


def _bounded(threshold: NDArray[np.float64], dtype: torch.dtype) -> Tensor:
    """Thresholds in a row, infinite ones at a value that every input is at most."""
    return torch.from_numpy(threshold.clip(-LARGE, LARGE)).to(dtype).reshape(-1)
