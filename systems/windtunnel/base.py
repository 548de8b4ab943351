"""What the rooms of WindTunnel share: its refusal, and how raw scores become predictions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("identity", "sigmoid", "softmax", "one_vs_all", "probability", "exponential", "softplus", "signed_square", "margin")


class Untranslatable(ValueError):
    """An operator has no translation, or stands where none can be. The message is one line that names it."""

    def __init__(self, reason: str):
        super().__init__(" ".join(reason.split()))


@dataclass(frozen=True)
class Link:
    """What makes predictions of raw scores, [B, K].

    Args:
        kind: "sigmoid" and "softmax" make probabilities; "one_vs_all" sigmoids, divided by their sum; "probability" is one
            already; "margin" only ranks classes; the others are of regression.
        scale: multiplies the scores first, as LightGBM's `sigmoid` does.
    """

    kind: str = "identity"
    scale: float = 1.0

    @property
    def has_probabilities(self) -> bool:
        return self.kind in ("sigmoid", "softmax", "one_vs_all", "probability")

    def predicted(self, scores: Tensor) -> Tensor:
        """Of a regressor the prediction, [B, K]. Of a classifier probabilities, [B, classes], at least 2."""
        scores = scores * self.scale
        if self.kind == "exponential":
            return scores.exp()
        if self.kind == "softplus":
            return torch.nn.functional.softplus(scores)
        if self.kind == "signed_square":
            return scores.sign() * scores.square()
        if self.kind == "softmax":
            return scores.softmax(1)
        if self.kind in ("sigmoid", "one_vs_all"):
            positive = scores.sigmoid()
            if scores.shape[1] == 1:
                return torch.cat([1 - positive, positive], 1)
            return positive / positive.sum(1, keepdim=True) if self.kind == "one_vs_all" else positive
        return scores
