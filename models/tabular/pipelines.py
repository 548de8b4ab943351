"""The chapter's pipelines: three ways of preprocessing before three predictors (section 5.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.preprocessing import StandardScaler

from models.table_options import PIPELINES, PREPROCESSINGS

from .dataset import Dataset
from .encoders import BinaryEncoder, Bucketizer, OnlineTargetEncoder, TwoHotEncoder
from .factorization_machine import FactorizationMachine
from .leaves import LeafEncoder

MIN_COUNT, PRE3_MIN_COUNT, PRE3_KEEP_SHARE, NUM_BINS = 25, 10, 0.99, 32


@dataclass(frozen=True)
class Size:
    """How large the predictors are; the chapter's by default.

    Args:
        num_trees, num_leaves, learning_rate: of LightGBM.
        rank, fm_learning_rate, fm_epochs: of the factorization machine.
        num_threads: of LightGBM; 0 for all.
        device: that the factorization machine is fitted on.
    """

    num_trees: int = 100
    num_leaves: int = 64
    learning_rate: float = 0.25
    rank: int = 20
    fm_learning_rate: float = 1e-3
    fm_epochs: int = 5
    num_threads: int = 0
    device: str = "cpu"


def preprocessing(name: str, dataset: Dataset) -> ColumnTransformer:
    """pre1: binary codes. pre2: two-hot ones. pre3: two-hot and the target's mean, of numbers in bins too.

    Numbers pass standardized. Categories seen fewer than 25 times (pre3: the rarest 1 %, and fewer than 10) have no code.
    """
    numeric, categorical = list(dataset.numeric), list(dataset.categorical)
    branches: list[tuple[str, Any, list[str]]] = []
    if numeric:
        branches.append(("numbers", StandardScaler(), numeric))
    if name == "pre1":
        branches.append(("binary", BinaryEncoder(MIN_COUNT), categorical))
    elif name == "pre2":
        branches.append(("two_hot", TwoHotEncoder(MIN_COUNT), categorical))
    elif name == "pre3":
        rare = {"min_count": PRE3_MIN_COUNT, "keep_share": PRE3_KEEP_SHARE}
        branches.append(("categories", _two_hot_and_target(rare), categorical))
        if numeric:
            bins = Pipeline([("bins", Bucketizer(NUM_BINS)), ("codes", _two_hot_and_target({}))])
            branches.append(("binned", bins, numeric))
    else:
        raise ValueError(f"preprocessing must be one of {', '.join(PREPROCESSINGS)}, not {name!r}")
    return ColumnTransformer(branches, sparse_threshold=0)


def _two_hot_and_target(rare: dict[str, Any]) -> FeatureUnion:
    return FeatureUnion([("two_hot", TwoHotEncoder(**rare)), ("target", OnlineTargetEncoder(**rare))])


def predictor(name: str, size: Size, seed: int) -> list[tuple[str, Any]]:
    """pipe1: logistic regression. pipe2: LightGBM. pipe3: its leaves into a factorization machine."""
    if name == "pipe1":
        return [("logistic", LogisticRegression(max_iter=1000))]
    if name == "pipe2":
        from lightgbm import LGBMClassifier

        model = LGBMClassifier(
            n_estimators=size.num_trees,
            num_leaves=size.num_leaves,
            learning_rate=size.learning_rate,
            random_state=seed,
            n_jobs=size.num_threads or None,
            deterministic=True,
            verbose=-1,
        )
        return [("lightgbm", model)]
    if name == "pipe3":
        leaves = LeafEncoder(size.num_trees, size.num_leaves, size.learning_rate, seed, size.num_threads)
        machine = FactorizationMachine(
            size.rank, size.fm_learning_rate, epochs=size.fm_epochs, random_state=seed, device=size.device
        )
        return [("leaves", leaves), ("machine", machine)]
    raise ValueError(f"pipeline must be one of {', '.join(PIPELINES)}, not {name!r}")


def pipeline(before: str, after: str, dataset: Dataset, size: Size | None = None, seed: int = 0) -> Pipeline:
    """One of the nine, not fitted."""
    return Pipeline([("preprocessing", preprocessing(before, dataset)), *predictor(after, size or Size(), seed)])
