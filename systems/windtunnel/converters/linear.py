"""Linear models and linear support vector machines."""

from __future__ import annotations

from typing import Any

import numpy as np

from models.neural.linear import linear
from systems.windtunnel.base import Converter, Form, Link, Translated, Untranslatable


def regressor(model: Any, name: str, form: Form) -> Translated:
    """coef·x + intercept."""
    coefficients = np.atleast_2d(model.coef_)
    if len(coefficients) > 1:
        raise Untranslatable(f"{name} has several targets, which have no translation")
    kind = type(model).__name__
    is_exponential = kind in ("PoissonRegressor", "GammaRegressor")
    if kind == "TweedieRegressor":
        is_exponential = model.link == "log" or (model.link == "auto" and model.power > 0)
    link = Link("exponential" if is_exponential else "identity")
    return Translated(linear(coefficients, model.intercept_, form.dtype), link)


def margin(model: Any, name: str, form: Form) -> Translated:
    """A classifier that only ranks classes, such as one of hinge loss."""
    return Translated(linear(np.atleast_2d(model.coef_), model.intercept_, form.dtype), Link("margin"))


def logistic(model: Any, name: str, form: Form) -> Translated:
    """Logistic regression: sigmoid of two classes, softmax of more."""
    return Translated(
        linear(model.coef_, model.intercept_, form.dtype), Link("sigmoid" if len(model.coef_) == 1 else "softmax")
    )


def stochastic(model: Any, name: str, form: Form) -> Translated:
    """SGDClassifier: of logistic loss sigmoids, one against the rest; of other losses margins."""
    if model.loss != "log_loss":
        return margin(model, name, form)
    kind = "sigmoid" if len(model.coef_) == 1 else "one_vs_all"
    return Translated(linear(model.coef_, model.intercept_, form.dtype), Link(kind))


REGRESSORS = (
    "LinearRegression Ridge RidgeCV Lasso LassoCV LassoLars LassoLarsCV LassoLarsIC Lars LarsCV ElasticNet ElasticNetCV "
    "BayesianRidge ARDRegression HuberRegressor TheilSenRegressor OrthogonalMatchingPursuit OrthogonalMatchingPursuitCV "
    "QuantileRegressor SGDRegressor PassiveAggressiveRegressor LinearSVR PoissonRegressor GammaRegressor TweedieRegressor"
)
MARGINS = "RidgeClassifier RidgeClassifierCV LinearSVC Perceptron PassiveAggressiveClassifier"
CONVERTERS: dict[tuple[str, str], Converter] = {
    **{("sklearn", regressor_name): regressor for regressor_name in REGRESSORS.split()},
    **{("sklearn", name): margin for name in MARGINS.split()},
    ("sklearn", "LogisticRegression"): logistic,
    ("sklearn", "LogisticRegressionCV"): logistic,
    ("sklearn", "SGDClassifier"): stochastic,
}
