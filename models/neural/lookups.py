"""Trees over few fields as lookups of bit masks, as QuickScorer has (Lucchese et al., SIGIR 2015), but a field at once.

Invariant: bit l of a tree's mask is 1 while the row may still fall into leaf l. The value of a field decides every node that
looks at one of its columns, so a table holds the mask of each value. The AND over all fields leaves one bit a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .embeddings import Embeddings
from .graph import Chain, Union
from .trees import ZERO, TreeEnsemble, floored

MOST_LEAVES = 64  # bits of a mask
MOST_ENTRIES = 2**25  # of all tables together, 8 bytes each
MODULUS = 131  # the smallest by which the 64 masks of one bit, as int64, leave 64 remainders


@dataclass(frozen=True, eq=False)
class _Field:
    """Values that a field takes, and what each of them decides.

    Attributes:
        nodes: places of the nodes, in all trees, that look at it.
        goes_left: [values, nodes].
    """

    nodes: NDArray[np.int64]
    goes_left: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class _Part:
    """What gives numbers or ids, [B, columns].

    Attributes:
        module: the inputs of the whole -> numbers or ids.
        columns: those that are fields; None for all.
        fields: one for each of these columns.
        boundaries: of numbers the thresholds of each of these columns, sorted; None for ids.
    """

    module: nn.Module
    columns: NDArray[np.int64] | None
    fields: Sequence[_Field]
    boundaries: Sequence[NDArray[Any]] | None


class LookupForest(nn.Module):
    """Trees with what they look at, exactly: the inputs of the whole -> [B, K].

    A field is what one id decides, all columns of its embedding, or one column of numbers. A number's value is its place
    among the thresholds of its column, and the last one is for NaN.

    Args:
        parts: what the trees look at.
        ensemble: the trees, of at most MOST_LEAVES leaves.
        dtype: of numbers; float32 is exact for inputs that float32 holds.
    """

    table: Tensor
    value: Tensor
    base: Tensor
    trees: Tensor

    def __init__(self, parts: Sequence[_Part], ensemble: TreeEnsemble, dtype: torch.dtype):
        super().__init__()
        self.rounds_inputs = ensemble.rounds_inputs
        masks = _Masks.of(ensemble)
        tables = [masks.table(field) for part in parts for field in part.fields]  # of each [values, T]
        self.register_buffer("table", torch.from_numpy(np.concatenate(tables).view(np.int64)))
        num_trees, _, num_leaves = ensemble.shape
        by_remainder = np.zeros((num_trees, MODULUS, len(ensemble.base)))
        by_remainder[:, _bits(num_leaves).view(np.int64) % MODULUS] = ensemble.value
        self.register_buffer("value", torch.from_numpy(by_remainder.reshape(-1, len(ensemble.base))).to(dtype))
        self.register_buffer("base", torch.from_numpy(ensemble.base).to(dtype).clone())
        self.register_buffer("trees", torch.arange(num_trees) * MODULUS)
        self.parts = nn.ModuleList([part.module for part in parts])
        self.are_numbers = tuple(part.boundaries is not None for part in parts)
        self.take_all = tuple(part.columns is None for part in parts)
        firsts = iter(np.cumsum([0, *(len(table) for table in tables)]))
        for i, part in enumerate(parts):
            first = torch.tensor([[next(firsts)] for _ in part.fields])
            self.register_buffer(f"first{i}", first)
            if part.columns is not None:
                self.register_buffer(f"columns{i}", torch.from_numpy(part.columns))
            if part.boundaries is not None:
                padded = np.full((len(part.boundaries), max(map(len, part.boundaries))), np.inf)
                for row, boundaries in zip(padded, part.boundaries, strict=True):
                    row[: len(boundaries)] = boundaries
                self.register_buffer(f"boundaries{i}", torch.from_numpy(padded).to(dtype))
                self.register_buffer(f"missing{i}", first + torch.tensor([[len(b) + 1] for b in part.boundaries]))

    @classmethod
    def of(cls, source: nn.Module, ensemble: TreeEnsemble, dtype: torch.dtype) -> Self | None:
        """The trees behind a part of a network; None where they have too many leaves, fields or values for tables.

        Args:
            source: gives what the trees look at.
            ensemble: the trees.
            dtype: as above.
        """
        sources = _flat(source)
        widths = [_width(part) for part in sources]
        if widths.count(None) == 1:
            rest = ensemble.num_features - sum(width for width in widths if width is not None)
            widths = [rest if width is None else width for width in widths]
        if None in widths or ensemble.num_leaves.max() > MOST_LEAVES or not len(ensemble.base):
            return None
        begin, parts = 0, list[_Part | None]()
        for part, width in zip(sources, widths, strict=True):
            assert width is not None
            if isinstance(part, Chain) and isinstance(part.operator, Embeddings):
                parts.append(_of_ids(part.source, part.operator, begin, ensemble, dtype))
            else:
                parts.append(_of_numbers(part, begin, width, ensemble, dtype))
            begin += width
        known = [part for part in parts if part is not None and part.fields]
        fields = [field for part in known for field in part.fields]
        num_trees, num_nodes, _ = ensemble.shape
        entries = num_trees * sum(len(field.goes_left) for field in fields)
        is_worth_it = 0 < len(fields) <= num_nodes and entries <= MOST_ENTRIES
        return cls(known, ensemble, dtype) if is_worth_it and None not in parts else None

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Inputs of the whole -> [B, K]"""
        rows = torch.cat([self._rows(i, part(inputs)) for i, part in enumerate(self.parts)])  # [fields, B]
        masks = self.table[rows]  # [fields, B, T]
        while len(masks) > 1:
            half = len(masks) // 2
            both = masks[:half] & masks[half : 2 * half]
            masks = torch.cat([both, masks[2 * half :]]) if len(masks) % 2 else both
        leaves = masks[0] % MODULUS + self.trees
        return self.base + self.value[leaves].sum(1)

    def _rows(self, i: int, x: Tensor) -> Tensor:
        """What part i gives, [B, columns] -> rows of the table, [fields, B]."""
        first: Tensor = getattr(self, f"first{i}")
        x = (x if self.take_all[i] else x.index_select(1, getattr(self, f"columns{i}"))).t()
        if not self.are_numbers[i]:
            return x + first
        x = x.to(self.value.dtype).contiguous()
        if self.rounds_inputs:
            x = x.float().to(x.dtype)
        rows = torch.searchsorted(getattr(self, f"boundaries{i}"), x) + first
        return torch.where(x.isnan(), getattr(self, f"missing{i}"), rows)


@dataclass(frozen=True, eq=False)
class _Masks:
    """Masks of all nodes, [T·N], by what is decided there; `start` [T] is of a tree where nothing is decided yet."""

    left: NDArray[np.uint64]
    right: NDArray[np.uint64]
    start: NDArray[np.uint64]

    @classmethod
    def of(cls, ensemble: TreeEnsemble) -> _Masks:
        bits = _bits(ensemble.shape[2])
        of_left, of_right = ((bits * (ensemble.signs == sign)).sum(2, dtype=np.uint64).reshape(-1) for sign in (-1, 1))
        return cls(~of_right, ~of_left, (bits * ensemble.is_leaf).sum(1, dtype=np.uint64))

    def table(self, field: _Field) -> NDArray[np.uint64]:
        """[values, T]"""
        table = np.tile(self.start, (len(field.goes_left), 1))
        num_nodes = len(self.left) // len(self.start)
        for node, goes_left in zip(field.nodes, field.goes_left.T, strict=True):
            table[:, node // num_nodes] &= np.where(goes_left, self.left[node], self.right[node])
        return table


def _bits(num_leaves: int) -> NDArray[np.uint64]:
    """The masks of one leaf alone; leaves that pad a tree beyond 64 have none."""
    return np.uint64(1) << np.arange(num_leaves, dtype=np.uint64)


def _flat(source: nn.Module) -> list[nn.Module]:
    """The parts whose columns side by side are a source's."""
    return [inner for part in source.parts for inner in _flat(part)] if isinstance(source, Union) else [source]


def _width(part: nn.Module) -> int | None:
    """The columns of what a part gives, where its last operator says so."""
    operator = part.operator if isinstance(part, Chain) else part
    if isinstance(operator, Embeddings):
        return sum(table.shape[1] for table in operator.tables)
    if isinstance(operator, nn.Linear):
        return operator.out_features
    shift = getattr(operator, "shift", None)
    return shift.numel() if isinstance(shift, Tensor) else None


def _of_ids(ids: nn.Module, embeddings: Embeddings, begin: int, ensemble: TreeEnsemble, dtype: torch.dtype) -> _Part:
    """The codes of ids, the first column of which has the place `begin`."""
    looks_at = _looks_at(ensemble)
    fields, columns = [], []
    for column, table in enumerate(embeddings.tables):
        codes = table.detach().to(dtype).numpy()
        nodes = np.flatnonzero((looks_at >= begin) & (looks_at < begin + codes.shape[1]))
        if len(nodes):
            values = codes[:, looks_at[nodes] - begin]
            values = values.astype(np.float32).astype(values.dtype) if ensemble.rounds_inputs else values
            fields.append(_Field(nodes, _goes_left(values, nodes, ensemble, dtype)))
            columns.append(column)
        begin += codes.shape[1]
    takes_all = len(columns) == len(embeddings.tables)
    return _Part(ids, None if takes_all else np.array(columns, dtype=np.int64), fields, None)


def _of_numbers(part: nn.Module, begin: int, width: int, ensemble: TreeEnsemble, dtype: torch.dtype) -> _Part | None:
    """Numbers whose first column has the place `begin`; None where 0 may be missing among them."""
    threshold, looks_at = floored(ensemble.threshold, dtype).numpy().reshape(-1), _looks_at(ensemble)
    fields, columns, boundaries = [], [], []
    for column in range(width):
        nodes = np.flatnonzero(looks_at == begin + column)
        if ensemble.zero_is_missing.reshape(-1)[nodes].any():
            return None
        if len(nodes):
            known = np.unique(threshold[nodes])
            of_places = np.arange(len(known) + 1)[:, None] <= np.searchsorted(known, threshold[nodes])
            of_missing = _goes_left(np.full((1, len(nodes)), np.nan), nodes, ensemble, dtype)
            fields.append(_Field(nodes, np.concatenate([of_places, of_missing])))
            columns.append(column)
            boundaries.append(known)
    return _Part(part, None if len(columns) == width else np.array(columns, dtype=np.int64), fields, boundaries)


def _looks_at(ensemble: TreeEnsemble) -> NDArray[np.int64]:
    """[T·N], the column of each node, -1 of those that pad a tree."""
    return np.where(ensemble.is_node, ensemble.feature, -1).reshape(-1)


def _goes_left(
    values: NDArray[Any], nodes: NDArray[np.int64], ensemble: TreeEnsemble, dtype: torch.dtype
) -> NDArray[np.bool_]:
    """Which way values go, [values, nodes]."""
    takes_missing, zero_is_missing, missing_left = (
        getattr(ensemble, name).reshape(-1)[nodes] for name in ("takes_missing", "zero_is_missing", "missing_left")
    )
    known = np.where(np.isnan(values), 0, values)
    is_missing = (np.isnan(values) & takes_missing) | ((np.abs(known) <= ZERO) & zero_is_missing)
    return np.where(is_missing, missing_left, known <= floored(ensemble.threshold, dtype).numpy().reshape(-1)[nodes])
