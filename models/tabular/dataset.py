"""What a tabular data set is, and how its rows are split."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from models.table_options import SPLITS


class BadData(ValueError):
    """A file is not there, or not the table it should be. The message is one line."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """A table with a label of two classes.

    Attributes:
        name: of the data set.
        rows: one column a feature; categorical ones hold words or whole numbers.
        label: [rows], 0 or 1.
        numeric, categorical: the names of the columns.
        period: [rows], what `order` splits by, such as a date; None where the rows have no order.
        shares: of the rows, where validation begins, and where the test does.
        borders: the periods that validation and test begin with; None for those at `shares`.
    """

    name: str
    rows: pd.DataFrame
    label: NDArray[np.int64]
    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    period: NDArray[np.int64] | None = None
    shares: tuple[float, float] = (0.7, 0.85)
    borders: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.label)

    def at(self, places: NDArray[np.int64]) -> tuple[pd.DataFrame, NDArray[np.int64]]:
        """Some rows and their labels."""
        return self.rows.iloc[places].reset_index(drop=True), self.label[places]

    @property
    def positive_share(self) -> float:
        return float(self.label.mean())

    def num_categories(self, places: NDArray[np.int64]) -> int:
        """Different categories of some rows, over all categorical columns."""
        return int(self.rows.iloc[places][list(self.categorical)].nunique().sum())

    def sampled(self, num_rows: int, seed: int) -> Dataset:
        """A random part of the rows in their order; all of them where there are no more."""
        if num_rows >= len(self):
            return self
        places = np.sort(np.random.default_rng(seed).permutation(len(self))[:num_rows])
        rows, label = self.at(places)
        period = None if self.period is None else self.period[places]
        return replace(self, rows=rows, label=label, period=period)


@dataclass(frozen=True, eq=False)
class Split:
    """Places of the rows that train, validate and test. No row is in two of them."""

    training: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]


def split(dataset: Dataset, by: str, seed: int, training_share: float = 1.0) -> Split:
    """Rows that train, validate and test: 70, 15 and 15 % where the data set does not say otherwise.

    Args:
        by: "rows" draws them; "order" takes the first periods, the next, and the last, none of which is parted.
        seed: of the draw.
        training_share: of the training rows only this part is kept, drawn; validation and test rows stay.

    Raises:
        BadData: the rows have no order, or a part has rows of one class alone.
    """
    count = len(dataset)
    generator = np.random.default_rng(seed)
    if by == "rows":
        order = generator.permutation(count)
        parts = np.split(order, [int(share * count) for share in dataset.shares])
    elif by == "order":
        if dataset.period is None:
            raise BadData(f"the rows of {dataset.name} have no order: split them by rows")
        first, second = dataset.borders or np.quantile(dataset.period, dataset.shares, method="higher")
        late = dataset.period >= first
        last = dataset.period >= second
        parts = [np.flatnonzero(~late), np.flatnonzero(late & ~last), np.flatnonzero(last)]
    else:
        raise BadData(f"rows are split by {' or '.join(SPLITS)}, not by {by!r}")
    training, validation, test = parts
    if training_share < 1:
        training = generator.permutation(training)[: int(training_share * len(training))]
    for name, part in (("training", training), ("validation", validation), ("test", test)):
        if len(np.unique(dataset.label[part])) < 2:
            raise BadData(f"the {name} rows of {dataset.name} hold fewer than two classes: give it more rows")
    return Split(training, validation, test)
