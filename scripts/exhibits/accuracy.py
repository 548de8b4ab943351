"""AUC of pipelines and of what learns from the same table, as published and as measured here.

A published value is of a table ("criteo(10%)/pre2") and of a system ("windtunnel(pipe2; level=3)"). It is judged by its
difference to another of the same table: what one gains over the other.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from results.cell import choose
from results.finding import Finding
from results.published.value import Value
from results.record import Accuracy, Record

from .evidence import Evidence
from .preset import Preset
from .quantities import Missing

AUC, ROWS = "auc", "rows"
METRICS = (AUC, ROWS)
UNIT = "AUC"
MILLION = 1e6
NOT_GIVEN = {"flight", "avazu", "criteo"}  # tables that nobody can install


@dataclass(frozen=True)
class Table:
    """ "criteo(10%)/pre2" as the options of a model here."""

    dataset: str
    share: float
    preprocessing: str

    @classmethod
    def of(cls, text: str) -> "Table":
        """Raises ValueError."""
        match = re.fullmatch(r"(\w+)(?:\((\d+)%\))?(?:/(\w+))?", text)
        if match is None:
            raise ValueError(f"{text!r} is no table and preprocessing")
        return cls(match[1], int(match[2] or 100) / 100, match[3] or "")

    def holds(self, record: Record, pipeline: str) -> bool:
        options = record.cell.model.options
        own = (options.get("dataset"), options.get("training_share"), options.get("preprocessing"))
        return own == (self.dataset, self.share, self.preprocessing) and options.get("pipeline") == pipeline


@dataclass(frozen=True)
class Side:
    """ "windtunnel(pipe2; level=3)" as a system here and a pipeline; what no pipeline is said of stands beside Pipe2."""

    name: str
    pipeline: str
    options: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> "Side":
        """Raises ValueError."""
        match = re.fullmatch(r"(\w+)(?:\((.*)\))?", text)
        if match is None:
            raise ValueError(f"{text!r} is no system")
        words = [word.strip() for word in (match[2] or "pipe2").split(";")]
        return cls(match[1], words[0], tuple(words[1:]))

    @property
    def choice(self) -> str:
        if self.name == "ml":
            return "pipeline"
        return "windtunnel_cold" if "cold" in self.options else self.name

    def holds(self, record: Record) -> bool:
        changes = {key: int(value) for key, _, value in (word.partition("=") for word in self.options) if value}
        wanted, own = choose("system", self.choice, **changes), record.cell.system
        same = ("level", "scope", "start")
        return own.name == wanted.name and all(own.options.get(key) == wanted.options.get(key) for key in same)


def finding(preset: Preset, evidence: Evidence, value: Value, rule: str | None) -> Finding | None:
    """One published value beside ours; None for one that only serves as the other side of a difference."""
    if value.metric == ROWS:
        return _rows(evidence, value)
    side = Side.of(value.system)
    other = value.baseline or _other(preset, value, side)
    if not other:
        return None
    published = 0.0  # of a claim in words
    if not value.baseline:
        published = value.value - next(beside.value for beside in preset.same_figure(value) if beside.system == other)
    what = f"{value.model}: {value.system} over {other}"
    try:
        table = Table.of(value.model)
        auc, low, high, how = difference(
            part_of(evidence, table, side), part_of(evidence, table, Side.of(other)), Side.of(other)
        )
    except Missing as error:
        return Finding(what, rule or "gain", UNIT, published, reason=str(error))
    return Finding(what, rule or "gain", UNIT, published, auc, low, high, how)


def _other(preset: Preset, value: Value, side: Side) -> str:
    """The system that the preset's `ratio` compares a value with, of the same table and pipeline; "" for none."""
    over = preset.ratio.get("over", "ml")
    for beside in preset.same_figure(value):
        candidate = Side.of(beside.system)
        if candidate.pipeline == side.pipeline and over in (candidate.name, *candidate.options) and candidate != side:
            return beside.system
    return ""


def part_of(evidence: Evidence, table: Table, side: Side) -> Accuracy | None:
    """Of the newest record of a side; None for a pipeline without one, which those that tune it hold too. Raises Missing."""
    if evidence.measured is None:
        raise Missing(f"the files of {table.dataset} were not given" if table.dataset in NOT_GIVEN else "not measured")
    for record in evidence.measured.records:
        if table.holds(record, side.pipeline) and side.holds(record):
            if record.accuracy is None:
                raise Missing(f"{side.choice} is {record.status}: {record.reason}")
            return record.accuracy
    if side.name == "ml":
        return None
    raise Missing(f"{side.choice} was not measured on {table.dataset}/{table.preprocessing}, {side.pipeline}")


def difference(part: Accuracy | None, other: Accuracy | None, against: Side) -> tuple[float, float, float, str]:
    """AUC over another's with the ends of its 95 % interval, and how that was taken.

    Over the pipeline that was tuned it is DeLong's, of paired scores; else Student's over seeds with equal test rows.
    Raises Missing.
    """
    assert part is not None, "a pipeline is no first side"
    if against.name == "ml" and part.gain is not None and part.gain_low is not None and part.gain_high is not None:
        return part.gain, part.gain_low, part.gain_high, f"{len(part.seeds)} seeds"
    if other is None:
        raise Missing(f"{against.choice} was not measured")
    auc_by_seed = {seed.seed: seed.auc for seed in other.seeds}
    gains = [seed.auc - auc_by_seed[seed.seed] for seed in part.seeds if seed.seed in auc_by_seed]
    if len(gains) < 2:
        raise Missing(f"they share {len(gains)} seeds, and an interval needs two")
    return (*over_seeds(gains), f"{len(gains)} seeds")


def over_seeds(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean and the ends of Student's 95 % interval."""
    from scipy.stats import t  # half of what a script takes to start

    mean = float(np.mean(values))
    margin = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)
    return mean, mean - margin, mean + margin


def _rows(evidence: Evidence, value: Value) -> Finding:
    """The rows of a table, in millions: those that train, validate and test."""
    what = f"{value.model}: rows"
    if evidence.measured is not None:
        for record in evidence.measured.records:
            part = record.accuracy
            if part is not None and record.cell.model.options.get("dataset") == value.model and part.form == "whole":
                rows = (part.training_rows + part.validation_rows + part.test_rows) / MILLION
                return Finding(what, "count", value.unit, value.value, rows)
    return Finding(what, "count", value.unit, value.value, reason=f"the files of {value.model} were not given")
