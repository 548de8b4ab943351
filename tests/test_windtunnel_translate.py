"""Fitted pipelines as networks, as a whole: branches, gradients, export, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="pip install '.[windtunnel]'")
lightgbm = pytest.importorskip("lightgbm", reason="pip install '.[windtunnel]'")

from sklearn.compose import ColumnTransformer  # noqa: E402
from sklearn.decomposition import PCA  # noqa: E402
from sklearn.exceptions import NotFittedError  # noqa: E402
from sklearn.impute import SimpleImputer  # noqa: E402
from sklearn.linear_model import LogisticRegression, Ridge  # noqa: E402
from sklearn.neighbors import KNeighborsClassifier  # noqa: E402
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline  # noqa: E402
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, PolynomialFeatures, StandardScaler  # noqa: E402
from sklearn.svm import SVC  # noqa: E402
from translations import EXACT, IRIS, NAMED, assert_same, categories, unseen  # noqa: E402

from models.tabular.encoders import Bucketizer, TwoHotEncoder  # noqa: E402
from models.tabular.factorization_machine import FactorizationMachine  # noqa: E402
from models.tabular.leaves import LeafEncoder  # noqa: E402
from systems.windtunnel.base import Form, Untranslatable  # noqa: E402
from systems.windtunnel.inputs import Kept  # noqa: E402
from systems.windtunnel.translate import translate  # noqa: E402


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
