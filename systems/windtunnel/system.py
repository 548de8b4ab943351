"""system=windtunnel: fits the task's pipeline, translates it and tunes it as one network."""

from __future__ import annotations

from time import perf_counter

import numpy as np
import torch

from conf import Options, not_one_of
from models.neural.forests import LEVELS
from systems.base import BadOption
from systems.tabular.learner import (
    SMALL_BATCH,
    SMALL_EPOCHS,
    Learned,
    Learner,
    Task,
    check_options,
    fitted_pipeline,
    log_odds,
)

from .base import LEARNING_RATES, SCOPES, STARTS, WEIGHT_DECAYS, Form


class WindTunnelLearner(Learner):
    """Options are those of `estimator.WindTunnel`.

    Args:
        grid: try the chapter's learning rates and weight decays, 15 settings, and let the validation rows choose.
    """

    name = "windtunnel"
    needs = ("sklearn", "lightgbm", "safetensors")

    def __init__(
        self,
        level: int = 4,
        temperature: float = 1.0,
        dropout: float = 0.0,
        scope: str = "all",
        start: str = "warm",
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-6,
        grid: bool = False,
        batch_size: int = 1024,
        max_epochs: int = 60,
        patience: int = 5,
        may_keep_pipeline: bool = False,
    ):
        for key, value, known in (("level", level, LEVELS), ("scope", scope, SCOPES), ("start", start, STARTS)):
            if wrong := not_one_of(f"system.{key}", str(value), [str(name) for name in known]):
                raise BadOption(wrong)
        check_options(
            {"temperature": temperature, "learning_rate": learning_rate},
            {"weight_decay": weight_decay},
            {"batch_size": batch_size, "max_epochs": max_epochs, "patience": patience},
        )
        if not 0 <= dropout < 1:
            raise BadOption(f"system.dropout={dropout} is not at least 0 and below 1")
        self.grid = grid
        self.options: Options = {
            "level": level,
            "temperature": temperature,
            "dropout": dropout,
            "scope": scope,
            "start": start,
            "learning_rate": learning_rate,
            "weight_decay": weight_decay,
            "batch_size": batch_size,
            "max_epochs": max_epochs,
            "patience": patience,
            "may_keep_pipeline": may_keep_pipeline,
        }

    def learn_from(self, task: Task) -> Learned:
        from .estimator import WindTunnel
        from .fine_tuning import in_chunks
        from .translate import translate

        begin = perf_counter()
        made = fitted_pipeline(task)
        fit_s = perf_counter() - begin
        tunnel = WindTunnel(made, random_state=task.seed, device=task.device).set_params(**self.options)
        if self.grid:
            tunnel.set_params(learning_rate=LEARNING_RATES, weight_decay=WEIGHT_DECAYS)
        if task.is_small:
            few = min(tunnel.max_epochs, SMALL_EPOCHS), min(tunnel.batch_size, SMALL_BATCH)
            tunnel.set_params(max_epochs=few[0], batch_size=few[1])
        original = made.predict_proba(task.test)[:, 1]
        # In float64: in float32 a scaler in front rounds otherwise, and a row on a threshold may go the other way.
        exact = translate(made, Form(dtype=torch.float64))
        scores = in_chunks(exact.network.to(task.device), exact.inputs(task.test, task.device)) * exact.link.scale
        error = float(np.abs(scores[:, 0].cpu().numpy() - log_odds(original)).max())
        tunnel.report = lambda line: task.report(f"tuning, {line}")
        begin = perf_counter()
        tunnel.fine_tune(*task.training, validation=task.validation)
        tune_s = perf_counter() - begin
        parameters = sum(p.numel() for p in tunnel.module.parameters() if p.requires_grad)
        positive, predict_us = self.timed(lambda rows: tunnel.predict_proba(rows)[:, 1], task.test)
        epoch_s = float(np.median(tunnel.course_.chosen.epoch_seconds))
        return Learned(positive, fit_s, tune_s, parameters, tunnel.n_iter_, original, error, predict_us, epoch_s)
