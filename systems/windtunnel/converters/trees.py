"""Decision trees and their ensembles, of three libraries; LightGBM's leaves as features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from models.neural.forests import ForestLeaves, HardForest, SoftForest
from models.neural.trees import TreeEnsemble
from systems.windtunnel.base import Converter, Form, Link, Translated, Untranslatable
from systems.windtunnel.parse import lightgbm, sklearn_trees, xgboost

Parser: TypeAlias = Callable[[Any, str], tuple[TreeEnsemble, Link]]


def _forest(ensemble: TreeEnsemble, form: Form) -> HardForest | SoftForest:
    if form.is_soft:
        return SoftForest(ensemble, form.level, form.temperature, form.dropout, form.dtype)
    return HardForest(ensemble, dtype=form.dtype)


def _converter(parse: Parser) -> Converter:
    def convert(model: Any, name: str, form: Form) -> Translated:
        ensemble, link = parse(model, name)
        return Translated(_forest(ensemble, form), link, ensemble=ensemble)

    return convert


def _lightgbm(model: Any, name: str) -> tuple[TreeEnsemble, Link]:
    return lightgbm.parse(getattr(model, "booster_", model), name)


def _xgboost(model: Any, name: str) -> tuple[TreeEnsemble, Link]:
    if model.missing is not None and not np.isnan(model.missing):
        raise Untranslatable(f"{name} takes {model.missing} for a missing value, which has no translation: NaN has one")
    is_stopped = model.get_booster().attr("best_iteration") is not None
    return xgboost.parse(model.get_booster(), name, model.best_iteration + 1 if is_stopped else None)


def leaf_encoder(model: Any, name: str, form: Form) -> Translated:
    """models.tabular.leaves: the leaves themselves are the features."""
    ensemble, _ = lightgbm.parse(model.booster_, name)
    bare = ensemble.without_outputs()
    return Translated(ForestLeaves(_forest(bare, form), bare), ensemble=bare)


PARSERS: dict[tuple[str, str], Parser] = {
    **{("lightgbm", name): _lightgbm for name in ("LGBMClassifier", "LGBMRegressor", "LGBMRanker", "Booster")},
    **{("xgboost", name): _xgboost for name in ("XGBClassifier", "XGBRegressor", "XGBRFClassifier", "XGBRFRegressor")},
    **{
        ("sklearn", f"{kind}{task}"): parse
        for task in ("Classifier", "Regressor")
        for kind, parse in {
            "DecisionTree": sklearn_trees.parse_tree,
            "ExtraTree": sklearn_trees.parse_tree,
            "RandomForest": sklearn_trees.parse_forest,
            "ExtraTrees": sklearn_trees.parse_forest,
            "GradientBoosting": sklearn_trees.parse_gradient_boosting,
            "HistGradientBoosting": sklearn_trees.parse_histogram_boosting,
        }.items()
    },
}
CONVERTERS: dict[tuple[str, str], Converter] = {
    **{key: _converter(parse) for key, parse in PARSERS.items()},
    ("models", "LeafEncoder"): leaf_encoder,
}
