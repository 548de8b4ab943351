"""Predictions of a translation, as an estimator of scikit-learn gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import ClassifierTags, RegressorTags, assert_all_finite, get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from .base import Form, Untranslatable, of_second_class
from .fine_tuning import in_chunks
from .inputs import Table
from .translate import Line, Translation, allows_missing, first_step, translate

EXACT = Form(dtype=torch.float64)  # in float32 a row on a threshold may go the other way behind a scaler


def _classifies(estimator: Predictor) -> bool:
    return estimator._is_classifier


def _has_probabilities(estimator: Predictor) -> bool:
    """Of a pipeline that is not fitted, or has no translation, what it says itself: the call then says what is wrong."""
    if not estimator._is_classifier:
        return False
    try:
        return estimator._translated().link.has_probabilities
    except (NotFittedError, Untranslatable):
        return hasattr(estimator.pipeline, "predict_proba")


def is_fitted(pipeline: Any) -> bool:
    try:
        check_is_fitted(pipeline)
    except (NotFittedError, TypeError):
        return False
    return True


class Predictor(BaseEstimator):
    """What predicts by a translation: of a pipeline, of what was tuned, or of what was loaded.

    Attributes:
        pipeline: the fitted pipeline; None for what was loaded.
        pipeline_, translation_, loaded_: a pipeline that was fitted here, what was tuned of it, and what a file says of it.
    """

    pipeline: Any
    translation_: Translation

    # Predicting

    @available_if(_classifies)
    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Raw scores: of two classes [B], above 0 for the second, else [B, classes]."""
        scores = self._scores(X).double()
        return (of_second_class(scores) if len(self.classes_) == 2 else scores).numpy()

    @available_if(_has_probabilities)
    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probabilities, [B, classes]."""
        link = self._translated().link
        shares = link.predicted(self._scores(X).double()).numpy()
        if link.kind != "probability":
            return shares
        shares = shares.clip(0, 1)  # those of soft trees may all be below 0, which says nothing
        total = shares.sum(1, keepdims=True)
        return np.where(total > 0, shares / np.where(total > 0, total, 1), 1 / shares.shape[1])

    def predict(self, X: Any) -> NDArray[Any]:
        """Classes or values, [B]."""
        scores = self._scores(X).double()
        if not self._is_classifier:
            if self._translated().link.kind == "margin":  # of clusters
                return scores.argmax(1).numpy()
            return self._translated().link.predicted(scores).numpy()[:, -1]  # of a share the positive one
        if scores.shape[1] == 1 and len(self.classes_) == 2:
            return np.asarray(self.classes_[(scores[:, 0] > 0).long().numpy()])
        if self._translated().link.kind == "votes":
            scores = scores.round()
        return np.asarray(self.classes_[scores.argmax(1).numpy()])

    def score(self, X: Any, y: Any) -> float:
        """The share of rows whose class is right, or the coefficient of determination."""
        return float((accuracy_score if self._is_classifier else r2_score)(y, self.predict(X)))

    @property
    def module(self) -> nn.Module:
        """The network in eval mode: `module(*inputs(X))` are raw scores [B, K]."""
        return self._translated().network.eval()

    def inputs(self, X: Any) -> tuple[Tensor, ...]:
        """The network's inputs of rows, on its device."""
        self._dense(X)
        translation = self._translated()
        device = next((t.device for t in (*translation.network.parameters(), *translation.network.buffers())), None)
        return translation.inputs(self._ordered(X), device or "cpu")

    @property
    def explanation(self) -> tuple[Line, ...]:
        """What each operator became."""
        return self._translated().report

    def _scores(self, x: Any) -> Tensor:
        scores = in_chunks(self.module, self.inputs(x)).cpu()
        if (wrong := ~scores.isfinite().all(1)).any():
            row = int(wrong.int().argmax())
            raise ValueError(f"X holds NaN or infinity where the pipeline takes neither: row {row} has no score")
        return scores

    def _translated(self) -> Translation:
        """The fine-tuned network; around a fitted pipeline before that its exact translation."""
        if "translation_" not in vars(self):
            pipeline = self._fitted()
            if getattr(self, "_exact", (None, None))[0] is not pipeline:
                self._exact = (pipeline, translate(pipeline, EXACT))
            return self._exact[1]
        return self.translation_

    # What an estimator of scikit-learn says of itself

    def _fitted(self) -> Any:
        """The pipeline that was fitted here, or that was given. Raises ValueError."""
        pipeline = vars(self).get("pipeline_", self.pipeline)
        if not hasattr(pipeline, "fit") or isinstance(pipeline, type):
            what = "" if pipeline is None else f", not {pipeline!r}"
            raise ValueError(f"WindTunnel needs a pipeline: WindTunnel(make_pipeline(...)){what}")
        return pipeline

    @property
    def _is_classifier(self) -> bool:
        loaded = vars(self).get("loaded_")
        return loaded.is_classifier if loaded is not None else is_classifier(self._fitted())

    def _allows_missing(self, num_columns: int) -> tuple[bool, ...]:
        loaded = vars(self).get("loaded_")
        return loaded.allows_missing if loaded is not None else allows_missing(self._fitted(), num_columns)

    @property
    def classes_(self) -> NDArray[Any]:
        """The classes, in the order of probabilities."""
        loaded = vars(self).get("loaded_")
        return loaded.classes if loaded is not None else np.asarray(self._fitted().classes_)

    @property
    def n_features_in_(self) -> int:
        """The columns of X. Raises AttributeError where the pipeline's first step does not know them."""
        loaded = vars(self).get("loaded_")
        return loaded.num_features if loaded is not None else int(first_step(self._fitted()).n_features_in_)

    @property
    def feature_names_in_(self) -> NDArray[Any]:
        loaded = vars(self).get("loaded_")
        names = loaded.feature_names if loaded is not None else getattr(self._fitted(), "feature_names_in_", None)
        if names is None:
            raise AttributeError("the pipeline was fitted to columns without names")
        return np.asarray(names)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        loaded = vars(self).get("loaded_")
        if loaded is not None:
            tags.estimator_type = "classifier" if loaded.is_classifier else "regressor"
            tags.classifier_tags, tags.regressor_tags = ClassifierTags(), RegressorTags()
            tags.input_tags.allow_nan = all(loaded.allows_missing)
        elif hasattr(self.pipeline, "__sklearn_tags__"):
            inner = get_tags(self.pipeline)
            tags.estimator_type = inner.estimator_type
            tags.classifier_tags, tags.regressor_tags = inner.classifier_tags, inner.regressor_tags
            tags.target_tags, tags.input_tags = inner.target_tags, inner.input_tags
        tags.input_tags.sparse = False
        tags.target_tags.multi_output = False
        tags.non_deterministic = False
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return "translation_" in vars(self) or is_fitted(self.pipeline)

    def _ordered(self, x: Any) -> Table:
        """A table's columns in the order of the fit, where all are there; a wrong number of columns is refused."""
        names = getattr(self, "feature_names_in_", None)
        if names is not None and hasattr(x, "columns") and list(x.columns) != list(names):
            missing = [name for name in names.tolist() if name not in x.columns]
            if missing:
                raise ValueError(f"X lacks the column {missing[0]!r} that the pipeline was fitted to")
            x = x[list(names)]
        if not hasattr(x, "iloc"):
            x = np.asarray(x)
        if x.ndim != 2:
            raise ValueError(f"Expected 2D array, got {x.ndim}D array instead. Reshape your data")
        if not len(x):
            raise ValueError(f"Found array with 0 sample(s) (shape={x.shape}) while WindTunnel needs a minimum of 1")
        num_columns = getattr(self, "n_features_in_", x.shape[1])
        if x.shape[1] != num_columns:
            raise ValueError(f"X has {x.shape[1]} features, but WindTunnel is expecting {num_columns} features as input")
        table = Table(x)
        strict = tuple(place for place, allowed in enumerate(self._allows_missing(num_columns)) if not allowed)
        if strict and (not hasattr(x, "iloc") or table.take(strict).has_missing()):
            assert_all_finite(np.asarray(table.take(strict).whole()), input_name="X")
        return table

    def _dense(self, x: Any) -> None:
        if scipy.sparse.issparse(x):
            raise TypeError("WindTunnel takes dense rows, not a sparse matrix: give X.toarray()")
