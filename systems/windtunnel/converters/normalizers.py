"""Scalers, the normalizer, and selections of columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from models.neural.likelihood import Binarize
from models.neural.linear import Affine, Columns, Normalize, Standardize
from systems.windtunnel.base import Converter, Form, Translated


def standard(scaler: Any, name: str, form: Form) -> Translated:
    """(x - mean) / deviation."""
    shift = scaler.mean_ if scaler.with_mean else 0.0
    scale = scaler.scale_ if scaler.with_std else 1.0
    return Translated(Standardize(shift, scale, scaler.n_features_in_, form.dtype))


def min_max(scaler: Any, name: str, form: Form) -> Translated:
    """x · scale + min, between limits if it clips."""
    limits = tuple(scaler.feature_range) if scaler.clip else None
    return Translated(Affine(scaler.min_, scaler.scale_, scaler.n_features_in_, form.dtype, limits))


def max_abs(scaler: Any, name: str, form: Form) -> Translated:
    """x / the largest absolute value."""
    limits = (-1.0, 1.0) if getattr(scaler, "clip", False) else None
    return Translated(Standardize(0.0, scaler.scale_, scaler.n_features_in_, form.dtype, limits))


def robust(scaler: Any, name: str, form: Form) -> Translated:
    """(x - median) / range of quantiles."""
    shift = scaler.center_ if scaler.with_centering else 0.0
    scale = scaler.scale_ if scaler.with_scaling else 1.0
    return Translated(Standardize(shift, scale, scaler.n_features_in_, form.dtype))


def normalizer(scaler: Any, name: str, form: Form) -> Translated:
    """x / its norm."""
    return Translated(Normalize(scaler.norm))


def binarizer(operator: Any, name: str, form: Form) -> Translated:
    """x > threshold."""
    return Translated(Binarize(operator.threshold, form.temperature if form.is_soft else None))


def selection(selector: Any, name: str, form: Form) -> Translated:
    """Some columns."""
    return Translated(Columns([int(place) for place in np.flatnonzero(selector.get_support())]))


SELECTIONS = "VarianceThreshold SelectKBest SelectPercentile SelectFpr SelectFdr SelectFwe SelectFromModel RFE RFECV"
CONVERTERS: dict[tuple[str, str], Converter] = {
    ("sklearn", "StandardScaler"): standard,
    ("sklearn", "MinMaxScaler"): min_max,
    ("sklearn", "MaxAbsScaler"): max_abs,
    ("sklearn", "RobustScaler"): robust,
    ("sklearn", "Normalizer"): normalizer,
    ("sklearn", "Binarizer"): binarizer,
    **{("sklearn", name): selection for name in SELECTIONS.split()},
}
