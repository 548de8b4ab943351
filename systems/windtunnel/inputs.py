"""What stays on the host: the columns of a table on their way to the inputs of a translated network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.tabular.encoders import Places, raw_columns


class Table:
    """Rows on their way to the inputs: a table or a matrix of which some columns are taken, each read once.

    Args:
        rows: a table of pandas, or a matrix.
        places: of the columns taken; None for all.
        columns: all of the rows' columns, where they are known.
        is_flat: the one column that is taken is no table, but a row of values.
    """

    def __init__(
        self, rows: Any, places: tuple[int, ...] | None = None, columns: list[Any] | None = None, is_flat: bool = False
    ):
        self.rows, self.places, self.is_flat = rows, places, is_flat
        self._columns = columns

    def take(self, places: tuple[int, ...], is_flat: bool = False) -> Table:
        """Some of these columns, by their places among them."""
        own = places if self.places is None else tuple(self.places[place] for place in places)
        return Table(self.rows, own, self._all(), is_flat)

    def whole(self) -> Any:
        """A table or a matrix of these columns alone."""
        if self.places is None:
            return self.rows
        places = self.places[0] if self.is_flat else list(self.places)
        return self.rows.iloc[:, places] if hasattr(self.rows, "iloc") else self.rows[:, places]

    def columns(self) -> list[Any]:
        """Each as it is kept: an array, or one of pandas."""
        columns = self._all()
        return columns if self.places is None else [columns[place] for place in self.places]

    def has_missing(self) -> bool:
        """Is any value NaN, infinite or nothing at all?"""
        for column in self.columns():
            if isinstance(column, pd.Categorical):
                is_known = column.codes >= 0
            elif column.dtype.kind == "f":
                is_known = np.isfinite(column)
            else:
                is_known = ~pd.isna(column) if column.dtype.kind == "O" else np.ones(1, dtype=np.bool_)
            if not is_known.all():
                return True
        return False

    def _all(self) -> list[Any]:
        if self._columns is None:
            self._columns = raw_columns(self.rows.toarray() if scipy.sparse.issparse(self.rows) else self.rows)
        return self._columns


@dataclass(frozen=True)
class Take:
    """Some columns, by their places. is_flat: as Table has it."""

    places: tuple[int, ...]
    is_flat: bool = False

    def __call__(self, table: Table) -> Table:
        return table.take(self.places, self.is_flat)


@dataclass(frozen=True, eq=False)
class Kept:
    """A fitted transformer that has no translation."""

    name: str
    transformer: Any

    def __call__(self, table: Table) -> Table:
        return Table(self.transformer.transform(table.whole()))


@dataclass(frozen=True)
class Beside:
    """The results of several rows of steps side by side, as a ColumnTransformer puts them.

    Attributes:
        branches: the steps of each, from the table on.
    """

    branches: tuple[tuple[Step, ...], ...]

    def __call__(self, table: Table) -> Table:
        columns: list[Any] = []
        for steps in self.branches:
            branch = table
            for step in steps:
                branch = step(branch)
            columns += branch.columns()
        return Table(table.rows, columns=columns)


Step: TypeAlias = Take | Kept | Beside


@dataclass(frozen=True, eq=False)
class Lookup:
    """Rows of tables by category, a table a column.

    Attributes:
        name: of the encoder.
        categories: of each column, in the order of rows 1 and on.
        refuses_unknown: whether a category that the encoder has not seen is an error; otherwise it is row 0.
    """

    name: str
    categories: tuple[NDArray[Any], ...]
    refuses_unknown: bool

    @cached_property
    def _places(self) -> list[Places]:
        return [Places(categories) for categories in self.categories]

    def __call__(self, columns: Sequence[Any], rows: NDArray[np.int64]) -> None:
        """Fill `rows`, [B, columns]. Raises ValueError."""
        for i, (places, column) in enumerate(zip(self._places, columns, strict=True)):
            rows[:, i] = places(column)
            if self.refuses_unknown and not rows[:, i].all():
                value = np.asarray(column).astype(object)[int(np.argmin(rows[:, i]))]
                raise ValueError(f"{self.name} has not seen the category {value!r} of its column {i}")


@dataclass(frozen=True, eq=False)
class Source:
    """An input of the network: the steps to it, and for ids how they are looked up."""

    steps: tuple[Step, ...]
    lookup: Lookup | None = None

    def __call__(self, table: Table, dtype: torch.dtype, is_pinned: bool = False) -> Tensor:
        """A table of B rows -> [B, columns], int64 ids or numbers of a dtype.

        Args:
            table: the rows.
            dtype: of numbers.
            is_pinned: whether the memory is such that a GPU copies from it while the host goes on.
        """
        for step in self.steps:
            table = step(table)
        columns = table.columns()
        shape = (len(columns[0]) if columns else table.rows.shape[0], len(columns))
        result = torch.empty(shape, dtype=dtype if self.lookup is None else torch.int64, pin_memory=is_pinned)
        if self.lookup is not None:
            self.lookup(columns, result.numpy())
            return result
        numbers = result.numpy()
        for i, column in enumerate(columns):
            numbers[:, i] = column
        return result
