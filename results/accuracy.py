"""How good and how fast predictions of a table are: a part of a record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PredictionTime:
    """How long predicting one batch takes, from the table to probabilities on the host.

    Args:
        batch: rows.
        form: "values": the table as the data set has it; "categories": each of its categories as a number into a list.
        us: microseconds, the median of several calls with other rows.
        encode_us: of what comes before the predictor: encoders, and transfer where there is one.
    """

    batch: int
    form: str
    us: float
    encode_us: float


@dataclass(frozen=True)
class SeedAccuracy:
    """One draw of the split and of all else that is drawn.

    Args:
        seed: of the draw.
        auc, auc_variance: on the test rows, with DeLong's variance.
        log_loss: on the test rows.
        fit_s, tune_s: seconds of fitting, and of tuning afterwards.
        epochs: of tuning.
        gain, gain_variance: the AUC over that of the pipeline that was tuned, on the same rows.
        translation_error: the largest difference between raw scores of that pipeline and of its exact translation.
        predict_us: microseconds a test row, from the table to its probability, all test rows at once.
        epoch_s: seconds of an epoch's steps of tuning, without validation, the median.
        predictions: of batches, by systems that are compared in it.
    """

    seed: int
    auc: float
    auc_variance: float
    log_loss: float
    fit_s: float
    tune_s: float = 0.0
    epochs: int | None = None
    gain: float | None = None
    gain_variance: float | None = None
    translation_error: float | None = None
    predict_us: float | None = None
    epoch_s: float | None = None
    predictions: tuple[PredictionTime, ...] = ()


@dataclass(frozen=True)
class TableCounts:
    """What a table has, as table 5.2 of the dissertation counts it.

    Args:
        numeric, categorical: features.
        categories: different ones of all categorical features, in the training rows of one seed.
        positive_share: of all rows, 0 to 1.
    """

    numeric: int
    categorical: int
    categories: int
    positive_share: float


@dataclass(frozen=True)
class Accuracy:
    """How good predictions are on test rows that nothing was chosen by, over several seeds.

    Args:
        auc: the mean over seeds.
        low, high: the ends of its 95 % interval, over draws of test rows and of seeds.
        log_loss: the mean over seeds.
        seeds: each of them.
        training_rows, validation_rows, test_rows: of one seed.
        split: "rows" or "order".
        form: "whole", or "small" for few rows and trees.
        gain, gain_low, gain_high: the AUC over the pipeline's, for systems that tune one, with its interval.
        parameters: numbers that training changed last.
        when: the time of measuring.
        table: what the table has; None in older records.
    """

    auc: float
    low: float
    high: float
    log_loss: float
    seeds: tuple[SeedAccuracy, ...]
    training_rows: int
    validation_rows: int
    test_rows: int
    split: str
    form: str
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    parameters: int | None = None
    when: str | None = None
    table: TableCounts | None = None
