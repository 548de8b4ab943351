"""Encoders of categories: an embedding a column, which begins as the codes."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from models.neural.embeddings import Embeddings
from systems.windtunnel.base import Converter, Form, Translated, Untranslatable


def own(encoder: Any, name: str, form: Form) -> Translated:
    """Those of models.tabular, which have tables of codes."""
    return Translated(Embeddings(encoder.codes_, form.dtype), categories=tuple(encoder.categories_))


def _coded(encoder: Any, name: str, form: Form, widths: list[int], has_unknown: bool) -> Translated:
    """Codes as the encoder itself gives them, one column at a time, with the first category in all others."""
    categories = _categories(encoder, name)
    ends = np.cumsum(widths)
    codes = []
    for i, (own_categories, width) in enumerate(zip(categories, widths, strict=True)):
        rows = np.empty((len(own_categories) + has_unknown, len(categories)), dtype=object)
        rows[:] = [c[0] for c in categories]
        rows[has_unknown:, i] = own_categories
        if has_unknown:
            rows[0, i] = _unseen(own_categories)
        encoded = encoder.transform(rows)
        dense = np.asarray(encoded.todense() if hasattr(encoded, "todense") else encoded, dtype=np.float64)
        code = dense[:, ends[i] - width : ends[i]]
        codes.append(code if has_unknown else np.concatenate([np.zeros((1, width)), code]))
    return Translated(Embeddings(codes, form.dtype), categories=categories, refuses_unknown=not has_unknown)


def _categories(encoder: Any, name: str) -> tuple[NDArray[Any], ...]:
    """Of each column. Raises Untranslatable."""
    categories = tuple(np.asarray(c) for c in encoder.categories_)
    if any(c.dtype.kind in "mM" for c in categories):
        raise Untranslatable(f"{name} encodes dates, which have no translation: make words or numbers of them")
    return categories


def _unseen(categories: NDArray[Any]) -> Any:
    """A value of the categories' type that is none of them."""
    known = {c for c in categories if not pd.isna(c)}
    words = [c for c in known if isinstance(c, str)]
    if words:
        return max(words, key=len) + "?"
    return next(number for number in count() if number not in known)


def _nameless(encoder: Any) -> Any:
    """A copy that may be asked with an array where it was fitted to a table."""
    from copy import copy

    bare = copy(encoder)
    if hasattr(bare, "feature_names_in_"):
        del bare.feature_names_in_
    bare.set_output(transform="default")
    return bare


def one_hot(encoder: Any, name: str, form: Form) -> Translated:
    """OneHotEncoder, with what it drops and what is too rare for it."""
    return _coded(_nameless(encoder), name, form, list(encoder._n_features_outs), encoder.handle_unknown != "error")


def ordinal(encoder: Any, name: str, form: Form) -> Translated:
    """OrdinalEncoder: one number a column."""
    return _coded(_nameless(encoder), name, form, [1] * len(encoder.categories_), encoder.handle_unknown != "error")


def target(encoder: Any, name: str, form: Form) -> Translated:
    """TargetEncoder: the target's mean a column; of a category that was not seen the mean of all."""
    if encoder.target_type_ == "multiclass":
        raise Untranslatable(f"{name} encodes by a target of several classes, which has no translation")
    codes = [
        np.concatenate([[encoder.target_mean_], np.asarray(means, dtype=np.float64)])[:, None]
        for means in encoder.encodings_
    ]
    return Translated(Embeddings(codes, form.dtype), categories=_categories(encoder, name))


CONVERTERS: dict[tuple[str, str], Converter] = {
    **{("models", encoder): own for encoder in ("BinaryEncoder", "TwoHotEncoder", "HashEncoder", "OnlineTargetEncoder")},
    ("sklearn", "OneHotEncoder"): one_hot,
    ("sklearn", "OrdinalEncoder"): ordinal,
    ("sklearn", "TargetEncoder"): target,
}
