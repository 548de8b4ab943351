"""Factorization machines and matrix factorization."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from models.neural.embeddings import Embeddings
from models.neural.factorization import Factorization
from systems.windtunnel.base import Converter, Form, Link, Translated


def machine(model: Any, name: str, form: Form) -> Translated:
    """A factorization machine of two classes."""
    return Translated(Factorization(model.coef_, model.factors_, model.intercept_, form.dtype), Link("sigmoid"))


def matrix(model: Any, name: str, form: Form) -> Translated:
    """One-hot embeddings of users and items, then a factorization machine."""
    sizes = [len(categories) for categories in model.categories_]
    codes = [np.concatenate([np.zeros((1, size)), np.eye(size)]) for size in sizes]
    interaction = Factorization(model.coef_, model.factors_, model.intercept_, form.dtype)
    categories = tuple(model.categories_)
    return Translated(nn.Sequential(Embeddings(codes, form.dtype), interaction), Link("identity"), categories=categories)


CONVERTERS: dict[tuple[str, str], Converter] = {
    ("models", "FactorizationMachine"): machine,
    ("models", "MatrixFactorization"): matrix,
}
