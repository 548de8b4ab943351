"""Trees as modules: exact ones, and the two hidden layers of WindTunnel (dissertation, section 5.2.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .trees import ZERO, TreeEnsemble, floored

LEVELS = (1, 2, 3, 4)

STRATEGIES = ("auto", "gather", "traverse")
ALL = slice(None)  # nodes, tree by tree
LARGE = 1e30  # stands for infinity where something is multiplied
MOST_GATHERED = 2**24  # trees x nodes x leaves up to which "auto" gathers
DEFAULT_LEVEL = 4
DEFAULT_DROPOUT = 0.1  # section 5.3


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
