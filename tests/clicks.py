"""Rows of two fields and a number, and a pipeline over them, for the tests of WindTunnel as an estimator."""

from typing import Any

import lightgbm
import numpy as np
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.pipeline import Pipeline, make_pipeline

from models.tabular.encoders import TwoHotEncoder

FAST: dict[str, Any] = {"device": "cpu", "batch_size": 128, "max_epochs": 3, "learning_rate": 1e-3}


def clicks(rows: int, seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Two fields that matter together, and a number."""
    rng = np.random.default_rng(seed)
    x = pd.DataFrame({"user": rng.integers(0, 30, rows), "item": rng.integers(0, 20, rows), "hour": rng.normal(size=rows)})
    users, items = np.random.default_rng(9).normal(size=(30, 2)), np.random.default_rng(8).normal(size=(20, 2))
    taste = users @ items.T
    score = 3 * taste[x["user"], x["item"]] + np.sin(3 * x["hour"])
    return x, (score + rng.logistic(size=rows) > 0.3).to_numpy().astype(int)


def pipeline(last: Any = None) -> Pipeline:
    columns = ColumnTransformer([("ids", TwoHotEncoder(), ["user", "item"])], remainder="passthrough")
    return make_pipeline(columns, last or lightgbm.LGBMClassifier(n_estimators=10, num_leaves=8, verbose=-1, n_jobs=1))
