"""system=pipeline: the pipeline as it is. system=lightgbm: LightGBM's own categories, chosen among random settings."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from .learner import SMALL_TRIALS, Learned, Learner, Task, check_options, fitted_pipeline


class Pipeline(Learner):
    name = "pipeline"

    def learn_from(self, task: Task) -> Learned:
        begin = perf_counter()
        made = fitted_pipeline(task)
        fit_s = perf_counter() - begin
        positive, predict_us = self.timed(lambda rows: made.predict_proba(rows)[:, 1], task.test)
        predictions = self.batch_times(task, lambda batch: made.predict_proba, made[:-1].transform)
        return Learned(positive, fit_s, predict_us=predict_us, predictions=predictions)


class LightGBM(Learner):
    """Gradient boosting over the columns themselves, whatever the pipeline.

    Args:
        trials: random settings, of which the validation rows choose; the first is LightGBM's default.
        max_trees: of a trial, which ends where the validation AUC has not risen for 50 trees.
    """

    name = "lightgbm"

    def __init__(self, trials: int = 20, max_trees: int = 2000):
        check_options({}, {}, {"trials": trials, "max_trees": max_trees})
        self.trials, self.max_trees = trials, max_trees

    def learn_from(self, task: Task) -> Learned:
        import lightgbm
        import pandas as pd

        kinds = {name: pd.CategoricalDtype(pd.unique(task.training[0][name].dropna())) for name in task.dataset.categorical}
        x, held = (rows.astype(kinds) for rows in (task.training[0], task.validation[0]))
        generator = np.random.default_rng(task.seed)
        best_metric, best, fit_s, tune_s = -np.inf, None, 0.0, 0.0
        trials = min(self.trials, SMALL_TRIALS) if task.is_small else self.trials
        for trial in range(trials):
            setting = self._setting(generator) if trial else {}
            task.report(f"LightGBM, setting {trial + 1} of {trials}")
            begin = perf_counter()
            model = lightgbm.LGBMClassifier(
                n_estimators=self.max_trees,
                random_state=task.seed,
                n_jobs=task.size.num_threads or None,
                deterministic=True,
                verbose=-1,
                **setting,
            )
            stopping = lightgbm.early_stopping(50, verbose=False)
            model.fit(x, task.training[1], eval_set=[(held, task.validation[1])], eval_metric="auc", callbacks=[stopping])
            seconds = perf_counter() - begin
            fit_s, tune_s = (seconds, tune_s) if not trial else (fit_s, tune_s + seconds)
            if (metric := model.best_score_["valid_0"]["auc"]) > best_metric:
                best_metric, best = metric, model
        assert best is not None
        chosen = best
        positive, predict_us = self.timed(lambda rows: np.asarray(chosen.predict_proba(rows.astype(kinds)))[:, 1], task.test)
        return Learned(positive, fit_s, tune_s, predict_us=predict_us)

    @staticmethod
    def _setting(generator: np.random.Generator) -> dict[str, Any]:
        return {
            "num_leaves": int(2 ** generator.integers(3, 9)),
            "learning_rate": float(10 ** generator.uniform(-2, -0.5)),
            "min_child_samples": int(2 ** generator.integers(2, 9)),
            "colsample_bytree": float(generator.uniform(0.5, 1.0)),
            "reg_lambda": float(10 ** generator.uniform(-3, 2)),
        }
