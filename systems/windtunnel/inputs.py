"""What stays on the host: the columns of a table on their way to the inputs of a translated network."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.tabular.encoders import columns_of, places


@dataclass(frozen=True)
class Take:
    """Some columns, by their places."""

    places: tuple[int, ...]

    def __call__(self, x: Any) -> Any:
        columns = list(self.places)
        return x.iloc[:, columns] if hasattr(x, "iloc") else x[:, columns]


@dataclass(frozen=True, eq=False)
class Kept:
    """A fitted transformer that has no translation."""

    name: str
    transformer: Any

    def __call__(self, x: Any) -> Any:
        return self.transformer.transform(x)


Step: TypeAlias = Take | Kept


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
    def _indexes(self) -> list[pd.Index]:
        return [pd.Index(categories) for categories in self.categories]

    def __call__(self, x: Any) -> NDArray[np.int64]:
        """[B, columns] -> rows, [B, columns]. Raises ValueError."""
        all_rows = []
        for i, (index, column) in enumerate(zip(self._indexes, columns_of(x), strict=True)):
            rows = places(index, column)
            if self.refuses_unknown and not rows.all():
                value = column[int(np.argmin(rows))]
                raise ValueError(f"{self.name} has not seen the category {value!r} of its column {i}")
            all_rows.append(rows)
        return np.stack(all_rows, 1)


@dataclass(frozen=True, eq=False)
class Source:
    """An input of the network: the steps to it, and for ids how they are looked up."""

    steps: tuple[Step, ...]
    lookup: Lookup | None = None

    def __call__(self, x: Any, dtype: torch.dtype) -> Tensor:
        """A table of B rows -> [B, columns], int64 ids or numbers of a dtype."""
        for step in self.steps:
            x = step(x)
        if self.lookup is not None:
            return torch.from_numpy(self.lookup(x))
        numbers = x.toarray() if scipy.sparse.issparse(x) else np.asarray(x)
        return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float64)).to(dtype)
