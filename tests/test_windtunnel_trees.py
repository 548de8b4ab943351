"""Trees of LightGBM, XGBoost and scikit-learn as tensors, against the libraries themselves."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from models.neural.embeddings import Embeddings
from models.neural.forests import ForestLeaves, HardForest, SoftForest
from models.neural.graph import Chain, Slot, Union
from models.neural.lookups import MODULUS, MOST_LEAVES, LookupForest
from models.neural.trees import TreeEnsemble, floored

pytest.importorskip("sklearn", reason="pip install '.[windtunnel]'")
lightgbm = pytest.importorskip("lightgbm", reason="pip install '.[windtunnel]'")
xgboost = pytest.importorskip("xgboost", reason="pip install '.[windtunnel]'")

from sklearn.ensemble import (  # noqa: E402
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
)
from sklearn.metrics import roc_auc_score  # noqa: E402
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor  # noqa: E402

from systems.windtunnel.base import Untranslatable  # noqa: E402
from systems.windtunnel.parse import lightgbm as lightgbm_trees  # noqa: E402
from systems.windtunnel.parse import sklearn_trees  # noqa: E402
from systems.windtunnel.parse import xgboost as xgboost_trees  # noqa: E402

MOST = 1e-4  # that a raw score may differ by


def table(seed: int, rows: int, has_missing: bool) -> np.ndarray:
    """Columns that are continuous, 0 and 1, of few values (ties), constant, mostly zero and huge; float32 holds all."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 6))
    x[:, 1] = x[:, 1] > 0
    x[:, 2] = np.round(x[:, 2])
    x[:, 3] = 7.0
    x[:, 4] *= rng.random(rows) > 0.6
    x[:, 5] *= 1e6
    if has_missing:
        x[rng.random(x.shape) < 0.15] = np.nan
    return x.astype(np.float32).astype(np.float64)


def label(seed: int, x: np.ndarray, classes: int) -> np.ndarray:
    known = np.nan_to_num(x)
    score = known[:, 0] + known[:, 1] * known[:, 2] + known[:, 4] + np.random.default_rng(seed).normal(size=len(x)) / 2
    y = np.digitize(score, np.quantile(score, np.arange(1, classes) / classes))
    return y


def unseen(seed: int, x: np.ndarray, has_missing: bool) -> np.ndarray:
    """Rows of training and new ones, with values on thresholds, zeros and infinities among them."""
    new = table(seed + 1, len(x), has_missing)
    new[0, 0], new[1, 5], new[2, 4] = np.inf, -np.inf, -0.0
    return np.concatenate([x, new])


def on_thresholds(ensemble: TreeEnsemble, x: np.ndarray) -> np.ndarray:
    """Rows of x with thresholds in their columns: the float32 at or below each, and the next one above it."""
    places = np.argwhere(ensemble.is_node)[:100]
    below = floored(ensemble.threshold, torch.float32).numpy()
    rows = x[np.arange(2 * len(places)) % len(x)].copy()
    for row, (tree, node) in zip(rows.reshape(-1, 2, x.shape[1]), places, strict=True):
        column, threshold = ensemble.feature[tree, node], below[tree, node]
        row[:, column] = threshold, np.nextafter(threshold, np.float32(np.inf))
    return rows


def hard_scores(ensemble: TreeEnsemble, x: np.ndarray, strategy: str, dtype: torch.dtype) -> np.ndarray:
    return HardForest(ensemble, strategy, dtype)(torch.from_numpy(x).to(dtype)).double().numpy()


def ranks(scores: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Of each score its place among the distinct values of `among`.

    Values within 1e-5 of the next are one, so that no rounding parts them.
    """
    values = np.unique(among)
    last = np.flatnonzero(np.diff(values) > 1e-5)
    return np.searchsorted((values[last] + values[last + 1]) / 2, scores)


def assert_equal_to(ensemble: TreeEnsemble, x: np.ndarray, want: np.ndarray) -> None:
    """Both strategies and the lookups in both precisions give the library's raw scores, and so its AUC."""
    want = np.asarray(want, dtype=np.float64).reshape(len(x), -1)
    side = np.random.default_rng(0).random(len(x)) + (want[:, 0] - want[:, 0].min()) / (np.ptp(want[:, 0]) + 1e-9) > 1
    for dtype in (torch.float32, torch.float64):
        forms = {strategy: hard_scores(ensemble, x, strategy, dtype) for strategy in ("gather", "traverse")}
        if (lookups := LookupForest.of(Slot(0), ensemble, dtype)) is not None:
            forms["lookups"] = lookups((torch.from_numpy(x).to(dtype),)).double().numpy()
        for name, scores in forms.items():
            np.testing.assert_allclose(scores, want, rtol=0, atol=MOST, err_msg=name)
            if 0 < side.sum() < len(side):
                area, own = (roc_auc_score(side, ranks(s[:, 0], want[:, 0])) for s in (scores, want))
                assert abs(area - own) <= MOST


cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "classes": st.sampled_from([2, 3]),
        "leaves": st.sampled_from([2, 7, 31]),
        "trees": st.sampled_from([1, 9]),
        "has_missing": st.booleans(),
        "is_strict": st.sampled_from([False, False, False, True]),  # few splits gain enough: trees of one leaf
    }
)


@given(
    cases,
    st.sampled_from([{}, {"zero_as_missing": True}, {"use_missing": False}, {"max_bin": 3}, {"extra_trees": True}]),
)
@examples(25)
def test_lightgbm(case: dict[str, int], options: dict[str, object]) -> None:
    x = table(case["seed"], 300, bool(case["has_missing"]))
    y = label(case["seed"], x, case["classes"])
    objective = {"objective": "binary"} if case["classes"] == 2 else {"objective": "multiclass", "num_class": 3}
    parameters = {
        **objective,
        **options,
        "num_leaves": case["leaves"],
        "verbose": -1,
        "num_threads": 1,
        "min_data_in_leaf": 5,
        "min_gain_to_split": 30.0 if case["is_strict"] else 0.0,
    }
    booster = lightgbm.train(parameters, lightgbm.Dataset(x, y), case["trees"])
    ensemble, link = lightgbm_trees.parse(booster, "LGBMClassifier")
    rows = unseen(case["seed"], x, has_missing=True)
    rows = np.concatenate([rows, on_thresholds(ensemble, rows)])
    assert_equal_to(ensemble, rows, booster.predict(rows, raw_score=True))
    predicted = link.predicted(torch.from_numpy(hard_scores(ensemble, rows, "gather", torch.float64))).numpy()
    want = booster.predict(rows)
    np.testing.assert_allclose(predicted if case["classes"] == 3 else predicted[:, 1], want, atol=1e-9)


@given(cases, st.sampled_from(["gbtree", "dart"]))
@examples(20)
def test_xgboost(case: dict[str, int], booster: str) -> None:
    x = table(case["seed"], 300, bool(case["has_missing"]))
    y = label(case["seed"], x, case["classes"])
    model = xgboost.XGBClassifier(
        n_estimators=case["trees"],
        max_leaves=case["leaves"],
        booster=booster,
        rate_drop=0.3,
        gamma=20.0 if case["is_strict"] else 0.0,
        n_jobs=1,
        seed=case["seed"],
    ).fit(x, y)
    ensemble, link = xgboost_trees.parse(model.get_booster(), "XGBClassifier")
    rows = unseen(case["seed"], x, has_missing=True)
    rows = np.concatenate([rows, on_thresholds(ensemble, rows)])
    rows[~np.isfinite(rows)] = np.nan  # XGBoost refuses infinities
    assert_equal_to(ensemble, rows, model.predict(rows, output_margin=True))
    predicted = link.predicted(torch.from_numpy(hard_scores(ensemble, rows, "traverse", torch.float64))).numpy()
    np.testing.assert_allclose(predicted, model.predict_proba(rows), atol=1e-5)


@given(cases, st.sampled_from(["tree", "forest", "boosting", "histogram", "regression tree", "extra trees"]))
@examples(25)
def test_sklearn(case: dict[str, int], kind: str) -> None:
    has_missing = bool(case["has_missing"]) and kind in ("tree", "forest", "histogram", "regression tree")
    x = table(case["seed"], 200, has_missing)
    y = label(case["seed"], x, case["classes"])
    leaves, trees, seed = case["leaves"], case["trees"], case["seed"]
    least = {"min_impurity_decrease": 0.1} if case["is_strict"] else {}
    model: Any
    if kind == "tree":
        model = DecisionTreeClassifier(max_leaf_nodes=leaves, random_state=seed, **least).fit(x, y)
        (ensemble, _), want = sklearn_trees.parse_tree(model, "tree"), model.predict_proba
    elif kind == "regression tree":
        model = DecisionTreeRegressor(random_state=seed, **least).fit(x, y)
        (ensemble, _), want = sklearn_trees.parse_tree(model, "tree"), model.predict
    elif kind == "forest":
        model = RandomForestClassifier(trees, max_leaf_nodes=leaves, random_state=seed, **least).fit(x, y)
        (ensemble, _), want = sklearn_trees.parse_forest(model, "forest"), model.predict_proba
    elif kind == "extra trees":
        model = ExtraTreesRegressor(trees, max_leaf_nodes=leaves, random_state=seed, **least).fit(x, y)
        (ensemble, _), want = sklearn_trees.parse_forest(model, "forest"), model.predict
    elif kind == "boosting":
        model = GradientBoostingClassifier(n_estimators=trees, max_leaf_nodes=leaves, random_state=seed, **least).fit(x, y)
        (ensemble, _), want = sklearn_trees.parse_gradient_boosting(model, "boosting"), model.decision_function
    else:
        model = HistGradientBoostingClassifier(max_iter=trees, max_leaf_nodes=leaves, min_samples_leaf=5).fit(x, y)
        (ensemble, _), want = sklearn_trees.parse_histogram_boosting(model, "boosting"), model.decision_function
    rows = unseen(seed, x, has_missing)
    rows = np.concatenate([rows, on_thresholds(ensemble, rows)])
    rows[np.isinf(rows)] = 0.0
    assert_equal_to(ensemble, rows, want(rows))


@pytest.mark.parametrize("loss", ["squared_error", "poisson"])
def test_histogram_regression_and_its_link(loss: str) -> None:
    x = table(0, 300, True)
    model = HistGradientBoostingRegressor(max_iter=5, loss=loss).fit(x, label(0, x, 3))
    ensemble, link = sklearn_trees.parse_histogram_boosting(model, "boosting")
    predicted = link.predicted(HardForest(ensemble, dtype=torch.float64)(torch.from_numpy(x)))
    np.testing.assert_allclose(predicted[:, 0].numpy(), model.predict(x), atol=1e-9)


@pytest.mark.parametrize("objective", ["regression", "poisson", "multiclassova", "cross_entropy_lambda"])
@pytest.mark.parametrize("boosting", ["gbdt", "rf"])
def test_lightgbm_objectives_and_their_links(objective: str, boosting: str) -> None:
    x = table(0, 300, False)
    y = label(0, x, 3 if objective == "multiclassova" else 2)
    parameters = {"objective": objective, "boosting": boosting, "bagging_freq": 1, "bagging_fraction": 0.7, "verbose": -1}
    booster = lightgbm.train({**parameters, **({"num_class": 3} if y.max() == 2 else {})}, lightgbm.Dataset(x, y), 7)
    ensemble, link = lightgbm_trees.parse(booster, "LightGBM")
    scores = HardForest(ensemble, dtype=torch.float64)(torch.from_numpy(x))
    np.testing.assert_allclose(scores.numpy().squeeze(), booster.predict(x, raw_score=True), atol=1e-9)
    np.testing.assert_allclose(link.predicted(scores).numpy().squeeze(), booster.predict(x), atol=1e-9)


def test_early_stopping_counts_the_best_rounds_only() -> None:
    x = table(0, 400, False)
    y = label(0, x, 2)
    model = xgboost.XGBClassifier(n_estimators=60, early_stopping_rounds=2, learning_rate=1.0)
    model.fit(x[:200], y[:200], eval_set=[(x[200:], y[200:])], verbose=False)
    assert model.best_iteration + 1 < 60
    ensemble, _ = xgboost_trees.parse(model.get_booster(), "XGBClassifier", model.best_iteration + 1)
    assert_equal_to(ensemble, x, model.predict(x, output_margin=True))


def test_one_leaf_and_constant_features() -> None:
    x = np.ones((50, 3))
    booster = lightgbm.train({"objective": "binary", "verbose": -1}, lightgbm.Dataset(x, np.arange(50) % 2), 3)
    ensemble, _ = lightgbm_trees.parse(booster, "LightGBM")
    assert ensemble.num_nodes.sum() == 0 and ensemble.depth == 0
    assert_equal_to(ensemble, x, booster.predict(x, raw_score=True))
    soft = SoftForest(ensemble, temperature=1e-3, dropout=0.0)(torch.from_numpy(x))
    np.testing.assert_allclose(soft.detach().numpy()[:, 0], booster.predict(x, raw_score=True), atol=MOST)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"linear_tree": True}, "linear models in its leaves"), ({"categorical_feature": [2]}, "splits by categories")],
)
def test_what_lightgbm_has_beyond_is_refused_by_name(options: dict[str, object], words: str) -> None:
    x = np.abs(table(0, 300, False))
    parameters = {"objective": "binary", "verbose": -1, "min_data_per_group": 1, "cat_smooth": 0.0, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        booster = lightgbm.train(parameters, lightgbm.Dataset(x, (x[:, 2] == 1).astype(int)), 3)
    with pytest.raises(Untranslatable, match=f"^LGBMClassifier.*{words}"):
        lightgbm_trees.parse(booster, "LGBMClassifier")


def test_what_xgboost_has_beyond_is_refused_by_name() -> None:
    x = table(0, 100, False)
    linear = xgboost.XGBClassifier(booster="gblinear", n_estimators=2).fit(x, label(0, x, 2))
    with pytest.raises(Untranslatable, match="XGBClassifier has no trees: its booster is gblinear"):
        xgboost_trees.parse(linear.get_booster(), "XGBClassifier")
    hinge = xgboost.XGBClassifier(objective="binary:hinge", n_estimators=2).fit(x, label(0, x, 2))
    with pytest.raises(Untranslatable, match="objective binary:hinge"):
        xgboost_trees.parse(hinge.get_booster(), "XGBClassifier")
    initial = GradientBoostingRegressor(init=DecisionTreeRegressor(), n_estimators=2).fit(x, x[:, 0])
    with pytest.raises(Untranslatable, match="begins with DecisionTreeRegressor"):
        sklearn_trees.parse_gradient_boosting(initial, "GradientBoostingRegressor")


def test_leaves_are_those_the_library_says() -> None:
    x = table(3, 200, True)
    booster = lightgbm.train({"objective": "binary", "verbose": -1, "num_leaves": 6}, lightgbm.Dataset(x, label(3, x, 2)), 4)
    ensemble, _ = lightgbm_trees.parse(booster, "LightGBM")
    values = ensemble.value[:, :, 0]
    for strategy in ("gather", "traverse"):
        leaves = ForestLeaves(HardForest(ensemble.without_outputs(), strategy), ensemble)(torch.from_numpy(x))
        assert leaves.shape == (200, ensemble.num_leaves.sum()) and torch.equal(leaves.sum(1), torch.full((200,), 4.0))
        chosen = leaves.numpy() @ np.concatenate([row[:n] for row, n in zip(values, ensemble.num_leaves, strict=True)])
        np.testing.assert_allclose(chosen, booster.predict(x, raw_score=True), atol=MOST)


@given(st.floats(-1e30, 1e30), st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_rounded_threshold_parts_float32_as_the_exact_one(threshold: float, x: float) -> None:
    rounded = float(floored(np.array([threshold]), torch.float32))
    assert (x <= rounded) == (x <= threshold)
    assert (np.float32(threshold) <= rounded) == (float(np.float32(threshold)) <= threshold)


def test_masks_of_one_leaf_leave_different_remainders() -> None:
    masks = (np.uint64(1) << np.arange(MOST_LEAVES, dtype=np.uint64)).view(np.int64)
    assert masks[-1] < 0 and len(set((torch.from_numpy(masks) % MODULUS).tolist())) == MOST_LEAVES
    assert all(len(set((torch.from_numpy(masks) % smaller).tolist())) < MOST_LEAVES for smaller in range(64, MODULUS))


@given(cases, st.sampled_from([torch.float32, torch.float64]), st.sampled_from(["lightgbm", "xgboost", "sklearn"]))
@examples(30)
def test_lookups_are_the_trees(case: dict[str, Any], dtype: torch.dtype, library: str) -> None:
    """Over numbers with ties, NaN and infinities and over the codes of ids, against every node evaluated by itself."""
    seed, rng = case["seed"], np.random.default_rng(case["seed"])
    numbers = table(seed, 300, library != "sklearn")
    ids = rng.integers(0, 9, (300, 2))
    codes = [rng.integers(0, 2, (9, 3)).astype(float), np.round(rng.normal(size=(9, 2)), 1)]
    x = np.concatenate([numbers, codes[0][ids[:, 0]], codes[1][ids[:, 1]]], 1)
    y = label(seed, numbers, 2)
    zero_is_missing = library == "lightgbm" and seed % 3 == 0
    if library == "lightgbm":
        parameters = {"objective": "binary", "verbose": -1, "num_leaves": 31, "num_threads": 1}
        if zero_is_missing:  # among the codes of ids; of numbers there are no tables then
            x[:, :6] = 7.0
            parameters["zero_as_missing"] = True
        ensemble, _ = lightgbm_trees.parse(lightgbm.train(parameters, lightgbm.Dataset(x, y), 8), "LightGBM")
    elif library == "xgboost":
        model = xgboost.XGBClassifier(n_estimators=6, max_depth=5, n_jobs=1).fit(x, y)
        ensemble, _ = xgboost_trees.parse(model.get_booster(), "XGBoost", None)
    else:
        forest = RandomForestClassifier(6, max_leaf_nodes=40, random_state=seed).fit(x, y)
        ensemble, _ = sklearn_trees.parse_forest(forest, "forest")
    embeddings = Embeddings(codes, dtype)
    lookups = LookupForest.of(Union([Slot(0), Chain(Slot(1), embeddings)]), ensemble, dtype)
    if len(np.unique(ensemble.feature[ensemble.is_node])) == 0:
        assert lookups is None
        return
    assert lookups is not None
    new = torch.from_numpy(unseen(seed, numbers, library != "sklearn")).to(dtype)
    if library == "sklearn":
        new = new.nan_to_num()
    other = torch.from_numpy(rng.integers(0, 9, (len(new), 2)))
    want = HardForest(ensemble, dtype=dtype)(torch.cat([new, embeddings(other)], 1))
    torch.testing.assert_close(lookups((new, other)), want.detach(), rtol=0, atol=MOST)


def test_what_no_mask_can_hold_is_left_to_the_trees() -> None:
    """More than 64 leaves, 0 that is missing among numbers, parts of unknown width, more fields than nodes a tree."""
    x = table(2, 3000, False)
    y = label(2, x, 2)

    def parsed(rounds: int = 3, **parameters: Any) -> TreeEnsemble:
        parameters = {"objective": "binary", "verbose": -1, "min_data_in_leaf": 2, "num_threads": 1, **parameters}
        return lightgbm_trees.parse(lightgbm.train(parameters, lightgbm.Dataset(x, y), rounds), "LightGBM")[0]

    assert LookupForest.of(Slot(0), parsed(num_leaves=64), torch.float32) is not None
    assert LookupForest.of(Slot(0), parsed(num_leaves=65), torch.float32) is None
    assert LookupForest.of(Slot(0), parsed(num_leaves=20, zero_as_missing=True), torch.float32) is None
    assert LookupForest.of(Union([Slot(0), Slot(1)]), parsed(num_leaves=20), torch.float32) is None
    x = np.random.default_rng(0).normal(size=(3000, 6))
    y = (x.sum(1) > 0).astype(int)
    stumps = parsed(60, num_leaves=2, feature_fraction=0.4)
    assert len(np.unique(stumps.feature[stumps.is_node])) > stumps.shape[1]
    assert LookupForest.of(Slot(0), stumps, torch.float32) is None
