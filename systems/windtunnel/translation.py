"""system=translation: the pipeline's exact translation, which nothing tunes. What it has of its own is its speed."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from systems.base import Prepared
from systems.registry import load
from systems.tabular.learner import Learned, Learner, Task, fitted_pipeline, log_odds
from systems.tabular.steps import AUTO, check_executor, system_for

if TYPE_CHECKING:
    from .base import Link


class _Probabilities(nn.Module):
    """A network and what makes probabilities of its raw scores: inputs -> [B, classes]."""

    def __init__(self, network: nn.Module, link: Link):
        super().__init__()
        self.network, self.link = network, link

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.link.predicted(self.network(*inputs))


class TranslationLearner(Learner):
    """In float64, where no rounding moves a row across a threshold.

    Args:
        executor: what runs the network, of conf/system; "auto" is cuda_graph on a GPU and eager on a CPU.
    """

    name = "translation"

    def __init__(self, executor: str = AUTO):
        check_executor(executor)
        self.executor = executor

    def learn_from(self, task: Task) -> Learned:
        from .base import Form
        from .translate import translate

        begin = perf_counter()
        made = fitted_pipeline(task)
        fit_s = perf_counter() - begin
        translation = translate(made, Form(dtype=torch.float64))
        module = _Probabilities(translation.network, translation.link).to(task.device).eval()
        executor = system_for(self.executor, task.device)
        prepared: dict[int, Prepared] = {}

        def of_batch(batch: int) -> Callable[[Any], NDArray[np.float64]]:
            if batch not in prepared:
                prepared[batch] = load(executor).prepare(module, translation.inputs(task.test.head(batch), task.device))
            call = prepared[batch]
            return lambda rows: call(*translation.inputs(rows, task.device)).cpu().numpy()[:, -1]

        def encode(rows: Any) -> None:
            translation.inputs(rows, task.device)
            if torch.device(task.device).type == "cuda":
                torch.cuda.synchronize()

        whole = of_batch(len(task.test))
        original = made.predict_proba(task.test)[:, 1]
        positive, predict_us = self.timed(whole, task.test)
        predictions = self.batch_times(task, of_batch, encode)
        error = np.abs(log_odds(positive) - log_odds(original)).max()
        for batch in {prediction.batch for prediction in predictions}:
            of_these = of_batch(batch)(task.test.head(batch))
            error = max(error, np.abs(log_odds(of_these) - log_odds(original[:batch])).max())
        for call in prepared.values():
            call.close()
        return Learned(
            positive,
            fit_s,
            pipeline_positive=original,
            translation_error=float(error),
            predict_us=predict_us,
            predictions=predictions,
        )
