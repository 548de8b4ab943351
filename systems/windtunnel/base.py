"""What the rooms of WindTunnel share: its refusal, and how raw scores become predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

if TYPE_CHECKING:
    from models.neural.trees import TreeEnsemble

KINDS = (
    *("identity", "sigmoid", "softmax", "one_vs_all", "probability", "exponential", "softplus", "signed_square"),
    *("margin", "votes"),
)

SCOPES = ("all", "trees")
STARTS = ("warm", "cold")
LEARNING_RATES = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # the chapter's grid, section 5.3
WEIGHT_DECAYS = (1e-5, 1e-6, 1e-7)


class Untranslatable(ValueError):
    """An operator has no translation, or stands where none can be. The message is one line that names it."""

    def __init__(self, reason: str):
        super().__init__(" ".join(reason.split()))


@dataclass(frozen=True)
class Link:
    """What makes predictions of raw scores, [B, K].

    Args:
        kind: "sigmoid" and "softmax" make probabilities; "one_vs_all" sigmoids, divided by their sum; "probability" is one
            already; "margin" only ranks classes; "votes" does too, but of those of equal whole numbers it takes the first;
            the others are of regression.
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


def of_second_class(scores: Tensor) -> Tensor:
    """Raw scores of two classes, [B, 1] or [B, 2] -> [B], above 0 for the second; it ranks rows as its probability does."""
    return scores[:, 0] if scores.shape[1] == 1 else scores[:, 1] - scores[:, 0]


@dataclass(frozen=True)
class Form:
    """How operators are translated.

    Args:
        is_soft: differentiable approximations, which train; otherwise exact ones.
        level: what of a tree trains, 1 to 4.
        temperature: of the approximations, above 0.
        dropout: of the trees' hidden layers.
        dtype: of numbers.
    """

    is_soft: bool = False
    level: int = 4
    temperature: float = 1.0
    dropout: float = 0.1
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, eq=False)
class Translated:
    """What an operator becomes.

    Attributes:
        module: [B, F] -> [B, K]; of an encoder ids [B, columns] -> [B, K].
        link: of a predictor; None for a transformer.
        categories: of an encoder, of each column.
        refuses_unknown: of an encoder, whether a category that it has not seen is an error.
        ensemble: of trees.
    """

    module: nn.Module
    link: Link | None = None
    categories: tuple[NDArray[Any], ...] | None = None
    refuses_unknown: bool = False
    ensemble: TreeEnsemble | None = None


Converter: TypeAlias = Callable[[Any, str, Form], Translated]  # a fitted operator and its name; raises Untranslatable
