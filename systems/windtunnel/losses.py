"""Losses over raw scores, whatever the pipeline itself was trained for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from .base import Link

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # raw scores [B, K], classes [B] int64 or values [B] -> one number
LEAST = 1e-2  # share of a class below which its loss is linear
OF_CLASSES = ("logistic", "hinge")
OF_VALUES = ("squared", "absolute", "poisson")


def default_name(link: Link, is_classifier: bool) -> str:
    """The loss that a predictor of this link is trained for, or the nearest."""
    if is_classifier and link.has_probabilities:
        return "logistic"
    return {"margin": "hinge", "votes": "hinge", "exponential": "poisson"}.get(link.kind, "squared")


def loss_of(name: str, link: Link, is_classifier: bool) -> Loss:
    """The loss of a name. Raises ValueError: it is none, or of the other kind of prediction."""
    if name not in OF_CLASSES + OF_VALUES:
        raise ValueError(f"loss must be one of {', '.join(OF_CLASSES + OF_VALUES)}, not {name!r}")
    if is_classifier != (name in OF_CLASSES):
        kind, fitting = ("classifier", OF_CLASSES) if is_classifier else ("regressor", OF_VALUES)
        raise ValueError(f"the pipeline is a {kind}, whose loss must be one of {', '.join(fitting)}, not {name!r}")
    if name == "logistic":
        return _logistic(link)
    if name == "hinge":
        return _hinge
    if name == "poisson" and link.kind == "exponential":
        return lambda scores, values: functional.poisson_nll_loss(link.scale * scores[:, 0], values)
    measure = {
        "squared": functional.mse_loss,
        "absolute": functional.l1_loss,
        "poisson": lambda mean, values: functional.poisson_nll_loss(mean, values, log_input=False),
    }[name]
    return lambda scores, values: measure(link.predicted(scores)[:, -1], values)


def _logistic(link: Link) -> Loss:
    if link.kind == "probability":

        def of_probabilities(shares: Tensor, classes: Tensor) -> Tensor:
            # Shares of soft trees need not add up to 1, nor be above 0. -log p + sum - 1 is least where they do; below
            # LEAST the logarithm goes on as a straight line.
            own = shares.gather(1, classes[:, None])[:, 0]
            bounded = own.clamp_min(LEAST)
            return (shares.sum(1) - 1 - bounded.log() + (bounded - own) / LEAST).mean()

        return of_probabilities

    def of_scores(scores: Tensor, classes: Tensor) -> Tensor:
        scores = scores * link.scale
        if scores.shape[1] == 1:
            return functional.binary_cross_entropy_with_logits(scores[:, 0], classes.to(scores.dtype))
        if link.kind in ("one_vs_all", "sigmoid"):
            return functional.binary_cross_entropy_with_logits(
                scores, functional.one_hot(classes, scores.shape[1]).to(scores)
            )
        return functional.cross_entropy(scores, classes)

    return of_scores


def _hinge(scores: Tensor, classes: Tensor) -> Tensor:
    if scores.shape[1] == 1:
        sides = 2 * classes.to(scores.dtype) - 1
        return torch.clamp_min(1 - sides * scores[:, 0], 0).mean()
    return functional.multi_margin_loss(scores, classes)
