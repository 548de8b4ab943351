"""What a system is that learns from a table. It executes no module: `runner=accuracy` fits it and looks at its scores."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from systems.base import BadOption, Prepared, System, Unsupported

if TYPE_CHECKING:
    import pandas as pd

    from models.tabular.dataset import Dataset
    from models.tabular.pipelines import Size


BATCHES, REPEATS = (1, 64, 4096), 15  # rows of the batches whose predicting is timed, and calls
SMALL_EPOCHS, SMALL_BATCH, SMALL_TRIALS = 15, 256, 5  # at most, of a small task


@dataclass(frozen=True, eq=False)
class Task:
    """Rows of a table, and the pipeline that they are given to.

    Attributes:
        dataset: whose columns these are.
        training, validation: rows and labels, 0 or 1.
        test: rows alone; nobody who learns sees their labels.
        preprocessing, pipeline, size: of the chapter's pipelines.
        is_small: few rows, so that few epochs, small batches and few settings do.
        seed: of all that is drawn.
        device: "cpu" or "cuda".
        report: hears where a long fit stands.
    """

    dataset: Dataset
    training: tuple[pd.DataFrame, NDArray[np.int64]]
    validation: tuple[pd.DataFrame, NDArray[np.int64]]
    test: pd.DataFrame
    preprocessing: str
    pipeline: str
    size: Size
    is_small: bool
    seed: int
    device: str
    report: Callable[[str], None]


@dataclass(frozen=True)
class BatchTime:
    """Predicting a batch; see results.accuracy.PredictionTime."""

    batch: int
    form: str
    us: float
    encode_us: float


@dataclass(frozen=True, eq=False)
class Learned:
    """What came of a task.

    Attributes:
        positive: [test rows], the probability of label 1.
        fit_s: seconds of fitting the pipeline, or the model.
        tune_s: seconds of tuning it afterwards.
        parameters: numbers that training changed last; None where nobody counts.
        epochs: of tuning, those that the best setting took.
        pipeline_positive: [test rows], of the pipeline that was tuned; None where none was.
        translation_error: the largest difference between the raw scores of the pipeline and of its exact translation.
        predict_us: microseconds a test row, from the table to its probability, all test rows at once.
        epoch_s: seconds of an epoch's steps of tuning, without validation; the median of the best setting's epochs.
        predictions: of batches.
    """

    positive: NDArray[np.float64]
    fit_s: float
    tune_s: float = 0.0
    parameters: int | None = None
    epochs: int | None = None
    pipeline_positive: NDArray[np.float64] | None = None
    translation_error: float | None = None
    predict_us: float | None = None
    epoch_s: float | None = None
    predictions: tuple[BatchTime, ...] = ()


class Learner(System):
    """Fits a task."""

    needs: tuple[str, ...] = ("sklearn", "lightgbm")  # modules, of the extra `windtunnel`
    install = "pip install '.[windtunnel]'"

    def unsupported(self, device: str) -> str | None:
        from importlib.util import find_spec

        missing = [module for module in self.needs if find_spec(module) is None]
        return f"{self.name} needs {missing[0]}: {self.install}" if missing else None

    @property
    def learns(self) -> bool:
        return True

    @staticmethod
    def timed(
        predict: Callable[[pd.DataFrame], NDArray[np.float64]], rows: pd.DataFrame
    ) -> tuple[NDArray[np.float64], float]:
        """What `predict` gives of rows, and microseconds a row of a call that is not its first."""
        predict(rows)
        begin = perf_counter()
        positive = predict(rows)
        return positive, 1e6 * (perf_counter() - begin) / len(rows)

    @staticmethod
    def batch_times(
        task: Task,
        of_batch: Callable[[int], Callable[[pd.DataFrame], object]],
        encode: Callable[[pd.DataFrame], object],
    ) -> tuple[BatchTime, ...]:
        """How long batches of test rows take, each call with other rows.

        Args:
            task: whose test rows.
            of_batch: rows of a batch -> what predicts such a batch; its result is on the host.
            encode: what comes before the predictor, ended when it returns.
        """
        categories = task.test.astype(dict.fromkeys(task.dataset.categorical, "category"))
        times = []
        for batch in (size for size in BATCHES if size <= len(task.test)):
            predict = of_batch(batch)
            for form, table in (("values", task.test), ("categories", categories)):
                starts = np.arange(REPEATS) * batch % (len(table) - batch + 1)
                slices = [table.iloc[start : start + batch] for start in starts]
                times.append(BatchTime(batch, form, _median_us(predict, slices), _median_us(encode, slices)))
        return tuple(times)

    @abstractmethod
    def learn_from(self, task: Task) -> Learned:
        """Fit to the training rows, choose by the validation rows, and score the test rows."""

    def learn(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise Unsupported(f"{self.name} learns from tables and executes no network: runner=accuracy compares such systems")

    def prepare(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
        raise Unsupported(f"{self.name} learns from tables and executes no network: runner=accuracy compares such systems")


def _median_us(call: Callable[[pd.DataFrame], object], slices: list[pd.DataFrame]) -> float:
    """The median of a call for each slice, after one that does not count."""
    call(slices[0])
    times = []
    for rows in slices:
        begin = perf_counter()
        call(rows)
        times.append(perf_counter() - begin)
    return 1e6 * float(np.median(times))


def check_options(above_0: dict[str, float], at_least_0: dict[str, float], at_least_1: dict[str, int]) -> None:
    """Raises BadOption for the first option, by its name, that is not so."""
    for limit, options in (("above 0", above_0), ("at least 0", at_least_0), ("at least 1", at_least_1)):
        for key, value in options.items():
            is_so = value > 0 if limit == "above 0" else value >= float(limit[-1])
            if not is_so or not np.isfinite(value):
                raise BadOption(f"system.{key}={value} is not {limit}")


def fitted_pipeline(task: Task) -> Any:
    """The task's pipeline, fitted to the training rows alone."""
    from models.tabular.pipelines import pipeline

    made = pipeline(task.preprocessing, task.pipeline, task.dataset, task.size, task.seed)
    return made.fit(*task.training)


def log_odds(positive: NDArray[np.float64]) -> NDArray[np.float64]:
    """The raw scores that these probabilities are of, as the three predictors have them."""
    probability = positive.clip(1e-12, 1 - 1e-12)
    result: NDArray[np.float64] = np.log(probability) - np.log1p(-probability)
    return result
