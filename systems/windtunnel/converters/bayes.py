"""Naive Bayes: the joint log-likelihood of each class, whose softmax are the probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from models.neural.likelihood import Binarize, GaussianLikelihood
from models.neural.linear import linear
from systems.windtunnel.base import Converter, Form, Link, Translated


def gaussian(model: Any, name: str, form: Form) -> Translated:
    """A normal distribution for each feature and class."""
    return Translated(GaussianLikelihood(model.theta_, model.var_, model.class_prior_, form.dtype), Link("softmax"))


def bernoulli(model: Any, name: str, form: Form) -> Translated:
    """A probability of 1 for each feature and class."""
    absent = np.log1p(-np.exp(model.feature_log_prob_))
    weight = model.feature_log_prob_ - absent
    scores: nn.Module = linear(weight, model.class_log_prior_ + absent.sum(1), form.dtype)
    if model.binarize is not None:
        scores = nn.Sequential(Binarize(model.binarize), scores)
    return Translated(scores, Link("softmax"))


def multinomial(model: Any, name: str, form: Form) -> Translated:
    """Counts."""
    return Translated(linear(model.feature_log_prob_, model.class_log_prior_, form.dtype), Link("softmax"))


CONVERTERS: dict[tuple[str, str], Converter] = {
    ("sklearn", "GaussianNB"): gaussian,
    ("sklearn", "BernoulliNB"): bernoulli,
    ("sklearn", "MultinomialNB"): multinomial,
}
