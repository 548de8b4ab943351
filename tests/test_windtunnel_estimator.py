"""WindTunnel as an estimator: levels, scopes, starts, losses, saving, and what scikit-learn asks of an estimator."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="pip install '.[windtunnel]'")
lightgbm = pytest.importorskip("lightgbm", reason="pip install '.[windtunnel]'")

from clicks import FAST, clicks, pipeline  # noqa: E402
from sklearn.base import clone  # noqa: E402
from sklearn.compose import ColumnTransformer  # noqa: E402
from sklearn.datasets import load_diabetes, load_wine  # noqa: E402
from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier, RandomForestRegressor  # noqa: E402
from sklearn.exceptions import NotFittedError  # noqa: E402
from sklearn.impute import SimpleImputer  # noqa: E402
from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge  # noqa: E402
from sklearn.metrics import log_loss, roc_auc_score  # noqa: E402
from sklearn.model_selection import GridSearchCV, cross_val_score  # noqa: E402
from sklearn.naive_bayes import GaussianNB  # noqa: E402
from sklearn.neighbors import KNeighborsClassifier  # noqa: E402
from sklearn.pipeline import Pipeline, make_pipeline  # noqa: E402
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler  # noqa: E402
from sklearn.svm import SVC, LinearSVC  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

import systems.windtunnel as room  # noqa: E402
from models.tabular.encoders import TwoHotEncoder  # noqa: E402
from systems.windtunnel.base import Untranslatable  # noqa: E402
from systems.windtunnel.estimator import WindTunnel  # noqa: E402
from systems.windtunnel.fine_tuning import Diverged  # noqa: E402

WINE, DIABETES = load_wine(return_X_y=True), load_diabetes(return_X_y=True)
SHARES = (DIABETES[0], DIABETES[1] / 400)


@pytest.fixture(scope="module")
def fitted() -> Pipeline:
    return pipeline().fit(*clicks(3000, 0))


@pytest.mark.parametrize("last", [LogisticRegression(), Ridge()], ids=repr)
def test_scikit_learns_own_checks(last: Any) -> None:
    estimator = WindTunnel(make_pipeline(StandardScaler(), last), max_epochs=2, device="cpu")
    results = check_estimator(estimator, on_fail=None)
    failed = [(r["check_name"], repr(r["exception"])) for r in results if r["status"] == "failed"]
    assert failed == [] and sum(r["status"] == "passed" for r in results) > 40


def test_before_tuning_it_is_the_pipeline_and_after_it_is_better(fitted: Pipeline) -> None:
    x, y = clicks(3000, 1)
    tunnel = WindTunnel(fitted, temperature=0.3, **FAST | {"max_epochs": 15, "learning_rate": 3e-3})
    np.testing.assert_allclose(tunnel.predict_proba(x), fitted.predict_proba(x), atol=1e-4)
    assert (tunnel.predict(x) == fitted.predict(x)).all() and tunnel.score(x, y) == fitted.score(x, y)
    lines: list[str] = []
    tunnel.report = lines.append
    tunnel.fine_tune(*clicks(3000, 0))
    before, after = (roc_auc_score(y, model.predict_proba(x)[:, 1]) for model in (fitted, tunnel))
    assert after > before + 0.02
    chosen = tunnel.course_.chosen
    assert len(lines) == len(chosen.metrics) and chosen.metric == max(chosen.metrics)
    assert f"epoch {len(lines)} of at most 15" in lines[-1]
    torch.testing.assert_close(tunnel.module(*tunnel.inputs(x))[:, 0], torch.tensor(tunnel.decision_function(x)).float())


@pytest.mark.parametrize(("rate", "stays"), [(1e-9, True), (3e-3, False)])
def test_the_pipeline_stays_where_no_epoch_is_above_it_and_that_is_allowed(
    fitted: Pipeline, rate: float, stays: bool
) -> None:
    """Soft at a temperature of 1 the trees begin far below the pipeline, and a rate near 0 leaves them there."""
    options = FAST | {"learning_rate": rate, "max_epochs": 12}
    validation, rows = clicks(1000, 2), clicks(500, 3)[0]
    tunnel = WindTunnel(fitted, may_keep_pipeline=True, dropout=0.0, **options)
    tunnel.fine_tune(*clicks(3000, 0), validation=validation)
    course = tunnel.course_
    own = roc_auc_score(validation[1], fitted.predict_proba(validation[0])[:, 1])
    assert course.keeps_pipeline is stays and course.first_metric == pytest.approx(own, abs=1e-4)
    is_the_same = np.allclose(tunnel.predict_proba(rows), fitted.predict_proba(rows), atol=1e-4)
    assert is_the_same is stays and (course.chosen.metric > own) is not stays
    tuned = WindTunnel(fitted, dropout=0.0, **options).fine_tune(*clicks(3000, 0), validation=validation)
    assert not np.allclose(tuned.predict_proba(rows), fitted.predict_proba(rows), atol=1e-4)
    assert tuned.course_.first_metric is None and not tuned.course_.keeps_pipeline


def test_patience_ends_and_the_best_epoch_stays(fitted: Pipeline) -> None:
    x, y = clicks(3000, 0)
    validation = clicks(1000, 2)
    tunnel = WindTunnel(fitted, temperature=0.3, patience=2, **FAST | {"max_epochs": 60, "learning_rate": 2e-2})
    tunnel.fine_tune(x, y, validation=validation)
    chosen = tunnel.course_.chosen
    assert chosen.best_epoch is not None and len(chosen.metrics) == chosen.best_epoch + 3 < 60
    assert roc_auc_score(validation[1], tunnel.predict_proba(validation[0])[:, 1]) == pytest.approx(chosen.metric, abs=1e-6)


def test_the_grid_is_chosen_on_validation_rows(fitted: Pipeline) -> None:
    tunnel = WindTunnel(fitted, **FAST | {"learning_rate": (1e-7, 3e-3), "weight_decay": (1e-5, 1e-7)})
    tunnel.fine_tune(*clicks(3000, 0))
    course = tunnel.course_
    assert [(t.learning_rate, t.weight_decay) for t in course.trials] == [
        (1e-7, 1e-5),
        (1e-7, 1e-7),
        (3e-3, 1e-5),
        (3e-3, 1e-7),
    ]
    assert course.chosen.learning_rate == 3e-3 and course.chosen.metric == max(t.metric for t in course.trials)
    # Each setting begins at the pipeline: the last one alone gives the same.
    alone = WindTunnel(fitted, **FAST | {"learning_rate": 3e-3, "weight_decay": 1e-7}).fine_tune(*clicks(3000, 0))
    assert alone.course_.chosen.metrics == pytest.approx(course.trials[3].metrics, abs=1e-6)


def changed_parts(tunnel: WindTunnel, reference: WindTunnel) -> set[str]:
    names = dict(reference.module.named_parameters())
    return {name for name, p in tunnel.module.named_parameters() if not torch.equal(p, names[name])}


@pytest.mark.parametrize(("scope", "has_tables"), [("all", True), ("trees", False)])
def test_scopes_train_what_they_name(fitted: Pipeline, scope: str, has_tables: bool) -> None:
    still = WindTunnel(fitted, scope=scope, **FAST | {"learning_rate": 1e-30}).fine_tune(*clicks(3000, 0))
    tunnel = WindTunnel(fitted, scope=scope, **FAST).fine_tune(*clicks(3000, 0))
    changed = changed_parts(tunnel, still)
    assert any("tables" in name for name in changed) == has_tables
    assert {name.rsplit(".", 1)[-1] for name in changed} >= {"value", "bias", "threshold", "weight", "signs", "leaf_bias"}


def test_cold_is_worse_than_warm_at_first(fitted: Pipeline) -> None:
    warm, cold = (
        WindTunnel(fitted, start=start, temperature=0.3, **FAST | {"max_epochs": 1}).fine_tune(*clicks(3000, 0))
        for start in ("warm", "cold")
    )
    assert warm.course_.chosen.metric > cold.course_.chosen.metric + 0.02


def test_the_same_seed_gives_the_same_and_leaves_the_callers_alone(fitted: Pipeline) -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one, two, other = (
        WindTunnel(fitted, random_state=seed, **FAST)
        .fine_tune(*clicks(3000, 0), validation=clicks(500, 2))
        .decision_function(clicks(100, 1)[0])
        for seed in (0, 0, 1)
    )
    assert (one == two).all() and not (one == other).all()
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("model", "data", "loss"),
    [
        (RandomForestClassifier(5, max_leaf_nodes=8, random_state=0), WINE, "logistic"),
        (RandomForestClassifier(5, max_leaf_nodes=8, random_state=0), WINE, "hinge"),
        (LogisticRegression(), WINE, "hinge"),
        (LinearSVC(), WINE, None),
        (RandomForestRegressor(5, max_leaf_nodes=8, random_state=0), DIABETES, "squared"),
        (RandomForestRegressor(5, max_leaf_nodes=8, random_state=0), DIABETES, "absolute"),
        (PoissonRegressor(), DIABETES, None),
        (Ridge(), DIABETES, "poisson"),
        (lightgbm.LGBMRegressor(n_estimators=5, objective="cross_entropy", verbose=-1), SHARES, None),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else repr(value),
)
def test_other_losses_fall(model: Any, data: tuple[np.ndarray, np.ndarray], loss: str | None) -> None:
    x, y = data
    fitted = make_pipeline(StandardScaler(), model).fit(x, y)
    tunnel = WindTunnel(fitted, loss=loss, dropout=0.0, **FAST | {"max_epochs": 20, "batch_size": 32, "learning_rate": 3e-3})
    tunnel.fine_tune(x, y, validation=(x, y))
    losses = tunnel.course_.chosen.losses
    assert losses[-1] < losses[0] and np.isfinite(tunnel.score(x, y))


def test_unfitted_it_fits_translates_and_tunes() -> None:
    x, y = clicks(2000, 0)
    words = np.array(["no", "yes"])[y]
    tunnel = WindTunnel(pipeline(), **FAST)
    with pytest.raises(NotFittedError):
        tunnel.predict(x)
    tunnel.fit(x, words)
    assert set(tunnel.predict(x)) == {"no", "yes"} and list(tunnel.classes_) == ["no", "yes"]
    assert log_loss(words, tunnel.predict_proba(x)) < 0.69
    other = clone(tunnel).set_params(pipeline__lgbmclassifier__n_estimators=3, level=2)
    assert other.get_params()["pipeline__lgbmclassifier__n_estimators"] == 3 and "translation_" not in vars(other)
    assert other.fit(x, y).module.root.operator.level == 2


def test_columns_go_by_their_names(fitted: Pipeline) -> None:
    x, _ = clicks(50, 1)
    tunnel = WindTunnel(fitted)
    assert (tunnel.predict_proba(x[["hour", "user", "item"]]) == tunnel.predict_proba(x)).all()
    with pytest.raises(ValueError, match="X lacks the column 'item'"):
        tunnel.predict_proba(x[["hour", "user"]])


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"level": 5}, "level must be one of 1, 2, 3, 4, not 5"),
        ({"temperature": 0.0}, "temperature must be above 0, not 0.0"),
        ({"scope": "leaves"}, "scope must be one of all, trees, not 'leaves'"),
        ({"start": "hot"}, "start must be one of warm, cold, not 'hot'"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0, not 0.0"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, not -1.0"),
        ({"learning_rate": ()}, "learning_rate has no values to try"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0"),
        ({"validation_fraction": 1.0}, "validation_fraction must be between 0 and 1, not 1.0"),
        ({"loss": "squared"}, "the pipeline is a classifier, whose loss must be one of logistic, hinge, not 'squared'"),
        ({"loss": "huge"}, "loss must be one of"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, not 'tpu'"),
        ({"level": "4"}, "level must be one of 1, 2, 3, 4, not '4'"),
        ({"temperature": "warm"}, "temperature must be above 0, not 'warm'"),
        ({"learning_rate": (1e-3, "x")}, "learning_rate must be above 0, not 'x'"),
        ({"patience": 1.5}, "patience must be a whole number of at least 1, not 1.5"),
        ({"system": "nimbel"}, r"system=nimbel names no system: did you mean nimble\?"),
        ({"validation": (1,)}, r"validation must be \(X, y\), the rows and their labels"),
    ],
    ids=str,
)
def test_bad_requests_are_one_line_and_lose_nothing(fitted: Pipeline, parameters: dict[str, Any], words: str) -> None:
    x, y = clicks(300, 1)
    tunnel = WindTunnel(fitted, **FAST | {"max_epochs": 1}).fine_tune(x, y)
    before = tunnel.decision_function(x)
    with pytest.raises(ValueError, match=words) as caught:
        tunnel.fine_tune(x, y, **parameters)
    assert "\n" not in str(caught.value) and (tunnel.decision_function(x) == before).all()
    assert tunnel.get_params() == WindTunnel(fitted, **FAST | {"max_epochs": 1}).get_params()


def test_other_bad_requests(fitted: Pipeline) -> None:
    import scipy.sparse

    x, y = clicks(300, 1)
    with pytest.raises(TypeError, match="takes dense rows, not a sparse matrix"):
        WindTunnel(fitted).predict(scipy.sparse.csr_matrix(np.eye(3)))
    with pytest.raises(ValueError, match="y has the class 2, which the pipeline was not fitted to"):
        WindTunnel(fitted, **FAST).fine_tune(x, y + (np.arange(300) % 2))
    with pytest.raises(ValueError, match="y has one class, 0: fine-tuning a classifier needs rows of two"):
        WindTunnel(fitted, **FAST).fine_tune(x, [0] * len(y))
    with pytest.raises(ValueError, match="there are no rows to fine-tune on"):
        WindTunnel(fitted, **FAST).fine_tune(x.head(0), y[:0])
    with pytest.raises(NotFittedError, match="Pipeline is not fitted: fit it first, or call fit of WindTunnel"):
        WindTunnel(pipeline(), **FAST).fine_tune(x, y)
    words = make_pipeline(StandardScaler(), LogisticRegression()).fit(np.eye(4), [0, 1, 0, 1])
    with pytest.raises(ValueError, match="could not convert string to float: 'a'"):
        WindTunnel(words, **FAST).fine_tune(np.array([["a"] * 4] * 4, dtype=object), [0, 1, 0, 1])
    with pytest.raises(ValueError, match="X has 2 features, but WindTunnel is expecting 3"):
        WindTunnel(fitted).predict(x.to_numpy()[:, :2])


def test_a_loss_that_is_no_number_stops_and_keeps_the_best(fitted: Pipeline) -> None:
    x, y = clicks(1000, 0)
    tunnel = WindTunnel(fitted, **FAST | {"learning_rate": (1e-3, 1e30), "max_epochs": 4}).fine_tune(x, y)
    first, second = tunnel.course_.trials
    assert second.is_diverged and not first.is_diverged and tunnel.course_.chosen is first
    assert np.isfinite(tunnel.decision_function(x)).all()
    with pytest.raises(Diverged, match="take a smaller learning_rate"):
        WindTunnel(fitted, **FAST | {"learning_rate": 1e30}).fine_tune(x, y)


def test_steps_run_on_a_scheduler_too(fitted: Pipeline) -> None:
    """Without dropout, Nimble's steps give eager's weights."""
    x, y = clicks(512, 0)
    eager, nimble = (
        WindTunnel(fitted, dropout=0.0, system=system, **FAST | {"max_epochs": 1})
        .fine_tune(x, y, validation=clicks(100, 1))
        .decision_function(x)
        for system in ("eager", "nimble")
    )
    np.testing.assert_allclose(nimble, eager, atol=1e-5)


@pytest.mark.parametrize("name", ["nimble", "opara", pytest.param("torch_compile", marks=pytest.mark.slow)])
def test_the_network_runs_on_schedulers_and_in_torch_compile(fitted: Pipeline, name: str) -> None:
    import systems

    tunnel = WindTunnel(fitted)
    inputs = tunnel.inputs(clicks(16, 0)[0])
    fast = systems.load(name).prepare(tunnel.module, inputs)
    torch.testing.assert_close(fast(*inputs), tunnel.module(*inputs))
    fast.close()


def test_the_room_gives_the_estimator_by_name() -> None:
    assert room.WindTunnel is WindTunnel
    with pytest.raises(AttributeError, match="no attribute 'Wind'"):
        _ = room.Wind


def test_scikit_learns_searches_and_metrics_take_it() -> None:
    x, y = clicks(900, 0)
    words = np.array(["no", "yes"])[y]
    tunnel = WindTunnel(pipeline(), **FAST | {"max_epochs": 1})
    assert np.isfinite(cross_val_score(tunnel, x, words, cv=2, scoring="roc_auc", error_score="raise")).all()
    grid = {"level": [1, 4], "learning_rate": np.array([1e-3]), "pipeline__lgbmclassifier__n_estimators": [2, 3]}
    search = GridSearchCV(tunnel, grid, cv=2, error_score="raise").fit(x, words)
    assert len(search.cv_results_["params"]) == 4 and set(search.predict(x)) <= {"no", "yes"}


@pytest.mark.parametrize("model", [GaussianNB(), RandomForestClassifier(5, random_state=0), LogisticRegression()], ids=repr)
@pytest.mark.parametrize("is_tuned", [False, True])
def test_of_two_classes_there_is_one_score_that_ranks_as_the_probability(model: Any, is_tuned: bool) -> None:
    x, y = WINE[0][:130], WINE[1][:130]
    tunnel = WindTunnel(make_pipeline(StandardScaler(), model).fit(x, y), dropout=0.0, **FAST)
    if is_tuned:
        tunnel.fine_tune(x, y, validation=(x, y))
        assert tunnel.course_.chosen.metric == pytest.approx(roc_auc_score(y, tunnel.decision_function(x)), abs=1e-6)
    score, positive = tunnel.decision_function(x), tunnel.predict_proba(x)[:, 1]
    assert score.shape == (130,) and ((score > 0) == (tunnel.predict(x) == 1)).all()
    assert roc_auc_score(y, score) == pytest.approx(roc_auc_score(y, positive), abs=0.0 if not is_tuned else 5e-3)


def test_shares_that_are_all_below_0_are_equal_probabilities() -> None:
    x, y = clicks(200, 0)
    forest = RandomForestClassifier(3, random_state=0).fit(x[["hour"]], y)
    tunnel = WindTunnel(forest, **FAST).fine_tune(x[["hour"]], y)
    with torch.no_grad():
        tunnel.translation_.predictor.bias -= 9
    np.testing.assert_array_equal(tunnel.predict_proba(x[["hour"]]), np.full((200, 2), 0.5))


def test_what_the_pipeline_has_no_probabilities_of_has_none_here() -> None:
    """SVC's come of a model of its own, and of a hinge loss there are none."""
    x, y = WINE
    for model in (SVC(probability=True), LinearSVC()):
        tunnel = WindTunnel(make_pipeline(StandardScaler(), model).fit(x, y))
        assert not hasattr(tunnel, "predict_proba") and (tunnel.predict(x) == tunnel.pipeline.predict(x)).all()
    assert hasattr(WindTunnel(LogisticRegression()), "predict_proba")  # before it is fitted too
    untranslatable = make_pipeline(StandardScaler(), KNeighborsClassifier()).fit(x, y)
    with pytest.raises(Untranslatable, match="KNeighborsClassifier"):
        WindTunnel(untranslatable).predict_proba(x)


def test_behind_a_scaler_it_is_the_pipeline_to_the_last_row() -> None:
    """In float32 some rows of wine lie on a threshold that the scaler's rounding moves."""
    x, y = WINE
    for model in (RandomForestClassifier(5, random_state=0), lightgbm.LGBMClassifier(n_estimators=5, verbose=-1)):
        fitted = make_pipeline(StandardScaler(), model).fit(x, y)
        np.testing.assert_allclose(WindTunnel(fitted).predict_proba(x), fitted.predict_proba(x), atol=1e-12)


def test_shares_are_regressed() -> None:
    x, y = SHARES
    model = lightgbm.LGBMRegressor(n_estimators=5, objective="cross_entropy", verbose=-1).fit(x, y)
    np.testing.assert_allclose(WindTunnel(model).predict(x), model.predict(x), atol=1e-12)


def test_missing_values_go_where_the_pipeline_takes_them() -> None:
    """Into an imputer and into trees, also beside a column that may not be missing; a linear model has no score of them."""
    x, y = clicks(600, 0)
    x = x.assign(word=np.where(x["user"] > 9, "a", "b"))
    columns = ColumnTransformer(
        [("ids", TwoHotEncoder(), ["user"]), ("word", OneHotEncoder(), ["word"]), ("hour", SimpleImputer(), ["hour"])],
        remainder="passthrough",
        sparse_threshold=0,
    )
    holed = x.assign(hour=x["hour"].where(x["hour"] > -1))
    last = lightgbm.LGBMClassifier(n_estimators=5, verbose=-1)
    fitted = make_pipeline(columns, last).fit(holed, y)
    np.testing.assert_allclose(WindTunnel(fitted).predict_proba(holed), fitted.predict_proba(holed), atol=1e-12)
    strict = make_pipeline(FunctionTransformer(np.log), LogisticRegression()).fit(x[["hour"]].abs() + 1, y)
    with pytest.raises(ValueError, match="contains NaN"):
        WindTunnel(strict).predict(holed[["hour"]])
    with pytest.raises(ValueError, match="X holds NaN or infinity where the pipeline takes neither: row"):
        WindTunnel(strict).predict(x[["hour"]])
    with pytest.raises(Diverged, match="X holds NaN, of which this pipeline has no score"):
        WindTunnel(strict, **FAST).fine_tune(x[["hour"]], y)
    forest = GradientBoostingClassifier(n_estimators=2).fit(x[["hour"]], y)
    with pytest.raises(ValueError, match="contains NaN"):
        WindTunnel(forest).predict(holed[["hour"]])


def test_after_fit_it_is_tuned_from_the_pipeline_that_was_fitted() -> None:
    x, y = clicks(600, 0)
    tunnel = WindTunnel(pipeline(), **FAST | {"max_epochs": 1}).fit(x, y)
    own = tunnel.pipeline_
    assert tunnel.fine_tune(x, y).pipeline_ is own
    before = tunnel.predict_proba(x)
    with pytest.raises(ValueError, match="Some column names are not columns"):
        tunnel.fit(x[["user", "hour"]], y)
    assert tunnel.pipeline_ is own and (tunnel.predict_proba(x) == before).all()


@pytest.mark.parametrize("pipeline", [None, "pipeline", LogisticRegression], ids=repr)
def test_what_is_no_pipeline_is_refused_in_one_line(pipeline: Any) -> None:
    x, y = WINE
    tunnel = WindTunnel(pipeline)
    for call in (lambda: tunnel.predict(x), lambda: tunnel.score(x, y), lambda: tunnel.fine_tune(x, y)):
        with pytest.raises(ValueError, match=r"^WindTunnel needs a pipeline: WindTunnel\(make_pipeline\(\.\.\.\)\)"):
            call()


def test_a_pipeline_that_begins_with_a_passthrough_counts_its_columns() -> None:
    x, y = WINE
    tunnel = WindTunnel(make_pipeline("passthrough", LogisticRegression(max_iter=5000)).fit(x, y))
    assert tunnel.n_features_in_ == 13 and (tunnel.predict(x) == tunnel.pipeline.predict(x)).all()
    with pytest.raises(ValueError, match="X has 12 features, but WindTunnel is expecting 13"):
        tunnel.predict(x[:, :12])
    with pytest.raises(ValueError, match=r"Found array with 0 sample\(s\)"):
        tunnel.predict(x[:0])
