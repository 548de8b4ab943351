"""PCA, truncated SVD and LDA: a projection each."""

from __future__ import annotations

from typing import Any

import numpy as np

from models.neural.linear import linear, projection
from systems.windtunnel.base import Converter, Form, Link, Translated


def pca(model: Any, name: str, form: Form) -> Translated:
    """components · (x - mean), over the deviations if it whitens."""
    components = model.components_
    if model.whiten:
        scale = np.sqrt(model.explained_variance_)
        components = components / np.maximum(scale, np.finfo(scale.dtype).eps)[:, None]
    return Translated(projection(components, model.mean_, form.dtype))


def svd(model: Any, name: str, form: Form) -> Translated:
    """components · x."""
    return Translated(projection(model.components_, 0.0, form.dtype))


def discriminant_projection(model: Any, name: str, form: Form) -> Translated:
    """LDA as a transformer."""
    count = model._max_components
    mean = model.xbar_ if model.solver == "svd" else 0.0
    return Translated(projection(model.scalings_[:, :count].T, mean, form.dtype))


def discriminant(model: Any, name: str, form: Form) -> Translated:
    """LDA as a classifier."""
    kind = "sigmoid" if len(model.coef_) == 1 else "softmax"
    return Translated(linear(model.coef_, model.intercept_, form.dtype), Link(kind))


CONVERTERS: dict[tuple[str, str], Converter] = {
    ("sklearn", "PCA"): pca,
    ("sklearn", "IncrementalPCA"): pca,
    ("sklearn", "TruncatedSVD"): svd,
    ("sklearn", "LinearDiscriminantAnalysis"): discriminant,
}
# Of classes that transform and predict both: what they are where they transform.
TRANSFORMERS: dict[tuple[str, str], Converter] = {("sklearn", "LinearDiscriminantAnalysis"): discriminant_projection}
