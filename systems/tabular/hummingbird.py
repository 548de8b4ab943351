"""system=hummingbird: the pipeline's predictor as Hummingbird's exact tensors. Inference alone: nothing is tuned."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np

from systems.base import Unsupported

from .learner import Learned, Learner, Task, fitted_pipeline, log_odds

CONVERTED = {"pipe1": "logistic", "pipe2": "lightgbm"}  # pipelines whose predictor it knows


class Hummingbird(Learner):
    """It knows none of the chapter's encoders, which stay in front, nor a factorization machine."""

    name = "hummingbird"
    needs = ("sklearn", "lightgbm", "hummingbird")
    # Its package asks for an onnx that is years old, and needs none of it here.
    install = "pip install --no-deps hummingbird-ml onnxconverter-common dill"

    def learn_from(self, task: Task) -> Learned:
        if task.pipeline not in CONVERTED:
            raise Unsupported(f"Hummingbird converts no factorization machine, which {task.pipeline} ends in")
        begin = perf_counter()
        made = fitted_pipeline(task)
        fit_s = perf_counter() - begin
        encode, predictor = made[:-1].transform, made[-1]
        with without_tvm():
            from hummingbird.ml import convert

            container = convert(predictor, "torch", encode(task.training[0].head(2)).astype(np.float32), device=task.device)
        original = made.predict_proba(task.test)[:, 1]

        def predict(rows: Any) -> Any:
            return np.asarray(container.predict_proba(encode(rows).astype(np.float32)))[:, 1]

        positive, predict_us = self.timed(predict, task.test)
        predictions = self.batch_times(task, lambda batch: predict, encode)
        error = float(np.abs(log_odds(positive) - log_odds(original)).max())
        return Learned(
            positive,
            fit_s,
            pipeline_positive=original,
            translation_error=error,
            predict_us=predict_us,
            predictions=predictions,
        )


@contextmanager
def without_tvm() -> Iterator[None]:
    """Hide TVM: Hummingbird 0.4.12 imports `tvm._ffi` of it at once where it is installed, and TVM 0.27 has none."""
    known = {name: module for name, module in sys.modules.items() if name == "tvm" or name.startswith("tvm.")}
    for name in known:
        del sys.modules[name]
    hidden: Any = None
    sys.modules["tvm"] = hidden
    try:
        yield
    finally:
        del sys.modules["tvm"]
        sys.modules.update(known)
