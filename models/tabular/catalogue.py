"""The data sets by name."""

from __future__ import annotations

from collections.abc import Callable

from models.table_options import DATASETS

from .clicks import avazu, criteo, movielens
from .dataset import BadData, Dataset
from .flights import flight, nycflights13
from .synthetic import synthetic

READERS: dict[str, Callable[[str | None], Dataset]] = {
    "nycflights13": nycflights13,
    "flight": flight,
    "avazu": avazu,
    "criteo": criteo,
    "movielens": movielens,
}
SYNTHETIC_ROWS = 100_000


def read(name: str, path: str | None = None, num_rows: int | None = None) -> Dataset:
    """A data set.

    Args:
        path: of the user's files, for those that no package has.
        num_rows: a random part of so many rows; None for all.

    Raises:
        BadData: there is none of that name, or its files are not there, or not what they should be.
    """
    if name == "synthetic":
        return synthetic(num_rows or SYNTHETIC_ROWS)
    if name not in READERS:
        raise BadData(f"there is no data set {name!r}; there are {', '.join(DATASETS)}")
    dataset = READERS[name](path)
    return dataset.sampled(num_rows, seed=0) if num_rows else dataset
