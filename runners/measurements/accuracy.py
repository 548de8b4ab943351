"""Accuracy: AUC and log loss of systems that learn from a table, on test rows that nothing was chosen by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from conf.text import counted
from results.accuracy import Accuracy as AccuracyPart
from results.record import Record
from runners.checks import positive_integer

from .base import DASH, Column, Composition, Measurement, Part, Row, RunnerOptions
from .subject import Subject

if TYPE_CHECKING:
    from results.accuracy import SeedAccuracy


@dataclass(frozen=True)
class AccuracyOptions(RunnerOptions):
    """seeds: draws of the split and of all else."""

    seeds: int

    def __post_init__(self) -> None:
        positive_integer("runner.seeds", self.seeds)


@runtime_checkable
class Scored(Protocol):
    """A session that has scored its test rows."""

    def accuracy(self) -> AccuracyPart:
        """The part of a record."""


def summarized(
    seeds: Sequence[SeedAccuracy], rows: tuple[int, int, int], split: str, form: str, parameters: int | None
) -> AccuracyPart:
    """The part of a record.

    Args:
        seeds: at least one.
        rows: that train, validate and test.
        split, form, parameters: as of the part.
    """
    from results.ranking import Area, over_seeds
    from results.record import now

    auc = over_seeds([Area.of(seed.auc, seed.auc_variance) for seed in seeds])
    gains = [Area.of(s.gain, s.gain_variance) for s in seeds if s.gain is not None and s.gain_variance is not None]
    gain = over_seeds(gains) if gains else None
    return AccuracyPart(
        auc.value,
        auc.low,
        auc.high,
        sum(seed.log_loss for seed in seeds) / len(seeds),
        tuple(seeds),
        *rows,
        split,
        form,
        gain.value if gain else None,
        gain.low if gain else None,
        gain.high if gain else None,
        parameters,
        now(),
    )


def _auc(record: Record) -> str:
    part = record.accuracy
    return DASH if part is None else f"{part.auc:.4f}{' (small)' if part.form == 'small' else ''}"


def _interval(record: Record) -> str:
    part = record.accuracy
    return DASH if part is None else f"[{part.low:.4f}, {part.high:.4f}]"


def _auc_with_interval(record: Record) -> str:
    return DASH if record.accuracy is None else f"{_auc(record)} {_interval(record)}"


def _gain(record: Record) -> str:
    part = record.accuracy
    if part is None or part.gain is None:
        return DASH
    return f"{part.gain:+.4f} [{part.gain_low:+.4f}, {part.gain_high:+.4f}]"


def _log_loss(record: Record) -> str:
    return DASH if record.accuracy is None else f"{record.accuracy.log_loss:.4f}"


def _seconds(record: Record) -> str:
    part = record.accuracy
    if part is None:
        return DASH
    fit, tune = (sum(s) / len(part.seeds) for s in zip(*((s.fit_s, s.tune_s) for s in part.seeds), strict=True))
    return f"{fit:.1f} + {tune:.1f}" if tune else f"{fit:.1f}"


def _tuned_rows(record: Record) -> str:
    part = record.accuracy
    times = [seed.epoch_s for seed in part.seeds if seed.epoch_s is not None] if part is not None else []
    return f"{part.training_rows / (sum(times) / len(times)):,.0f}" if part is not None and times else DASH


def _batches(record: Record) -> str:
    """Of each batch the median over seeds, and of a table of categories after a stroke."""
    part = record.accuracy
    times: dict[int, dict[str, list[float]]] = {}
    for seed in part.seeds if part is not None else ():
        for prediction in seed.predictions:
            times.setdefault(prediction.batch, {}).setdefault(prediction.form, []).append(prediction.us)
    of_forms = {batch: " / ".join(f"{median(us):,.0f}" for us in forms.values()) for batch, forms in times.items()}
    return ", ".join(f"{batch}: {text}" for batch, text in of_forms.items()) or DASH


def _predict_us(record: Record) -> str:
    part = record.accuracy
    times = [seed.predict_us for seed in part.seeds if seed.predict_us is not None] if part is not None else []
    return f"{sum(times) / len(times):.2f}" if times else DASH


def _parameters(record: Record) -> str:
    part = record.accuracy
    return DASH if part is None or part.parameters is None else f"{part.parameters:,}"


def _rows(record: Record) -> str:
    part = record.accuracy
    if part is None:
        return DASH
    whole = f"{part.training_rows:,} + {part.validation_rows:,} + {part.test_rows:,} by {part.split}"
    return f"{whole}, {part.form}, {counted(len(part.seeds), 'seed')}"


class Accuracy(Measurement):
    """What the session has learned and scored, in numbers."""

    name = "accuracy"
    Options = AccuracyOptions
    place = 200
    columns = (
        Column("AUC", 0, _auc, "area under the ROC curve on test rows, the mean over seeds"),
        Column("95 %", 0, _interval, "its interval, over draws of test rows and seeds"),
        Column("over pipeline", 0, _gain, "AUC over that of the pipeline that was tuned, with its 95 % interval"),
        Column("log loss", 0, _log_loss, "on test rows, the mean over seeds"),
        Column("fit + tune s", 0, _seconds, "seconds of a seed"),
        Column("tuned rows/s", 1, _tuned_rows, "rows a second of tuning's steps, without validation"),
        Column("µs a row", 1, _predict_us, "of predicting all test rows at once, from the table on"),
        Column("parameters", 1, _parameters, "that training changed last"),
    )
    rows = (
        Row("AUC", _auc_with_interval),
        Row("over the pipeline", _gain),
        Row("log loss", _log_loss),
        Row("fit + tune s", _seconds),
        Row("tuned rows/s", _tuned_rows),
        Row("µs a row", _predict_us),
        Row("µs by batch, values / categories", _batches),
        Row("parameters", _parameters),
        Row("rows", _rows),
    )

    def measure(self, session: Subject) -> Part:
        assert isinstance(session, Scored), "runner=accuracy has a session of its own"
        return session.accuracy()


class Accuracies(Composition):
    """A cell is a system that learns from the model's table."""

    name = "accuracy"
    Options = AccuracyOptions
    session = "runners.cell.accuracy:AccuracySession"
    shown_first = ("AUC",)
