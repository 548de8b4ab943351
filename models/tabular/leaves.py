"""LightGBM's leaves as features: Pipe3 of the dissertation (section 5.3) gives them to a factorization machine."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import scipy.sparse
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data


class LeafEncoder(TransformerMixin, BaseEstimator):
    """One column for each leaf of a gradient-boosted ensemble; 1 where the row falls into it.

    Args:
        num_trees, num_leaves, learning_rate: of LightGBM; the chapter takes 100, 64 and 0.25.
        random_state, num_threads: LightGBM's.
    """

    def __init__(
        self,
        num_trees: int = 100,
        num_leaves: int = 64,
        learning_rate: float = 0.25,
        random_state: int = 0,
        num_threads: int = 0,
    ):
        self.num_trees = num_trees
        self.num_leaves = num_leaves
        self.learning_rate = learning_rate
        self.random_state = random_state
        self.num_threads = num_threads

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def fit(self, x: Any, y: Any) -> Self:
        """Fit the trees to rows [B, F] and labels [B] of two classes."""
        import lightgbm

        x, y = validate_data(self, x, y, dtype=np.float64, ensure_all_finite=False)
        self.classes_, target = np.unique(y, return_inverse=True)
        parameters = {
            "objective": "binary",
            "num_leaves": self.num_leaves,
            "learning_rate": self.learning_rate,
            "seed": self.random_state,
            "num_threads": self.num_threads,
            "verbose": -1,
            "deterministic": True,
        }
        self.booster_ = lightgbm.train(parameters, lightgbm.Dataset(x, target), self.num_trees)
        leaves = [tree["num_leaves"] for tree in self.booster_.dump_model()["tree_info"]]
        self.offsets_ = np.concatenate([[0], np.cumsum(leaves)])
        return self

    def transform(self, x: Any) -> scipy.sparse.csr_matrix:
        """[B, F] -> [B, leaves], sparse, a 1 for each tree"""
        check_is_fitted(self)
        x = validate_data(self, x, dtype=np.float64, ensure_all_finite=False, reset=False)
        leaves = np.asarray(self.booster_.predict(x, pred_leaf=True)).reshape(len(x), -1).astype(np.int64)
        columns = (leaves + self.offsets_[:-1]).reshape(-1)
        starts = np.arange(len(x) + 1) * leaves.shape[1]
        data = np.ones(len(columns), dtype=np.float32)
        return scipy.sparse.csr_matrix((data, columns, starts), shape=(len(x), int(self.offsets_[-1])))
