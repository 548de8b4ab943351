"""Odd values, categories and settings of a pipeline: what it says of them WindTunnel says too, or refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("sklearn", reason="pip install '.[windtunnel]'")
lightgbm = pytest.importorskip("lightgbm", reason="pip install '.[windtunnel]'")
xgboost = pytest.importorskip("xgboost", reason="pip install '.[windtunnel]'")

from sklearn.compose import ColumnTransformer  # noqa: E402
from sklearn.decomposition import PCA  # noqa: E402
from sklearn.ensemble import HistGradientBoostingClassifier  # noqa: E402
from sklearn.feature_extraction.text import TfidfVectorizer  # noqa: E402
from sklearn.linear_model import LogisticRegression  # noqa: E402
from sklearn.naive_bayes import BernoulliNB  # noqa: E402
from sklearn.pipeline import FeatureUnion, make_pipeline  # noqa: E402
from sklearn.preprocessing import (  # noqa: E402
    FunctionTransformer,
    KBinsDiscretizer,
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    QuantileTransformer,
    StandardScaler,
    TargetEncoder,
)
from sklearn.svm import SVC  # noqa: E402
from sklearn.tree import DecisionTreeClassifier  # noqa: E402

from models.tabular.encoders import BinaryEncoder, OnlineTargetEncoder, TwoHotEncoder  # noqa: E402
from systems.windtunnel import WindTunnel  # noqa: E402
from systems.windtunnel.base import Untranslatable  # noqa: E402

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(300, 4))
Y = (X[:, 0] + X[:, 1] / 2 + DRAW.normal(size=300) / 3 > 0).astype(int)
X_OF_WORDS = pd.DataFrame({"said": [f"w{i % 3} w{i % 5}" for i in range(300)], "number": X[:, 0], "more": X[:, 1]})
HOLED = np.where(DRAW.random(X.shape) < 0.2, np.nan, X)


def assert_as_pipeline(fitted: Any, x: Any) -> None:
    tunnel = WindTunnel(fitted)
    assert (tunnel.predict(x) == fitted.predict(x)).all()
    np.testing.assert_allclose(tunnel.predict_proba(x), fitted.predict_proba(x), atol=1e-6)


@pytest.mark.parametrize(
    "inner", [(StandardScaler(), MinMaxScaler()), (PolynomialFeatures(), KBinsDiscretizer(3, encode="ordinal"))], ids=repr
)
def test_weights_of_transformers_count(inner: tuple[Any, Any]) -> None:
    branches = [("a", inner[0], [0, 1]), ("b", inner[1], [2, 3])]
    weighted = ColumnTransformer(branches, transformer_weights={"a": 10.0, "b": 0.1})
    assert_as_pipeline(make_pipeline(weighted, LogisticRegression()).fit(X, Y), X)


@pytest.mark.parametrize("categories", [[5, 10**17, 10**17 + 64], [2.5, 1e300, np.nan], list(range(5))], ids=repr)
@pytest.mark.parametrize(
    "encoder",
    [
        OneHotEncoder(handle_unknown="ignore"),
        OneHotEncoder(handle_unknown="infrequent_if_exist"),
        OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1, encoded_missing_value=-7),
    ],
    ids=repr,
)
def test_a_number_that_is_no_category_is_none_of_them(encoder: Any, categories: list[Any]) -> None:
    x = np.array(categories)[np.arange(300) % len(categories)][:, None]
    fitted = make_pipeline(encoder, LogisticRegression()).fit(x, np.arange(300) % len(categories) == 0)
    other = np.where(np.arange(300)[:, None] < 30, 777, x)
    assert_as_pipeline(fitted, x)
    assert_as_pipeline(fitted, other)


@pytest.mark.parametrize("known", [["a", "b", None], ["a", "b", np.nan], ["a", None, np.nan], [1, 2, None], [1.5, np.nan]])
@pytest.mark.parametrize("encoder", [OneHotEncoder(handle_unknown="ignore"), TargetEncoder()], ids=repr)
def test_none_is_one_category_and_nan_another(encoder: Any, known: list[Any]) -> None:
    x = np.empty((300, 1), dtype=object)
    x[:, 0] = [known[i % len(known)] for i in range(300)]
    y = (np.arange(300) % len(known) == len(known) - 1) ^ (np.arange(300) % 7 == 0)
    fitted = make_pipeline(encoder, LogisticRegression()).fit(x, y)
    assert_as_pipeline(fitted, x)
    for odd in (None, np.nan, np.float32(np.nan), pd.NA, "other"):
        x[:20, 0] = [odd] * 20
        assert_as_pipeline(fitted, x)


@pytest.mark.parametrize("known", [["a", "b", None], ["a", None, np.nan], [1, 2, None, np.nan]])
@pytest.mark.parametrize("encoder", [BinaryEncoder(), TwoHotEncoder(), OnlineTargetEncoder()], ids=repr)
def test_our_own_encoders_know_them_apart_too(encoder: Any, known: list[Any]) -> None:
    x = np.empty((300, 1), dtype=object)
    x[:, 0] = [known[i % len(known)] for i in range(300)]
    fitted = make_pipeline(encoder, LogisticRegression()).fit(x, np.arange(300) % len(known) == 0)
    codes = encoder.transform(x)
    assert len(np.unique(codes, axis=0)) >= 2 and len(encoder.categories_[0]) == len(known)
    assert (encoder.places_[0](x[:, 0]) > 0).all()
    assert_as_pipeline(fitted, x)


@pytest.mark.parametrize("rows", [slice(None), slice(1)], ids=["all rows", "one row"])
@pytest.mark.parametrize("columns", ["said", 0], ids=repr)
def test_a_column_that_is_named_alone_is_no_table(columns: str | int, rows: slice) -> None:
    """As a vectorizer of texts takes it."""
    inner = [("words", TfidfVectorizer(), columns), ("numbers", StandardScaler(), ["number", "more"])]
    fitted = make_pipeline(ColumnTransformer(inner), LogisticRegression()).fit(X_OF_WORDS, Y)
    assert_as_pipeline(fitted, X_OF_WORDS[rows])


@pytest.mark.parametrize("encoder", [OneHotEncoder(), OrdinalEncoder()], ids=repr)
def test_dates_are_refused_as_categories(encoder: Any) -> None:
    dates = np.array(["2020-01-01", "2021-01-01"], dtype="datetime64[ns]")[np.arange(300) % 2][:, None]
    fitted = make_pipeline(encoder, DecisionTreeClassifier()).fit(dates, Y)
    with pytest.raises(Untranslatable, match="encodes dates, which have no translation: make words or numbers of them"):
        WindTunnel(fitted).predict(dates)


@pytest.mark.parametrize("norm", ["l1", "l2", "max"])
def test_tiny_rows_are_not_normalized(norm: str) -> None:
    fitted = make_pipeline(Normalizer(norm), LogisticRegression()).fit(X, Y)
    for power in (-12, -14, -15, -16, -40):
        assert_as_pipeline(fitted, X * 10.0**power)


@pytest.mark.parametrize(
    "steps",
    [
        [OneHotEncoder()],
        [OneHotEncoder(), StandardScaler(with_mean=False)],
        [FeatureUnion([("a", OneHotEncoder()), ("b", "passthrough")])],
        [make_pipeline("passthrough", ColumnTransformer([("a", OneHotEncoder(), [0])]))],
        [KBinsDiscretizer(5)],
    ],
    ids=repr,
)
def test_zeros_that_xgboost_misses_are_refused(steps: list[Any]) -> None:
    """Of a sparse matrix those that are not there are missing values to it."""
    x = np.arange(300)[:, None] % 9
    fitted = make_pipeline(*steps, xgboost.XGBClassifier(n_estimators=3)).fit(x, Y)
    with pytest.raises(Untranslatable, match="XGBClassifier takes the zeros of a sparse matrix for missing values"):
        WindTunnel(fitted).predict(x)
    for last in (xgboost.XGBClassifier(n_estimators=3), lightgbm.LGBMClassifier(n_estimators=3, verbose=-1)):
        is_dense = last.__module__.startswith("xgboost")
        encoder = ColumnTransformer([("a", OneHotEncoder(), [0])], sparse_threshold=0.3 * (not is_dense))
        assert_as_pipeline(make_pipeline(encoder, last).fit(x, Y), x)


@pytest.mark.parametrize("missing", [-999.0, 0.0])
def test_another_missing_value_of_xgboost_is_refused(missing: float) -> None:
    fitted = xgboost.XGBClassifier(n_estimators=3, missing=missing).fit(np.round(X), Y)
    with pytest.raises(Untranslatable, match=f"XGBClassifier.* takes {missing} for a missing value.*: NaN has one"):
        WindTunnel(fitted).predict(X)


def test_margins_that_xgboost_takes_for_probabilities_are_refused() -> None:
    fitted = xgboost.XGBClassifier(n_estimators=3, objective="binary:logitraw").fit(X, Y)
    with pytest.raises(Untranslatable, match="has the objective binary:logitraw, whose link has no translation"):
        WindTunnel(fitted).predict(X)


def test_one_against_the_rest_stays_as_lightgbm_has_it() -> None:
    model = lightgbm.LGBMClassifier(n_estimators=5, objective="multiclassova", verbose=-1)
    assert_as_pipeline(model.fit(X, np.digitize(X[:, 0], [-0.7, 0.7])), X)


@pytest.mark.parametrize("model", [DecisionTreeClassifier(), BernoulliNB()], ids=repr)
def test_of_one_class_every_row_is(model: Any) -> None:
    assert_as_pipeline(model.fit(X, np.full(300, "only")), X)


@pytest.mark.parametrize("breaks_ties", [False, True])
def test_votes_that_tie_are_broken_as_the_machine_breaks_them(breaks_ties: bool) -> None:
    y = np.array(["b", "c", "a"])[np.arange(300) % 3]  # nothing to learn: votes go round
    fitted = SVC(break_ties=breaks_ties).fit(X[:, :2], y)
    other = DRAW.normal(size=(2000, 2))
    assert (WindTunnel(fitted).predict(other) == fitted.predict(other)).all()
    scores = fitted.decision_function(other)
    assert ((scores.round() == 1).all(1)).any(), "no votes tie"


def test_a_machine_of_sparse_rows_is_refused() -> None:
    x = (np.arange(300) % 5)[:, None]
    for y in (Y, np.arange(300) % 3):
        with pytest.raises(Untranslatable, match=r"SVC.* was fitted to sparse rows"):
            WindTunnel(make_pipeline(OneHotEncoder(), SVC()).fit(x, y)).predict(x)


@pytest.mark.parametrize(
    "steps",
    [
        [FunctionTransformer(np.tanh)],
        [QuantileTransformer(n_quantiles=10), StandardScaler()],
        [FeatureUnion([("a", StandardScaler()), ("b", "passthrough"), ("c", "drop")])],
        ["passthrough", StandardScaler()],
        [make_pipeline("passthrough")],
    ],
    ids=repr,
)
def test_missing_values_go_where_the_pipeline_takes_them(steps: list[Any]) -> None:
    assert_as_pipeline(make_pipeline(*steps, HistGradientBoostingClassifier(max_iter=5)).fit(HOLED, Y), HOLED)


@pytest.mark.parametrize(
    "steps",
    [
        [StandardScaler(), PCA(2)],
        [StandardScaler(), Normalizer()],
        [ColumnTransformer([("a", MinMaxScaler(), [0]), ("b", StandardScaler(), [1, 2, 3])]), PCA(2)],
        [make_pipeline(QuantileTransformer(n_quantiles=10)), PCA(2)],
    ],
    ids=repr,
)
def test_missing_values_are_refused_where_a_later_step_refuses_them(steps: list[Any]) -> None:
    """Though the trees at the end would take them."""
    fitted = make_pipeline(*steps, HistGradientBoostingClassifier(max_iter=5)).fit(X, Y)
    for one in (fitted, WindTunnel(fitted)):
        with pytest.raises(ValueError, match="Input X contains NaN"):
            one.predict(HOLED)


@pytest.mark.parametrize("level", [1, 4])
@pytest.mark.parametrize(
    "model", [HistGradientBoostingClassifier(max_iter=5), DecisionTreeClassifier(max_depth=3)], ids=repr
)
def test_trees_are_tuned_whose_encoder_makes_nan_of_what_is_missing(model: Any, level: int) -> None:
    x = np.array(["a", "b", np.nan], dtype=object)[np.arange(300) % 3][:, None]
    y = (np.arange(300) % 3 == 2) ^ (np.arange(300) % 11 == 0)
    fitted = make_pipeline(OrdinalEncoder(), model).fit(x, y)
    tunnel = WindTunnel(fitted, level=level, max_epochs=2, device="cpu").fine_tune(x, y)
    assert tunnel.score(x, y) == fitted.score(x, y) and np.isfinite(tunnel.predict_proba(x)).all()


def test_nan_is_on_no_side_of_a_threshold() -> None:
    fitted = make_pipeline(QuantileTransformer(n_quantiles=10), BernoulliNB(binarize=0.5)).fit(X, Y)
    for one in (fitted, WindTunnel(fitted)):
        with pytest.raises(ValueError, match="NaN"):
            one.predict(HOLED)
