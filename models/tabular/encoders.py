"""Encoders of categories as scikit-learn transformers (dissertation, sections 5.2.3 and 5.3).

Invariant of those that have `codes_`: an input column is looked up by itself, and its category's code is a row of a table.
Row 0 is of a category that the fit did not keep. An output row is these rows side by side.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Self, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

Column: TypeAlias = NDArray[Any] | pd.api.extensions.ExtensionArray  # what raw_columns gives
FEW_WORDS = 256  # up to which looking each up takes less time than finding the distinct ones first
MOST_DIRECT = 2**16  # whole numbers from the least category to the greatest that are looked up without a hash


def raw_columns(x: Any) -> list[Column]:
    """The columns of a table or of a matrix: arrays, and as they are a Categorical and strings in Arrow's form."""
    if not hasattr(x, "iloc"):
        return list(np.asarray(x).T)
    # A Series of each column would take longer than all else that a small batch needs, so that pandas' own arrays are taken.
    own = getattr(x, "_iter_column_arrays", None)
    arrays = list(own()) if own is not None else [series.array for _, series in x.items()]
    return [array if _is_in_codes(array.dtype) else np.asarray(array) for array in arrays]


def _is_in_codes(dtype: Any) -> bool:
    """Does pandas find the codes of such values without making an object of each?"""
    return isinstance(dtype, pd.CategoricalDtype) or (isinstance(dtype, pd.StringDtype) and dtype.storage == "pyarrow")


def columns_of(x: Any) -> list[NDArray[Any]]:
    """The columns of a table or of a matrix, each an array."""
    return [np.asarray(column) for column in raw_columns(x)]


class Places:
    """The row of each value of a column in a table of codes: 1 + its place among the categories, 0 if it is none of them.

    What is hashed are the distinct values: whole numbers of a small range take no hash, values of a Categorical none again.
    Strings that pandas keeps in Arrow's form are hashed there and become no objects. None is one category, NaN another, as
    scikit-learn has them.

    Args:
        categories: distinct.
    """

    def __init__(self, categories: NDArray[Any]):
        is_missing = np.asarray(pd.isna(categories))
        self._missing = {_kind(categories[place]): int(place) + 1 for place in np.flatnonzero(is_missing)}
        self._index = pd.Index(categories[~is_missing])
        self._of_index = np.append(np.flatnonzero(~is_missing) + 1, 0)  # the row of each place in it, the last for none
        self._low, self._rows = 0, np.zeros(0, np.int64)  # of whole numbers: the row of low - 1 and of those above it
        self._dtype: Any = None  # of the Categorical seen last, with the row of each of its categories and of NaN
        self._by_code = np.zeros(0, np.int64)
        numbers = np.asarray(self._index)
        are_words = not self._missing and len(numbers) > 0 and all(isinstance(category, str) for category in numbers)
        self._by_word = {word: place + 1 for place, word in enumerate(numbers)} if are_words else {}
        if numbers.dtype.kind in "iu" and len(numbers):
            self._low, high = int(numbers.min()), int(numbers.max())
            if high - self._low < MOST_DIRECT and high < 2**62 and self._low > -(2**62):
                self._rows = np.zeros(high - self._low + 3, np.int64)  # one more at either end for what is outside
                self._rows[numbers.astype(np.int64) - self._low + 1] = np.arange(1, len(numbers) + 1)

    def __call__(self, column: Column) -> NDArray[np.int64]:
        """[B] values -> [B] rows"""
        if isinstance(column, pd.Categorical):
            if column.dtype is not self._dtype:
                codes = np.append(np.arange(len(column.categories)), -1)
                self._by_code = self(np.asarray(pd.Categorical.from_codes(codes, dtype=column.dtype)))
                self._dtype = column.dtype
            return self._by_code[column.codes]
        if self._by_word and (column.dtype == object or isinstance(column.dtype, pd.StringDtype)):
            if len(column) <= FEW_WORDS and not _is_in_codes(column.dtype):
                by_word = self._by_word
                return np.array([by_word.get(value, 0) for value in np.asarray(column)], np.int64)
            codes, distinct = pd.factorize(column)  # nothing at all has the code -1
            return np.array([*(self._by_word.get(value, 0) for value in np.asarray(distinct)), 0])[codes]
        values = np.asarray(column)
        if values.dtype.kind == "i" and len(self._rows):
            # A difference that overflows is inside for no value that is not.
            return self._rows.take(values.astype(np.int64, copy=False) - (self._low - 1), mode="clip")
        if values.dtype == object:
            codes, distinct = pd.factorize(values)  # what is missing has the code -1
            rows = np.append(self._hashed(distinct), 0)[codes]
        else:
            rows = self._hashed(values)
        if self._missing:
            is_missing = np.asarray(pd.isna(values))
            rows[is_missing] = [self._missing.get(_kind(value), 0) for value in values[is_missing]]
        return rows

    def _hashed(self, values: NDArray[Any]) -> NDArray[np.int64]:
        return np.asarray(self._of_index[self._index.get_indexer(pd.Index(values))], dtype=np.int64)


def _kind(missing: Any) -> object:
    """Which missing value it is."""
    return None if missing is None else Real if isinstance(missing, Real) else type(missing)


def places(categories: NDArray[Any], column: Any) -> NDArray[np.int64]:
    """What `Places` gives of one column."""
    return Places(categories)(column)


class CategoryEncoder(TransformerMixin, BaseEstimator):
    """What the encoders share: which categories count.

    Args:
        min_count: a category that the fit sees fewer times has no code.
        keep_share: the rarest categories, which together have 1 - this share of the rows, have none either.
    """

    def __init__(self, min_count: int = 1, keep_share: float = 1.0):
        self.min_count = min_count
        self.keep_share = keep_share

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.categorical = tags.input_tags.string = True
        return tags

    def _keep(self, columns: list[NDArray[Any]]) -> None:
        self.categories_ = [self._kept(column) for column in columns]
        self.places_ = [Places(categories) for categories in self.categories_]

    def _kept(self, column: NDArray[Any]) -> NDArray[Any]:
        counts = pd.Series(column, dtype=column.dtype).value_counts(dropna=False)  # the most frequent first
        if self.keep_share < 1:
            before = counts.cumsum().shift(fill_value=0)
            counts = counts[before < self.keep_share * len(column)]
        counts = counts[counts >= self.min_count]
        return np.asarray(counts.sort_index(key=lambda index: index.astype(str)).index)

    def _validated(self, x: Any, *, reset: bool) -> Any:
        """A table, or a matrix as an array."""
        if not hasattr(x, "iloc"):
            x = np.asarray(x)
            if x.ndim != 2:
                raise ValueError(f"{type(self).__name__} takes a table of rows and columns, not {x.ndim} dimensions")
        validate_data(self, x, reset=reset, skip_check_array=True)
        return x

    def fit(self, x: Any, y: Any = None) -> Self:
        """Find the categories of each column, and their codes."""
        self._keep(columns_of(self._validated(x, reset=True)))
        self.codes_ = [np.concatenate([self._absent(len(c)), self._codes(c)]) for c in self.categories_]
        return self

    def _absent(self, num_categories: int) -> NDArray[np.float64]:
        """[1, width], the code of what is no category."""
        return np.zeros((1, self._codes(np.arange(num_categories)).shape[1]))

    def _codes(self, categories: NDArray[Any]) -> NDArray[np.float64]:
        """[categories, width]"""
        raise NotImplementedError

    def transform(self, x: Any) -> NDArray[np.float64]:
        """[B, columns] -> [B, sum of widths]"""
        check_is_fitted(self)
        columns = raw_columns(self._validated(x, reset=False))
        coded = [codes[places(column)] for places, codes, column in zip(self.places_, self.codes_, columns, strict=True)]
        return np.concatenate(coded, 1)


class BinaryEncoder(CategoryEncoder):
    """The number of a category in binary digits: ⌈log2(C + 1)⌉ columns, all 0 for what was not kept (Pre1)."""

    def _codes(self, categories: NDArray[Any]) -> NDArray[np.float64]:
        width = max(1, math.ceil(math.log2(len(categories) + 1)))
        numbers = np.arange(1, len(categories) + 1)[:, None]
        return ((numbers >> np.arange(width)) & 1).astype(np.float64)


class TwoHotEncoder(CategoryEncoder):
    """The two digits of a category's number in base ⌈√C⌉, each one-hot: 2⌈√C⌉ columns (Pre2, Pre3)."""

    def _codes(self, categories: NDArray[Any]) -> NDArray[np.float64]:
        base = max(1, math.ceil(math.sqrt(len(categories))))
        high, low = np.divmod(np.arange(len(categories)), base)
        return np.concatenate([np.eye(base)[high], np.eye(base)[low]], 1)


class HashEncoder(CategoryEncoder):
    """One-hot over a hash of the category, of `num_columns` columns; categories may collide."""

    def __init__(self, num_columns: int = 16, min_count: int = 1, keep_share: float = 1.0):
        super().__init__(min_count, keep_share)
        self.num_columns = num_columns

    def _codes(self, categories: NDArray[Any]) -> NDArray[np.float64]:
        hashes = pd.util.hash_array(categories.astype(str).astype(object))  # the same in every process
        return np.eye(self.num_columns)[(hashes % np.uint64(self.num_columns)).astype(np.int64)]


class OnlineTargetEncoder(CategoryEncoder):
    """The mean of the target and the share of rows of each category (Pre3; DeepGBM, section 4.1).

    A training row's mean is over the rows before it alone, so that no row sees its own target. A category without rows
    before has the mean of all.
    """

    def fit(self, x: Any, y: Any = None) -> Self:
        """Find the categories, and the mean of `y`, [B] numbers, for each."""
        self._online(x, y)
        return self

    def fit_transform(self, x: Any, y: Any = None, **parameters: Any) -> NDArray[np.float64]:
        """As `fit`; the result is the online one."""
        return self._online(x, y)

    def _online(self, x: Any, y: Any) -> NDArray[np.float64]:
        if y is None:
            raise ValueError("OnlineTargetEncoder needs y: it encodes a category by the target's mean")
        columns = columns_of(self._validated(x, reset=True))
        target = np.asarray(y, dtype=np.float64)
        mean = target.mean()
        self._keep(columns)
        self.codes_, online = [], []
        for categories, places, column in zip(self.categories_, self.places_, columns, strict=True):
            rows = places(column)
            counts = np.bincount(rows, minlength=len(categories) + 1)
            sums = np.bincount(rows, target, minlength=len(categories) + 1)
            means = np.where(counts > 0, sums / np.maximum(counts, 1), mean)
            self.codes_.append(np.stack([means, counts / len(rows)], 1))
            grouped = pd.Series(target).groupby(rows)
            seen_before = grouped.cumcount().to_numpy()
            sum_before = grouped.cumsum().to_numpy() - target
            mean_before = np.where(seen_before > 0, sum_before / np.maximum(seen_before, 1), mean)
            online.append(np.stack([mean_before, counts[rows] / len(rows)], 1))
        return np.concatenate(online, 1)


class Bucketizer(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """Numbers as bins of about equal numbers of training rows; NaN stays (Pre3)."""

    def __init__(self, num_bins: int = 32):
        self.num_bins = num_bins

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def fit(self, x: Any, y: Any = None) -> Self:
        """Find the edges of each column, [num_bins - 1] at most."""
        x = validate_data(self, x, dtype=np.float64, ensure_all_finite="allow-nan")
        quantiles = np.linspace(0, 1, self.num_bins + 1)[1:-1]
        self.edges_ = [np.unique(np.nanquantile(column, quantiles)) for column in x.T]
        return self

    def transform(self, x: Any) -> NDArray[np.float64]:
        """[B, F] -> [B, F], whole numbers"""
        check_is_fitted(self)
        x = validate_data(self, x, dtype=np.float64, ensure_all_finite="allow-nan", reset=False)
        binned = [np.searchsorted(edges, column, side="right") for edges, column in zip(self.edges_, x.T, strict=True)]
        return np.where(np.isnan(x), np.nan, np.stack(binned, 1).astype(np.float64))
