"""WindTunnel as a scikit-learn estimator around a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import clone
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.utils import column_or_1d
from torch import Tensor

from models.neural.forests import LEVELS, HardForest
from models.neural.lookups import LookupForest
from systems.tabular.steps import AUTO, Rows, check_executor, system_for

from . import checks, saving
from .base import SCOPES, STARTS, Form, of_second_class
from .fine_tuning import Course, Settings, fine_tune, fit_to_inputs, in_chunks
from .losses import default_name, loss_of
from .predictor import EXACT, Predictor, is_fitted
from .translate import Translation, translate


class WindTunnel(Predictor):
    """A pipeline as a network that is fine-tuned as one (dissertation, chapter 5).

    `fit` fits the pipeline, translates it and fine-tunes. Around a fitted pipeline `fine_tune` alone does; before it, the
    predictions are the pipeline's own, by the exact translation.

    Args:
        pipeline: of scikit-learn, or a predictor alone.
        level: what of a tree trains: 1 leaf values, 2 thresholds too, 3 the weights of all features, 4 all.
        temperature: of the soft trees, above 0.
        dropout: of the trees' hidden layers.
        scope: "all" trains the encoders too; "trees" the trees and what is behind them.
        start: "warm" begins at the pipeline's values; "cold" at random ones.
        learning_rate, weight_decay: of Adam; several of either are tried in turn, and the validation rows choose.
        batch_size: rows of a step.
        max_epochs: at most.
        patience: epochs without a better validation metric (AUC of two classes, else the loss) after which it ends.
        validation_fraction: the share of the rows that validates where no validation rows are given.
        loss: "logistic", "hinge", "squared", "absolute" or "poisson"; None for what fits the predictor.
        random_state: of dropout, orders and splits.
        device: "auto" is the GPU where there is one.
        system: that runs the steps, of conf/system; None is cuda_graph on a GPU and eager on a CPU.
        may_keep_pipeline: the pipeline as it was fitted is a candidate too: where no epoch comes above it on the
            validation rows, its exact translation stays. The chapter always takes what was tuned.
    """

    def __init__(
        self,
        pipeline: Any = None,
        level: int = 4,
        temperature: float = 1.0,
        dropout: float = 0.1,
        scope: str = "all",
        start: str = "warm",
        learning_rate: float | Sequence[float] = 1e-4,
        weight_decay: float | Sequence[float] = 1e-6,
        batch_size: int = 4096,
        max_epochs: int = 100,
        patience: int = 3,
        validation_fraction: float = 0.1,
        loss: str | None = None,
        random_state: int = 0,
        device: str = "auto",
        system: str | None = None,
        may_keep_pipeline: bool = False,
    ):
        self.pipeline = pipeline
        self.level = level
        self.temperature = temperature
        self.dropout = dropout
        self.scope = scope
        self.start = start
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.loss = loss
        self.random_state = random_state
        self.device = device
        self.system = system
        self.may_keep_pipeline = may_keep_pipeline

    report: Callable[[str], None] = staticmethod(lambda message: None)  # hears where fine-tuning stands

    # Fitting

    def fit(self, X: Any, y: Any, validation: tuple[Any, Any] | None = None) -> Self:
        """Fit a copy of the pipeline to the training rows, translate and fine-tune it.

        Args:
            X: rows as the pipeline takes them, [B, columns].
            y: labels or values, [B].
            validation: (X, y) of other rows; otherwise a share of the rows.
        """
        with self._as_it_was_if_it_fails():
            self._check()
            self._dense(X)
            y = column_or_1d(y, warn=True)
            if self.pipeline is None:
                raise ValueError("WindTunnel needs a pipeline to fit; what was loaded is tuned on by fine_tune")
            if validation is None:
                X, y, validation = self._split(X, y)
            self.pipeline_ = clone(self.pipeline).fit(X, y)
            return self._tuned(X, y, validation)

    def fine_tune(self, X: Any, y: Any, validation: tuple[Any, Any] | None = None, **settings: Any) -> Self:
        """Translate a fitted pipeline and fine-tune it; one that was loaded goes on from where it stands.

        Args:
            X, y, validation: as for `fit`.
            settings: parameters to set first, such as learning_rate.
        """
        with self._as_it_was_if_it_fails():
            self.set_params(**settings)
            self._check()
            self._dense(X)
            y = column_or_1d(y, warn=True)
            if not len(y):
                raise ValueError("there are no rows to fine-tune on")
            if self.__sklearn_is_fitted__() and self._is_classifier and len(np.unique(y)) < 2:
                raise ValueError(f"y has one class, {y[0]}: fine-tuning a classifier needs rows of two")
            if validation is None:
                X, y, validation = self._split(X, y)
            if self.pipeline is not None and (is_fitted(self.pipeline) or "pipeline_" not in vars(self)):
                self.pipeline_ = self.pipeline
            return self._tuned(X, y, validation)

    @contextmanager
    def _as_it_was_if_it_fails(self) -> Iterator[None]:
        """A refusal, or an interruption, changes neither a parameter nor what was tuned before."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            self.__dict__ = before
            raise

    def _split(self, x: Any, y: Any) -> tuple[Any, Any, tuple[Any, Any]]:
        fraction = self.validation_fraction
        if not 0 < fraction < 1:
            raise ValueError(f"validation_fraction must be between 0 and 1, not {fraction!r}")
        counts = np.unique(y, return_counts=True)[1]
        num_held = int(np.ceil(fraction * len(y)))
        stratify = (
            y if self._is_classifier and counts.min() >= 2 and len(counts) <= min(num_held, len(y) - num_held) else None
        )
        x, other, y, other_y = train_test_split(x, y, test_size=fraction, random_state=self.random_state, stratify=stratify)
        return x, y, (other, other_y)

    def _tuned(self, x: Any, y: Any, validation: tuple[Any, Any]) -> Self:
        checks.pair("validation", validation)
        device = checks.device(self.device)
        if self.pipeline is not None:
            form = Form(True, self.level, self.temperature, self.dropout)
            translation = translate(self.pipeline_, form)
        else:
            translation = self._translated()
            if any(isinstance(module, HardForest | LookupForest) for module in translation.network.modules()):
                raise ValueError(
                    "what was loaded has exact trees, which do not train: fine-tune around the pipeline, then save"
                )
        inputs = translation.inputs(self._ordered(x), device)
        translation.network.to(device)
        if self.pipeline is not None:
            fit_to_inputs(translation, inputs)
        link = translation.link
        loss = loss_of(self.loss or default_name(link, self._is_classifier), link, self._is_classifier)
        held, held_y = validation
        others = translation.inputs(self._ordered(held), device)
        training, checking = Rows(inputs, self._target(y, device)), Rows(others, self._target(held_y, device))
        is_ranked = self._is_classifier and len(self.classes_) == 2 and len(checking.target.unique()) == 2

        def metric(scores: Tensor, target: Tensor) -> float:
            if not is_ranked:
                return -float(loss(scores, target))
            score = of_second_class(scores.double()).cpu().numpy()
            return float(roc_auc_score(target.cpu().numpy(), score)) if np.isfinite(score).all() else -np.inf

        settings = Settings(
            checks.several("learning_rate", self.learning_rate),
            checks.several("weight_decay", self.weight_decay, takes_0=True),
            int(self.batch_size),
            int(self.max_epochs),
            int(self.patience),
            self.scope,
            self.start,
            self.random_state,
            system_for(self.system or AUTO, device),
        )
        course = fine_tune(translation, training, checking, loss, metric, settings, self.report)
        if self.may_keep_pipeline and self.pipeline is not None:
            exact = translate(self.pipeline_, EXACT)
            exact.network.to(device)
            first = metric(in_chunks(exact.network, exact.inputs(self._ordered(held), device)), checking.target)
            course = replace(course, first_metric=first, keeps_pipeline=first >= course.chosen.metric)
            if course.keeps_pipeline:
                translation = exact
                self.report(f"the pipeline stays: validation {first:.5f}, tuned {course.chosen.metric:.5f}")
        self.course_: Course = course
        self.n_iter_ = len(course.chosen.losses)
        self.translation_: Translation = translation
        return self

    def _target(self, y: Any, device: torch.device) -> Tensor:
        y = column_or_1d(y)
        if not self._is_classifier:
            return torch.as_tensor(y.astype(np.float64), dtype=torch.float32, device=device)
        places = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        if (wrong := self.classes_[places] != y).any():
            raise ValueError(f"y has the class {y[wrong][0]}, which the pipeline was not fitted to")
        return torch.as_tensor(places, dtype=torch.long, device=device)

    def _check(self) -> None:
        """Refuse wrong parameters, each in one line."""
        if "loaded_" not in vars(self):
            self._fitted()
        for name, choices in (("level", LEVELS), ("scope", SCOPES), ("start", STARTS)):
            checks.one_of(name, getattr(self, name), choices)
        checks.between("temperature", self.temperature, 0, np.inf)
        checks.between("dropout", self.dropout, 0, 1, takes_low=True)
        for name in ("batch_size", "max_epochs", "patience"):
            checks.whole_number(name, getattr(self, name))
        checks.several("learning_rate", self.learning_rate)
        checks.several("weight_decay", self.weight_decay, takes_0=True)
        checks.device(self.device)
        if self.system is not None:
            check_executor(self.system, "system")

    # Keeping

    def save(self, folder: str | Path) -> None:
        """Write `weights.safetensors` and `windtunnel.json` into a folder. Nothing in them can run code.

        Raises:
            saving.NotSavable: an operator that stays on the host holds what neither file can.
        """
        names, num_columns = getattr(self, "feature_names_in_", None), self.n_features_in_
        facts = saving.Facts(
            self._is_classifier,
            self.classes_ if self._is_classifier else None,
            num_columns,
            None if names is None else tuple(names),
            self._allows_missing(num_columns),
            {name: value for name, value in self.get_params(deep=False).items() if name != "pipeline"},
        )
        saving.save(Path(folder), self._translated(), facts)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """What `save` wrote. It predicts and fine-tunes on; it has no pipeline to fit. Raises saving.NotSavable."""
        translation, facts = saving.load(Path(folder))
        try:
            estimator = cls(None, **facts.parameters)
        except TypeError as error:
            raise saving.NotSavable(f"{folder} holds no saved WindTunnel: {error}") from None
        estimator.translation_, estimator.loaded_ = translation, facts
        return estimator
