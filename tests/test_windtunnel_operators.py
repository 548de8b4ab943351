"""Operators of numbers as networks: each of the dissertation's table 5.1 against scikit-learn."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="pip install '.[windtunnel]'")
lightgbm = pytest.importorskip("lightgbm", reason="pip install '.[windtunnel]'")
xgboost = pytest.importorskip("xgboost", reason="pip install '.[windtunnel]'")

from sklearn.cluster import KMeans  # noqa: E402
from sklearn.decomposition import PCA, IncrementalPCA, TruncatedSVD  # noqa: E402
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis  # noqa: E402
from sklearn.ensemble import RandomForestClassifier  # noqa: E402
from sklearn.feature_selection import SelectKBest  # noqa: E402
from sklearn.linear_model import (  # noqa: E402
    Lasso,
    LinearRegression,
    LogisticRegression,
    OrthogonalMatchingPursuitCV,
    PoissonRegressor,
    Ridge,
    RidgeClassifier,
    SGDClassifier,
    TweedieRegressor,
)
from sklearn.naive_bayes import BernoulliNB, CategoricalNB, ComplementNB, GaussianNB, MultinomialNB  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import (  # noqa: E402
    Binarizer,
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    RobustScaler,
    StandardScaler,
)
from sklearn.svm import SVC, SVR, LinearSVC, LinearSVR  # noqa: E402
from translations import DIGITS, EXACT, IRIS, MOST, WINE, assert_same, scores  # noqa: E402

from models.tabular.factorization_machine import FactorizationMachine, MatrixFactorization  # noqa: E402
from systems.windtunnel.base import Form  # noqa: E402
from systems.windtunnel.translate import TRANSFORMERS, translate  # noqa: E402

TWO = (WINE[0][:130], WINE[1][:130])

CLASSIFIERS = [
    LogisticRegression(),
    RidgeClassifier(),
    LinearSVC(),
    SGDClassifier(random_state=0),
    SGDClassifier(loss="log_loss", random_state=0),
    SVC(),
    SVC(kernel="poly", degree=2, coef0=1.0),
    SVC(kernel="sigmoid", gamma=0.01),
    SVC(kernel="linear"),
    GaussianNB(),
    BernoulliNB(),
    LinearDiscriminantAnalysis(),
]
TREES = [
    RandomForestClassifier(5, random_state=0),
    lightgbm.LGBMClassifier(n_estimators=5, verbose=-1),
    xgboost.XGBClassifier(n_estimators=5),
]


@pytest.mark.parametrize("data", [TWO, WINE], ids=["two classes", "three classes"])
@pytest.mark.parametrize("model", TREES, ids=lambda model: type(model).__name__)
def test_trees_behind_a_scaler_and_alone(model: Any, data: tuple[np.ndarray, np.ndarray]) -> None:
    """In float32 a scaler rounds otherwise than scikit-learn's, and a value on a threshold may go the other way."""
    x, y = data
    assert_same(make_pipeline(StandardScaler(), model).fit(x, y), x, forms=(EXACT,))
    single_precision = x.astype(np.float32).astype(np.float64)
    assert_same(model.fit(single_precision, y), single_precision)


@pytest.mark.parametrize("data", [TWO, WINE], ids=["two classes", "three classes"])
@pytest.mark.parametrize("model", CLASSIFIERS, ids=repr)
def test_classifiers(model: Any, data: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = data
    assert_same(make_pipeline(StandardScaler(), model).fit(x, y), x)


@pytest.mark.parametrize(
    "model",
    [
        LinearRegression(),
        Ridge(),
        Lasso(),
        LinearSVR(),
        SVR(),
        PoissonRegressor(),
        TweedieRegressor(power=1.5),
        TweedieRegressor(power=0),
        OrthogonalMatchingPursuitCV(),
    ],
    ids=repr,
)
def test_regressors(model: Any) -> None:
    x, y = WINE
    assert_same(make_pipeline(MinMaxScaler(), model).fit(x, y + x[:, 0]), x, atol=1e-3)


@pytest.mark.parametrize(
    "transformer",
    [
        StandardScaler(with_mean=False),
        StandardScaler(with_std=False),
        MinMaxScaler((-1, 2), clip=True),
        MaxAbsScaler(),
        RobustScaler(),
        Normalizer("l1"),
        Normalizer("l2"),
        Normalizer("max"),
        PCA(3),
        PCA(3, whiten=True),
        IncrementalPCA(3),
        TruncatedSVD(3),
        LinearDiscriminantAnalysis(n_components=2),
        LinearDiscriminantAnalysis(solver="eigen"),
        KMeans(4, n_init=1, random_state=0),
        SelectKBest(k=2),
    ],
    ids=repr,
)
def test_transformers(transformer: Any) -> None:
    x, y = IRIS
    model = make_pipeline(transformer, LogisticRegression()).fit(x, y)
    translation = translate(model)
    assert "kept" not in {line.became for line in translation.report} and len(translation.report) == 2
    assert_same(model, x, atol=1e-3)
    outside = x * 3 - 5  # beyond what was fitted, for limits
    np.testing.assert_allclose(scores(translate(model, EXACT), outside), model.decision_function(outside), atol=1e-8)


@pytest.mark.parametrize("objective", ["reg:squarederror", "count:poisson"])
def test_boosted_regressors(objective: str) -> None:
    x, y = WINE[0].astype(np.float32), WINE[1] + WINE[0][:, 0]
    assert_same(xgboost.XGBRegressor(n_estimators=5, objective=objective).fit(x, y), x)
    kind = {"reg:squarederror": "regression", "count:poisson": "poisson"}[objective]
    assert_same(lightgbm.LGBMRegressor(n_estimators=5, objective=kind, verbose=-1).fit(x, y), x)


def test_a_row_on_a_threshold_behind_a_scaler_goes_the_same_way_in_float64() -> None:
    """Trained on even numbers, a tree's thresholds are odd ones: every odd row is a tie that rounding decides."""
    x = np.arange(0.0, 1440.0, 2.0)[:, None]
    y = np.random.default_rng(0).integers(0, 2, len(x))
    rows = np.arange(0.0, 1440.0)[:, None]
    trees = lightgbm.LGBMClassifier(
        n_estimators=9, min_child_samples=2, verbose=-1, min_data_in_bin=1, max_bin=1024, n_jobs=1
    )
    differs_in_float32 = False
    for scaler in (StandardScaler(), RobustScaler(), MinMaxScaler(), MaxAbsScaler()):
        model = make_pipeline(scaler, trees).fit(x, y)
        want = model[-1].predict(model[:-1].transform(rows), raw_score=True)
        np.testing.assert_allclose(scores(translate(model, EXACT), rows)[:, 0], want, atol=1e-9)
        differs_in_float32 |= bool(abs(scores(translate(model), rows)[:, 0].numpy() - want).max() > MOST)
    assert differs_in_float32  # the rows hold ties


def test_rows_of_zeros_are_not_normalized() -> None:
    x = np.concatenate([IRIS[0], np.zeros((2, 4))])
    y = np.concatenate([IRIS[1], [0, 1]])
    for norm in ("l1", "l2", "max"):
        assert_same(make_pipeline(Normalizer(norm), LogisticRegression()).fit(x, y), x)
        translation = translate(
            make_pipeline(StandardScaler(with_mean=False), Normalizer(norm), LogisticRegression()).fit(x, y)
        )
        translation.network(*translation.inputs(x)).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in translation.network.parameters())


def test_counts_and_clusters() -> None:
    x, y = DIGITS
    for model in (MultinomialNB(), BernoulliNB(binarize=8.0), ComplementNB(), ComplementNB(norm=True), CategoricalNB()):
        assert_same(model.fit(x, y), x, atol=1e-3)
    clusters = KMeans(7, n_init=1, random_state=0).fit(x)
    for form in (EXACT, Form()):
        assert (scores(translate(clusters, form), x).argmax(1).numpy() == clusters.predict(x)).all()
    sharp, blurred = (translate(clusters, Form(is_soft=True, temperature=t, dtype=torch.float64)) for t in (1e-3, 1e6))
    assert scores(sharp, x).softmax(1).max(1).values.mean() > 0.999 > 0.2 > scores(blurred, x).softmax(1).max()


TABLE_5_1 = {
    "linear models": "LinearRegression Ridge Lasso ElasticNet LogisticRegression SGDClassifier SGDRegressor",
    "SVM": "LinearSVC LinearSVR SVC SVR NuSVC NuSVR",
    "normalizers": "StandardScaler MinMaxScaler MaxAbsScaler RobustScaler Normalizer",
    "PCA": "PCA TruncatedSVD",
    "LDA": "LinearDiscriminantAnalysis",
    "KMeans": "KMeans MiniBatchKMeans",
    "naive Bayes": "GaussianNB BernoulliNB MultinomialNB ComplementNB CategoricalNB",
    "random forest": "DecisionTreeClassifier DecisionTreeRegressor RandomForestClassifier RandomForestRegressor",
    "gradient boosting trees": "LGBMClassifier LGBMRegressor XGBClassifier XGBRegressor GradientBoostingClassifier "
    "GradientBoostingRegressor HistGradientBoostingClassifier HistGradientBoostingRegressor",
    "categorical encoders": "OneHotEncoder HashEncoder BinaryEncoder TwoHotEncoder TargetEncoder OnlineTargetEncoder",
    "matrix factorization": "MatrixFactorization",
    "factorization machine": "FactorizationMachine",
}


@pytest.mark.parametrize("row", TABLE_5_1)
def test_table_5_1_is_whole(row: str) -> None:
    """Each has a converter; what it gives is compared with the original in the tests of its family."""
    known = {name for _, name in TRANSFORMERS}
    assert set(TABLE_5_1[row].split()) - known == set()


def test_a_factorization_machine_is_its_formula() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 5)) * (rng.random((60, 5)) < 0.7)
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    model = FactorizationMachine(3, epochs=60, learning_rate=0.05, batch_size=20).fit(x, y)
    v, w = model.factors_, model.coef_
    pairs = [sum(v[i] @ v[j] * row[i] * row[j] for i in range(5) for j in range(i)) for row in x]
    np.testing.assert_allclose(model.decision_function(x), model.intercept_ + x @ w + pairs)
    assert model.score(x, y) > 0.9  # the label is a pair's sign: no linear model has it
    assert_same(model, x)


def test_matrix_factorization() -> None:
    rng = np.random.default_rng(0)
    x = np.stack([rng.integers(0, 12, 600), rng.integers(100, 109, 600)], 1)
    users, items = rng.normal(size=(12, 2)), rng.normal(size=(200, 2))
    y = (users[x[:, 0]] * items[x[:, 1]]).sum(1) + 3
    model = MatrixFactorization(4, epochs=200, learning_rate=0.02, batch_size=100).fit(x, y)
    assert model.score(x, y) > 0.9
    rows = np.concatenate([x, [[99, 100], [3, 7]]])
    assert_same(model, rows)


def test_a_category_that_naive_bayes_has_not_seen_is_refused() -> None:
    x = np.array([[0, 1], [1, 0], [2, 1], [0, 0]])
    model = CategoricalNB().fit(x, [0, 1, 1, 0])
    with pytest.raises(ValueError, match=r"categoricalnb \(CategoricalNB\) has not seen the category 5 of its column 0"):
        translate(model).inputs(np.array([[5, 0]]))


@pytest.mark.parametrize("last", [BernoulliNB(binarize=0.2), make_pipeline(Binarizer(threshold=0.2), LogisticRegression())])
def test_a_threshold_passes_gradients_on_where_it_is_soft_and_is_exact_all_the_same(last: Any) -> None:
    x, y = WINE
    model = make_pipeline(StandardScaler(), last).fit(x, y)
    hard, soft = (translate(model, Form(is_soft=is_soft, dtype=torch.float64)) for is_soft in (False, True))
    torch.testing.assert_close(scores(soft, x), scores(hard, x))
    for translation, flows in ((hard, False), (soft, True)):
        translation.network(*translation.inputs(x)).square().sum().backward()
        (scale,) = (p for name, p in translation.network.named_parameters() if name.endswith("scale"))
        assert (scale.grad is not None and bool(scale.grad.abs().sum() > 0)) == flows
