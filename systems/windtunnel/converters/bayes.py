"""Naive Bayes: the joint log-likelihood of each class, whose softmax are the probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from models.neural.embeddings import Embeddings
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
        scores = nn.Sequential(Binarize(model.binarize, form.temperature if form.is_soft else None), scores)
    return Translated(scores, Link("softmax"))


def multinomial(model: Any, name: str, form: Form) -> Translated:
    """Counts."""
    return Translated(linear(model.feature_log_prob_, model.class_log_prior_, form.dtype), Link("softmax"))


def complement(model: Any, name: str, form: Form) -> Translated:
    """Counts of all other classes; the class's own share counts where there is one class alone."""
    prior = model.class_log_prior_ if len(model.classes_) == 1 else 0.0
    return Translated(linear(model.feature_log_prob_, prior, form.dtype), Link("softmax"))


def categorical(model: Any, name: str, form: Form) -> Translated:
    """Whole numbers that name categories: rows of log-likelihoods, whose sum is a class's."""
    num_classes = len(model.classes_)
    tables = [np.asarray(table).T for table in model.feature_log_prob_]  # [categories, classes]
    codes = [np.concatenate([np.zeros((1, num_classes)), table]) for table in tables]
    total = linear(np.tile(np.eye(num_classes), len(tables)), model.class_log_prior_, form.dtype)
    categories = tuple(np.arange(len(table)) for table in tables)
    scores = nn.Sequential(Embeddings(codes, form.dtype), total)
    return Translated(scores, Link("softmax"), categories=categories, refuses_unknown=True)


CONVERTERS: dict[tuple[str, str], Converter] = {
    ("sklearn", "GaussianNB"): gaussian,
    ("sklearn", "BernoulliNB"): bernoulli,
    ("sklearn", "MultinomialNB"): multinomial,
    ("sklearn", "ComplementNB"): complement,
    ("sklearn", "CategoricalNB"): categorical,
}
