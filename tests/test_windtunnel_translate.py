"""Fitted pipelines as networks: every operator of the dissertation's table 5.1 against scikit-learn."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

pytest.importorskip("sklearn", reason="pip install '.[windtunnel]'")
lightgbm = pytest.importorskip("lightgbm", reason="pip install '.[windtunnel]'")
xgboost = pytest.importorskip("xgboost", reason="pip install '.[windtunnel]'")

from sklearn.cluster import KMeans  # noqa: E402
from sklearn.compose import ColumnTransformer  # noqa: E402
from sklearn.datasets import load_digits, load_iris, load_wine  # noqa: E402
from sklearn.decomposition import PCA, IncrementalPCA, TruncatedSVD  # noqa: E402
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis  # noqa: E402
from sklearn.ensemble import RandomForestClassifier  # noqa: E402
from sklearn.exceptions import NotFittedError  # noqa: E402
from sklearn.feature_selection import SelectKBest  # noqa: E402
from sklearn.impute import SimpleImputer  # noqa: E402
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
from sklearn.neighbors import KNeighborsClassifier  # noqa: E402
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline  # noqa: E402
from sklearn.preprocessing import (  # noqa: E402
    Binarizer,
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
    RobustScaler,
    StandardScaler,
    TargetEncoder,
)
from sklearn.svm import SVC, SVR, LinearSVC, LinearSVR  # noqa: E402

from models.tabular.encoders import (  # noqa: E402
    BinaryEncoder,
    Bucketizer,
    HashEncoder,
    OnlineTargetEncoder,
    TwoHotEncoder,
)
from models.tabular.factorization_machine import FactorizationMachine, MatrixFactorization  # noqa: E402
from models.tabular.leaves import LeafEncoder  # noqa: E402
from systems.windtunnel.base import Form, Untranslatable  # noqa: E402
from systems.windtunnel.inputs import Kept  # noqa: E402
from systems.windtunnel.translate import TRANSFORMERS, Translation, translate  # noqa: E402

MOST = 1e-4  # that a raw score may differ by
EXACT = Form(dtype=torch.float64)


def scores(translation: Translation, x: Any) -> torch.Tensor:
    translation.network.eval()
    with torch.no_grad():
        return translation.network(*translation.inputs(x)).double()


def predicted(translation: Translation, x: Any) -> np.ndarray:
    return translation.link.predicted(scores(translation, x)).numpy()


def wanted(model: Any, x: Any) -> np.ndarray:
    """What the pipeline itself says, in the form of the network's raw scores or predictions."""
    if hasattr(model, "decision_function"):
        return np.asarray(model.decision_function(x))
    return np.asarray(model.predict_proba(x) if hasattr(model, "predict_proba") else model.predict(x))


def assert_same(model: Any, x: Any, atol: float = MOST, forms: tuple[Form, ...] = (EXACT, Form())) -> None:
    """Raw scores where there are any, probabilities where there are, in both precisions."""
    for form in forms:
        translation = translate(model, form)
        raw = scores(translation, x).numpy()
        atol_here = 1e-6 if form is EXACT else atol  # XGBoost itself adds in float32
        if hasattr(model, "decision_function"):
            want = np.asarray(model.decision_function(x)).reshape(len(x), -1)
            np.testing.assert_allclose(raw, want, atol=atol_here, rtol=1e-5)
        if hasattr(model, "predict_proba") and translation.link.has_probabilities:
            np.testing.assert_allclose(predicted(translation, x), model.predict_proba(x), atol=atol_here)
        elif not hasattr(model, "decision_function"):
            np.testing.assert_allclose(predicted(translation, x)[:, 0], model.predict(x), atol=atol_here, rtol=1e-5)


IRIS, WINE, DIGITS = (load(return_X_y=True) for load in (load_iris, load_wine, load_digits))
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


def categories(rows: int = 400, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    """Two columns of words, one of numbers that name, one of numbers with NaN; and a label."""
    rng = np.random.default_rng(seed)
    x = pd.DataFrame(
        {
            "carrier": rng.choice(["AA", "B6", "DL", "UA"], rows),
            "origin": rng.choice([f"airport {i}" for i in range(40)], rows, p=np.arange(40, 0, -1) / 820),
            "month": rng.integers(1, 13, rows),
            "distance": np.where(rng.random(rows) < 0.1, np.nan, rng.normal(size=rows).astype(np.float32)),
        }
    )
    score = (x["carrier"] == "AA") + (x["month"] > 6) + np.nan_to_num(x["distance"]) + rng.normal(size=rows)
    return x, (score > 0.8).to_numpy().astype(int)


def unseen(x: pd.DataFrame) -> pd.DataFrame:
    """Rows with categories that no fit has seen."""
    return pd.concat([x, x.head(3).assign(carrier="ZZ", origin="nowhere", month=99)], ignore_index=True)


NAMED = ["carrier", "origin", "month"]


@pytest.mark.parametrize(
    "encoder",
    [
        OneHotEncoder(handle_unknown="ignore"),
        OneHotEncoder(handle_unknown="infrequent_if_exist", min_frequency=9, sparse_output=False),
        OneHotEncoder(drop="if_binary", handle_unknown="ignore"),
        OneHotEncoder(drop="first", handle_unknown="ignore"),
        OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1),
        TargetEncoder(random_state=0),
        BinaryEncoder(),
        BinaryEncoder(min_count=9),
        TwoHotEncoder(keep_share=0.9),
        HashEncoder(num_columns=7),
        OnlineTargetEncoder(min_count=3),
    ],
    ids=repr,
)
def test_encoders_and_categories_not_seen(encoder: Any) -> None:
    x, y = categories()
    columns = ColumnTransformer([("encoded", encoder, NAMED), ("number", SimpleImputer(), ["distance"])])
    model = make_pipeline(columns, LogisticRegression()).fit(x, y)
    assert_same(model, unseen(x))
    report = {line.operator.split(" (")[0]: line.became for line in translate(model).report}
    assert report == {"encoded": "Embeddings", "number": "kept", "logisticregression": "Linear"}


@pytest.mark.parametrize("behind", [[], [PolynomialFeatures(2)]], ids=["at once", "behind another that stays"])
def test_branches_that_all_stay_on_the_host_are_one_input(behind: list[Any]) -> None:
    """Each is called by itself where the network is next; where another operator is, the whole is called."""
    x, y = categories()
    number = make_pipeline(SimpleImputer(), FeatureUnion([("bins", Bucketizer(5)), ("same", "passthrough")]))
    weighed = FeatureUnion([("bins", Bucketizer(3)), ("same", "passthrough")], transformer_weights={"bins": 2.0})
    columns = ColumnTransformer([("number", number, ["distance"]), ("weighed", weighed, ["month"])], remainder="drop")
    model = make_pipeline(columns, *behind, lightgbm.LGBMClassifier(n_estimators=4, verbose=-1)).fit(x, y)
    translation = translate(model, EXACT)
    assert len(translation.sources) == 1 and translation.report[-1].became == "LookupForest"
    stays = any(isinstance(step, Kept) and "ColumnTransformer" in step.name for step in translation.sources[0].steps)
    assert stays == bool(behind)
    assert_same(model, x)


def test_an_encoder_that_refuses_what_it_has_not_seen_refuses_here_too() -> None:
    x, y = categories()
    model = make_pipeline(ColumnTransformer([("encoded", OneHotEncoder(), NAMED)]), LogisticRegression()).fit(x, y)
    assert_same(model, x)
    with pytest.raises(ValueError, match=r"encoded \(OneHotEncoder\) has not seen the category 'ZZ' of its column 0"):
        translate(model).inputs(unseen(x))


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


def test_the_codes_are_those_of_the_figure() -> None:
    """Figure 5.3: binary digits, two digits one-hot, and rows of their own for what a hash lets collide."""
    column = np.array([["a"], ["b"], ["c"], ["d"], ["e"]])
    assert BinaryEncoder().fit_transform(column).tolist() == [[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1], [1, 0, 1]]
    two_hot = TwoHotEncoder().fit_transform(column)
    assert two_hot.tolist() == [
        [1, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 0, 1],
        [0, 1, 0, 1, 0, 0],
        [0, 1, 0, 0, 1, 0],
    ]
    y = np.array([0, 1, 0, 1, 1] * 20)
    x = np.tile(column, (20, 1))
    model = make_pipeline(HashEncoder(num_columns=2), LogisticRegression()).fit(x, y)
    codes = model[0].codes_[0][1:]
    first, second = next((i, j) for i in range(5) for j in range(i) if (codes[i] == codes[j]).all() and y[i] != y[j])
    translation = translate(model)
    optimizer = torch.optim.Adam(translation.network.parameters(), 1e-2)
    torch.nn.functional.binary_cross_entropy_with_logits(
        translation.network(*translation.inputs(x))[:, 0], torch.tensor(y, dtype=torch.float32)
    ).backward()
    before = scores(translation, column)
    optimizer.step()
    after = scores(translation, column)
    assert before[first] == before[second] and after[first] != after[second]


def test_online_means_know_rows_before_alone() -> None:
    x, y = np.array([["a"], ["b"], ["a"], ["a"]]), np.array([1, 0, 0, 1])
    encoder = OnlineTargetEncoder()
    assert encoder.fit_transform(x, y)[:, 0].tolist() == [0.5, 0.5, 1.0, 0.5]
    np.testing.assert_allclose(encoder.transform(x), [[2 / 3, 0.75], [0.0, 0.25], [2 / 3, 0.75], [2 / 3, 0.75]])


def test_bins_hold_equal_shares() -> None:
    x = np.random.default_rng(0).normal(size=(3200, 1))
    counts = np.bincount(Bucketizer().fit_transform(x)[:, 0].astype(int))
    assert len(counts) == 32 and counts.min() >= 99 and counts.max() <= 101
    assert np.isnan(Bucketizer().fit(x).transform([[np.nan]])).all()


def full_pipeline(last: Any) -> Pipeline:
    """Branches within branches, kept operators in front, a passthrough, a union."""
    number = make_pipeline(SimpleImputer(), FeatureUnion([("scaled", StandardScaler()), ("binned", Bucketizer())]))
    columns = ColumnTransformer(
        [("two", TwoHotEncoder(), ["carrier", "origin"]), ("number", number, ["distance"]), ("dropped", "drop", ["month"])],
        remainder="passthrough",
        sparse_threshold=0,
    )
    return make_pipeline(columns, StandardScaler(), last)


@pytest.mark.parametrize(
    "last",
    [
        LogisticRegression(),
        lightgbm.LGBMClassifier(n_estimators=8, verbose=-1),
        make_pipeline(LeafEncoder(6, 5, num_threads=1), FactorizationMachine(3)),
        FactorizationMachine(4),
    ],
    ids=repr,
)
def test_whole_pipelines(last: Any) -> None:
    x, y = categories()
    assert_same(full_pipeline(last).fit(x, y), unseen(x))


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


def test_what_stands_behind_a_translated_operator_is_refused_with_both_names() -> None:
    x, y = categories()
    number = Pipeline([("scale", StandardScaler()), ("impute", SimpleImputer())])
    model = make_pipeline(ColumnTransformer([("number", number, ["distance"])]), LogisticRegression()).fit(x, y)
    with pytest.raises(Untranslatable, match=r"impute \(SimpleImputer\) .* stands behind scale \(StandardScaler\)"):
        translate(model)
    encoded = Pipeline([("ordinal", OrdinalEncoder()), ("one_hot", OneHotEncoder(handle_unknown="ignore"))])
    model = make_pipeline(ColumnTransformer([("names", encoded, NAMED)]), LogisticRegression()).fit(x, y)
    with pytest.raises(Untranslatable, match=r"one_hot \(OneHotEncoder\) .* stands behind ordinal \(OrdinalEncoder\)"):
        translate(model)


def test_other_refusals() -> None:
    x, y = IRIS
    with pytest.raises(Untranslatable, match=r"kneighborsclassifier \(KNeighborsClassifier\) has no translation"):
        translate(make_pipeline(StandardScaler(), KNeighborsClassifier()).fit(x, y))
    with pytest.raises(Untranslatable, match="pipeline ends in no predictor"):
        translate(make_pipeline(StandardScaler(), PCA(2)).fit(x))
    with pytest.raises(NotFittedError, match="Pipeline is not fitted"):
        translate(make_pipeline(StandardScaler(), LogisticRegression()))
    with pytest.raises(Untranslatable, match="several targets"):
        translate(Ridge().fit(x, np.stack([y, y], 1)))
    with pytest.raises(Untranslatable, match=r"svc \(SVC\) has the kernel"):
        translate(SVC(kernel=lambda a, b: a @ b.T).fit(x, y))

    class OwnRegression(LogisticRegression):
        """May do anything."""

    with pytest.raises(Untranslatable, match="OwnRegression"):
        translate(OwnRegression().fit(x, y))


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


@pytest.mark.parametrize("level", [1, 4])
def test_gradients_reach_the_encoders_behind_trees(level: int) -> None:
    x, y = categories()
    translation = translate(
        full_pipeline(lightgbm.LGBMClassifier(n_estimators=8, verbose=-1)).fit(x, y),
        Form(is_soft=True, level=level, dropout=0.0, dtype=torch.float64),
    )
    translation.network(*translation.inputs(x)).square().sum().backward()
    tables = [p for name, p in translation.network.named_parameters() if "tables" in name]
    assert len(tables) == 2 and all(p.grad is not None and p.grad.abs().sum() > 0 for p in tables)


def test_a_network_is_a_module_that_torch_exports() -> None:
    x, y = categories()
    translation = translate(full_pipeline(lightgbm.LGBMClassifier(n_estimators=8, verbose=-1)).fit(x, y))
    inputs = translation.inputs(x)
    exported = torch.export.export(translation.network.eval(), inputs)
    assert torch.equal(exported.module()(*inputs), translation.network(*inputs))
