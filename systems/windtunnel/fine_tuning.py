"""Fine-tuning of a translated pipeline as one network (dissertation, section 5.2.4).

Invariant: epochs and settings are chosen by the validation rows alone; what is kept is the best epoch of the best setting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.neural.forests import SoftForest
from systems.tabular.steps import Rows, Steps, optimizer_options

from .losses import Loss
from .translate import Translation

MOST_SAMPLED = 100_000  # rows that thresholds and scales are taken from
CHUNK = 16_384  # rows of one call without gradients


@dataclass(frozen=True)
class Settings:
    """How to train.

    Args:
        learning_rates, weight_decays: of Adam, whose decay is added to the gradient; each pair is tried.
        batch_size: rows of a step.
        max_epochs: at most.
        patience: epochs without a better metric after which a setting ends.
        scope: "all" trains encoders too; "trees" the trees and what is behind them.
        start: "cold" draws all that trains at random first.
        seed: of dropout, of the order of rows, and of a cold start.
        system: of conf/system, which runs the steps of full batches; "eager", "cuda_graph", "nimble", ...
    """

    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...]
    batch_size: int
    max_epochs: int
    patience: int
    scope: str
    start: str
    seed: int
    system: str


@dataclass(frozen=True)
class Trial:
    """One setting.

    Attributes:
        metrics, losses: by epoch; more of a metric is better.
        best_epoch: from 0; None: there was none.
        seconds: of the whole.
        epoch_seconds: of each epoch's steps alone.
    """

    learning_rate: float
    weight_decay: float
    metrics: tuple[float, ...]
    losses: tuple[float, ...]
    best_epoch: int | None
    seconds: float
    epoch_seconds: tuple[float, ...] = ()

    @property
    def metric(self) -> float:
        return -np.inf if self.best_epoch is None else self.metrics[self.best_epoch]

    @property
    def is_diverged(self) -> bool:
        """Did the last epoch's loss leave the numbers?"""
        return bool(self.losses) and not np.isfinite(self.losses[-1])


@dataclass(frozen=True)
class Course:
    """What fine-tuning did.

    Attributes:
        trials: every setting in turn.
        best: the place of the best.
        rows: that trained.
        first_metric: of the pipeline as it was fitted, where that is a candidate.
        keeps_pipeline: its exact translation stays, since no setting came above it.
    """

    trials: tuple[Trial, ...]
    best: int
    rows: int
    first_metric: float | None = None
    keeps_pipeline: bool = False

    @property
    def chosen(self) -> Trial:
        return self.trials[self.best]

    @property
    def seconds(self) -> float:
        return sum(trial.seconds for trial in self.trials)


class Diverged(RuntimeError):
    """No epoch of any setting had a loss that is a number."""


def in_chunks(module: nn.Module, inputs: Sequence[Tensor], part: Callable[..., Tensor] | None = None) -> Tensor:
    """What a module in eval mode gives for all rows, without gradients."""
    was_training = module.training
    module.eval()
    call = part or module
    with torch.no_grad():
        pieces = [call(*(t[i : i + CHUNK] for t in inputs)) for i in range(0, len(inputs[0]), CHUNK)]
    module.train(was_training)
    return torch.cat(pieces)


def fit_to_inputs(translation: Translation, inputs: Sequence[Tensor]) -> None:
    """Move the thresholds of soft trees to the middle of the rows' values around them, and standardize what trees see.

    No exact decision about these rows changes. At a temperature of 1 a tanh needs inputs of about 1 to tell them apart.
    """
    sample = [tensor[:MOST_SAMPLED] for tensor in inputs]
    for forest in translation.forests:
        if not isinstance(forest.module, SoftForest):
            continue
        source = forest.source
        seen = in_chunks(source, sample, lambda *tensors, source=source: source(tensors)).double().cpu().numpy()
        shift, scale = _standard(seen)
        forest.module.standardize(forest.ensemble.with_thresholds_between(seen), shift, scale)


def _standard(seen: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and deviation of each column; of one of two values what makes them -1 and 1; of a constant one nothing."""
    seen = np.where(np.isfinite(seen), seen, np.nan)
    is_known = ~np.isnan(seen).all(0)
    low, high, mean, deviation = (np.zeros(seen.shape[1]) for _ in range(4))
    known = seen[:, is_known]
    low[is_known], high[is_known] = np.nanmin(known, 0), np.nanmax(known, 0)
    mean[is_known], deviation[is_known] = np.nanmean(known, 0), np.nanstd(known, 0)
    is_two_valued = ((seen == low) | (seen == high) | np.isnan(seen)).all(0) & (high > low)
    shift = np.where(is_two_valued, (low + high) / 2, mean)
    scale = np.where(is_two_valued, (high - low) / 2, deviation)
    is_constant = ~(scale > 0)
    return np.where(is_constant, 0.0, shift), np.where(is_constant, 1.0, scale)


def trained(translation: Translation, scope: str) -> list[nn.Parameter]:
    """The parameters that a scope trains; the others stop requiring gradients."""
    if scope == "trees":
        trained_ids = {
            id(p) for part in (translation.predictor, *(f.module for f in translation.forests)) for p in part.parameters()
        }
        for parameter in translation.network.parameters():
            parameter.requires_grad_(parameter.requires_grad and id(parameter) in trained_ids)
    return [p for p in translation.network.parameters() if p.requires_grad and p.numel()]


def fine_tune(
    translation: Translation,
    training: Rows,
    validation: Rows,
    loss: Loss,
    metric: Callable[[Tensor, Tensor], float],
    settings: Settings,
    report: Callable[[str], None],
) -> Course:
    """Train a soft translation in place.

    Args:
        translation: on the rows' device.
        training, validation: rows.
        loss: over raw scores and target.
        metric: of the validation rows' raw scores and target; more is better.
        settings: how.
        report: hears of each epoch.

    Raises:
        Diverged: no setting had one epoch whose loss is a number. The network is as it was.
    """
    network = translation.network
    parameters = trained(translation, settings.scope)
    device = training.target.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(settings.seed)
        if settings.start == "cold":
            _draw(network, parameters)
        first = [p.detach().clone() for p in parameters]
        trials: list[Trial] = []
        best_metric, best_state = -np.inf, first
        pairs = list(product(settings.learning_rates, settings.weight_decays))
        for number, (rate, decay) in enumerate(pairs):
            _restore(parameters, first)
            torch.manual_seed(settings.seed)
            where = f"setting {number + 1} of {len(pairs)}, " if len(pairs) > 1 else ""
            report_trial = lambda line, where=where: report(where + line)  # noqa: E731
            trial, state = _trial(
                network, parameters, training, validation, loss, metric, settings, rate, decay, report_trial
            )
            trials.append(trial)
            if trial.metric > best_metric:
                best_metric, best_state = trial.metric, state
        _restore(parameters, best_state)
    network.eval()
    if best_metric == -np.inf:
        are_missing = any(tensor.is_floating_point() and bool(tensor.isnan().any()) for tensor in training.inputs)
        advice = "X holds NaN, of which this pipeline has no score" if are_missing else "take a smaller learning_rate"
        raise Diverged(f"the loss was no number in the first epoch of every setting; {advice}")
    return Course(tuple(trials), int(np.argmax([trial.metric for trial in trials])), len(training))


def _trial(
    network: nn.Module,
    parameters: list[nn.Parameter],
    training: Rows,
    validation: Rows,
    loss: Loss,
    metric: Callable[[Tensor, Tensor], float],
    settings: Settings,
    rate: float,
    decay: float,
    report: Callable[[str], None],
) -> tuple[Trial, list[Tensor]]:
    """One setting, to the end of its patience; returns its best parameters too."""
    optimizer = torch.optim.Adam(parameters, rate, weight_decay=decay, **optimizer_options(parameters))
    network.train()
    step = Steps(network, optimizer, loss, training, settings.batch_size, settings.system)
    metrics: list[float] = []
    losses: list[float] = []
    best_epoch, best_state = None, [p.detach().clone() for p in parameters]
    epoch_seconds: list[float] = []
    begin = perf_counter()
    for epoch in range(settings.max_epochs):
        epoch_begin = perf_counter()
        losses.append(step.epoch())
        epoch_seconds.append(perf_counter() - epoch_begin)
        if not np.isfinite(losses[-1]):
            report(f"epoch {epoch + 1}: the loss is no number; what was best before stays")
            break
        metrics.append(metric(in_chunks(network, validation.inputs), validation.target))
        if best_epoch is None or metrics[-1] > metrics[best_epoch]:
            best_epoch, best_state = epoch, [p.detach().clone() for p in parameters]
        spent = perf_counter() - begin
        report(f"epoch {epoch + 1} of at most {settings.max_epochs}: validation {metrics[-1]:.5f}, {spent:.0f} s")
        if epoch - best_epoch >= settings.patience:
            break
    step.close()
    seconds = perf_counter() - begin
    return Trial(rate, decay, tuple(metrics), tuple(losses), best_epoch, seconds, tuple(epoch_seconds)), best_state


def _restore(parameters: list[nn.Parameter], state: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, state, strict=True):
            parameter.copy_(value)


def _draw(network: nn.Module, parameters: list[nn.Parameter]) -> None:
    """A cold start: what trains takes random values, all else stays."""
    trains = {id(p) for p in parameters}
    state = [(p, p.detach().clone()) for p in network.parameters() if id(p) not in trains]
    for module in network.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    with torch.no_grad():
        for parameter, value in state:
            parameter.copy_(value)
