"""What `WindTunnel.save` writes and `load` reads: the same to the bit, without code, and refused where it is damaged."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="pip install '.[windtunnel]'")
pytest.importorskip("lightgbm", reason="pip install '.[windtunnel]'")

from clicks import FAST, clicks, pipeline
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_wine
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import get_scorer
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    KBinsDiscretizer,
    PolynomialFeatures,
    PowerTransformer,
    QuantileTransformer,
)

from models.tabular.encoders import Bucketizer
from models.tabular.factorization_machine import FactorizationMachine
from models.tabular.leaves import LeafEncoder
from systems.windtunnel.estimator import WindTunnel
from systems.windtunnel.saving import DESCRIPTION, KEPT, OWN, WEIGHTS, NotSavable

WINE = load_wine(return_X_y=True)


@pytest.fixture(scope="module")
def fitted() -> Pipeline:
    return pipeline().fit(*clicks(3000, 0))


def leaves_into_machine() -> Pipeline:
    return pipeline(make_pipeline(LeafEncoder(6, 5, num_threads=1), FactorizationMachine(3)))


@pytest.mark.parametrize("make", [pipeline, leaves_into_machine])
@pytest.mark.parametrize("is_tuned", [False, True])
def test_saved_and_loaded_it_is_the_same_to_the_bit(make: Any, is_tuned: bool, tmp_path: Path) -> None:
    x, y = clicks(1000, 0)
    tunnel = WindTunnel(make().fit(x, y), **FAST)
    if is_tuned:
        tunnel.fine_tune(x, y)
    tunnel.save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [WEIGHTS, DESCRIPTION]
    loaded = WindTunnel.load(tmp_path)
    rows = clicks(500, 1)[0].assign(user=lambda t: t["user"] + 5)  # some were never seen
    assert (loaded.predict_proba(rows) == tunnel.predict_proba(rows)).all()
    assert loaded.explanation == tunnel.explanation and list(loaded.classes_) == [0, 1] and loaded.batch_size == 128
    with pytest.raises(ValueError, match="needs a pipeline"):
        WindTunnel().fit(x, y)
    if is_tuned:
        before = loaded.decision_function(rows)
        loaded.fine_tune(x, y, learning_rate=1e-2)
        assert not (loaded.decision_function(rows) == before).all()


def test_exact_trees_that_were_loaded_do_not_train(fitted: Pipeline, tmp_path: Path) -> None:
    WindTunnel(fitted, **FAST).save(tmp_path)
    loaded = WindTunnel.load(tmp_path)
    with pytest.raises(ValueError, match="what was loaded has exact trees, which do not train"):
        loaded.fine_tune(*clicks(500, 0))
    np.testing.assert_allclose(loaded.predict_proba(clicks(50, 1)[0]), fitted.predict_proba(clicks(50, 1)[0]), atol=1e-4)


def test_a_file_holds_no_code(fitted: Pipeline, tmp_path: Path) -> None:
    WindTunnel(fitted).save(tmp_path)
    file = tmp_path / DESCRIPTION
    text = file.read_text()
    for old, new, words in [
        ('"class": "Network"', '"class": "system"', "'system' is no module of a translation"),
        ('"class": "Network"', '"class": "Linear"', "holds a Network, not a Linear"),
        ('"version": 2', '"version": 7', "version 7"),
        ('"root"', '"roof"', "KeyError"),
        ("{", "", "JSONDecodeError"),
    ]:
        file.write_text(text.replace(old, new, 1))
        with pytest.raises(NotSavable, match=words) as caught:
            WindTunnel.load(tmp_path)
        assert "\n" not in str(caught.value)
    description = json.loads(text)
    description["sources"][0]["steps"].append({"kept": "x", "class": "FunctionTransformer", "state": {}})
    file.write_text(json.dumps(description))
    with pytest.raises(NotSavable, match="'FunctionTransformer' is no operator that stays on the host"):
        WindTunnel.load(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(NotSavable, match=f"{WEIGHTS} is missing"):
        WindTunnel.load(tmp_path)


def test_a_function_of_the_users_is_not_saved(tmp_path: Path) -> None:
    x, y = WINE
    fitted = make_pipeline(FunctionTransformer(np.log1p), LogisticRegression()).fit(x, y)
    with pytest.raises(NotSavable, match=r"functiontransformer \(FunctionTransformer\) stays on the host, and no file"):
        WindTunnel(fitted).save(tmp_path / "here")
    assert not (tmp_path / "here").exists()


ON_THE_HOST = [
    KBinsDiscretizer(3),
    KBinsDiscretizer(3, encode="ordinal"),
    PolynomialFeatures(2),
    PowerTransformer(),
    PowerTransformer(standardize=False).set_output(transform="pandas"),
    QuantileTransformer(n_quantiles=20),
    SimpleImputer(),
    SimpleImputer(add_indicator=True),
    FeatureUnion([("missing", MissingIndicator(features="all")), ("known", SimpleImputer())]),
    ColumnTransformer([("a", SimpleImputer(), [0, 3]), ("b", ColumnTransformer([("c", SimpleImputer(), [1])]), [2, 1])]),
    make_pipeline(SimpleImputer(), Bucketizer(4)),
]


def test_each_operator_that_is_said_to_be_savable_is_tried_below() -> None:
    """But Binarizer, which has a translation and stays on the host never."""
    tried = "".join(map(repr, ON_THE_HOST))
    assert {name for name in {*KEPT, *OWN} if name not in tried} == {"Binarizer"}


@pytest.mark.parametrize("operator", ON_THE_HOST, ids=repr)
def test_operators_that_stay_on_the_host_are_saved(operator: Any, tmp_path: Path) -> None:
    x = np.abs(WINE[0])
    if not isinstance(operator, KBinsDiscretizer | PolynomialFeatures):
        x[::7, 0] = np.nan
    if "Imputer" not in repr(operator):
        x = np.nan_to_num(x)
    tunnel = WindTunnel(make_pipeline(operator, Ridge()).fit(x, WINE[1]))
    assert "kept" in {line.became for line in tunnel.explanation}
    tunnel.save(tmp_path)
    assert (WindTunnel.load(tmp_path).predict(x) == tunnel.predict(x)).all()


def test_scikit_learns_metrics_take_what_was_loaded(fitted: Pipeline, tmp_path: Path) -> None:
    x, y = clicks(500, 1)
    tunnel = WindTunnel(fitted)
    tunnel.save(tmp_path)
    loaded = WindTunnel.load(tmp_path)
    for name in ("roc_auc", "accuracy", "neg_log_loss"):
        assert get_scorer(name)(loaded, x, y) == get_scorer(name)(tunnel, x, y)
    with pytest.raises(ValueError, match="WindTunnel needs a pipeline to fit; what was loaded is tuned on by fine_tune"):
        loaded.fit(x, y)
    with pytest.raises(ValueError, match="X lacks the column 'item' that the pipeline was fitted to"):
        loaded.predict(x[["user", "hour"]])


@pytest.mark.parametrize("damage", [b"", b"{}", b"null", b"[]", b"\x00\xff" * 50, None], ids=repr)
@pytest.mark.parametrize("name", [DESCRIPTION, WEIGHTS])
def test_damaged_files_are_refused_in_one_line(fitted: Pipeline, name: str, damage: bytes | None, tmp_path: Path) -> None:
    WindTunnel(fitted).save(tmp_path)
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:-100] if damage is None else damage)
    with pytest.raises(NotSavable) as caught:
        WindTunnel.load(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_weights_of_another_save_are_refused(fitted: Pipeline, tmp_path: Path) -> None:
    """They have the same names and shapes: a save that was stopped between its two files leaves such a folder."""
    x, y = clicks(500, 0)
    for number, seed in enumerate((0, 1)):
        WindTunnel(fitted, random_state=seed, **FAST).fine_tune(x, y).save(tmp_path / str(number))
    (tmp_path / "0" / WEIGHTS).write_bytes((tmp_path / "1" / WEIGHTS).read_bytes())
    with pytest.raises(NotSavable, match=f"{WEIGHTS} is damaged, or not the one that {DESCRIPTION} was written with"):
        WindTunnel.load(tmp_path / "0")


def test_any_part_of_the_description_that_is_lost_or_of_another_kind_is_one_line(fitted: Pipeline, tmp_path: Path) -> None:
    WindTunnel(fitted, max_epochs=3).save(tmp_path)
    file = tmp_path / DESCRIPTION
    description = json.loads(file.read_text())
    for key in description:
        for changes in ({}, {key: None}, {key: "x"}, {key: 3}):
            broken = {k: v for k, v in description.items() if k != key} | changes
            file.write_text(json.dumps(broken))
            try:
                WindTunnel.load(tmp_path)
            except NotSavable as error:
                assert "\n" not in str(error)
    lookup = description["sources"][0]["lookup"] or description["sources"][1]["lookup"]
    lookup["categories"][0]["values"].pop()
    file.write_text(json.dumps(description))
    with pytest.raises(NotSavable, match="cannot reshape"):
        WindTunnel.load(tmp_path)
