"""KMeans and kernel support vector machines: operators that compare with rows they keep."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
from torch import nn

from models.neural.distances import KERNELS, Centroids, KernelMachine, Votes
from systems.windtunnel.base import Converter, Form, Link, Translated, Untranslatable


def clusters(model: Any, name: str, form: Form) -> Translated:
    """The nearest centroid; soft, a softmax over -d² / temperature."""
    temperature = form.temperature if form.is_soft else 1.0
    return Translated(Centroids(model.cluster_centers_, form.dtype, as_scores=True, temperature=temperature), Link("margin"))


def cluster_distances(model: Any, name: str, form: Form) -> Translated:
    """The distances to all centroids."""
    return Translated(Centroids(model.cluster_centers_, form.dtype, as_scores=False))


def _check(model: Any, name: str) -> None:
    """Raises Untranslatable."""
    if model.kernel not in KERNELS:
        raise Untranslatable(f"{name} has the kernel {model.kernel!r}; these have a translation: {', '.join(KERNELS)}")
    if scipy.sparse.issparse(model.support_vectors_):
        raise Untranslatable(f"{name} was fitted to sparse rows, which have no translation")


def _machine(model: Any, form: Form, weight: Any) -> KernelMachine:
    vectors, bias = model.support_vectors_, model.intercept_
    return KernelMachine(vectors, weight, bias, form.dtype, model.kernel, model._gamma, model.coef0, model.degree)


def kernel_classifier(model: Any, name: str, form: Form) -> Translated:
    """SVC and NuSVC; of more than two classes a score for each pair, then votes."""
    _check(model, name)
    num_classes = len(model.classes_)
    dual, starts = model.dual_coef_, np.concatenate([[0], np.cumsum(model.n_support_)])
    if num_classes == 2:
        return Translated(_machine(model, form, dual), Link("margin"))
    if model.decision_function_shape != "ovr":
        raise Untranslatable(f"{name} scores pairs of classes; its decision_function_shape must be 'ovr'")
    pairs = [(i, j) for i in range(num_classes) for j in range(i + 1, num_classes)]
    weight = np.zeros((len(pairs), dual.shape[1]))
    for row, (i, j) in zip(weight, pairs, strict=True):
        row[starts[i] : starts[i + 1]] = dual[j - 1, starts[i] : starts[i + 1]]
        row[starts[j] : starts[j + 1]] = dual[i, starts[j] : starts[j + 1]]
    machine = _machine(model, form, weight)
    return Translated(nn.Sequential(machine, Votes(num_classes)), Link("margin" if model.break_ties else "votes"))


def kernel_regressor(model: Any, name: str, form: Form) -> Translated:
    """SVR and NuSVR."""
    _check(model, name)
    return Translated(_machine(model, form, model.dual_coef_), Link("identity"))


CONVERTERS: dict[tuple[str, str], Converter] = {
    ("sklearn", "KMeans"): clusters,
    ("sklearn", "MiniBatchKMeans"): clusters,
    ("sklearn", "SVC"): kernel_classifier,
    ("sklearn", "NuSVC"): kernel_classifier,
    ("sklearn", "SVR"): kernel_regressor,
    ("sklearn", "NuSVR"): kernel_regressor,
}
TRANSFORMERS: dict[tuple[str, str], Converter] = {
    ("sklearn", "KMeans"): cluster_distances,
    ("sklearn", "MiniBatchKMeans"): cluster_distances,
}
