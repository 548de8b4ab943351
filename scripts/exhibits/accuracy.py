"""AUC of pipelines and of what learns from the same table, as published and as measured here.

A published value is of a table ("criteo(10%)/pre2") and of a system ("windtunnel(pipe2; level=3)"). It is judged by its
difference to another of the same table: what one gains over the other.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from conf.text import counted
from results.accuracy import Accuracy
from results.cell import choose
from results.finding import Finding
from results.published.value import Value
from results.record import Record

from .evidence import Evidence
from .missing import Missing
from .preset import Preset

AUC, SHARE = "auc", "auc_share"  # a difference of AUC, and the same in percent of the other's
UNIT = "AUC"
PERCENT, MILLION = 100.0, 1e6
# What a whole table has, in words.
COUNTS = {
    "rows": "rows",
    "numeric_features": "numeric features",
    "categorical_features": "categorical features",
    "categories": "categories in the training rows",
    "positive_share": "positive rows",
}
METRICS = (AUC, SHARE, *COUNTS)
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
    if value.metric in COUNTS:
        return _count(evidence, value)
    side = Side.of(value.system)
    other = value.baseline or _other(preset, value, side)
    if not other:
        return None
    is_share = value.metric == SHARE
    unit = value.unit if is_share else UNIT
    published = value.value if is_share else 0.0  # of a claim in words
    if not value.baseline:
        published = value.value - next(beside.value for beside in preset.same_figure(value) if beside.system == other)
    what = f"{value.model}: {value.system} over {other}" + (", of its AUC" if is_share else "")
    try:
        table = Table.of(value.model)
        part = part_of(evidence, table, side)
        gain, low, high, how = difference(part, part_of(evidence, table, Side.of(other)), Side.of(other))
    except Missing as error:
        return Finding(what, rule or "gain", unit, published, reason=str(error))
    assert part is not None
    scale = PERCENT / (part.auc - gain) if is_share else 1.0
    return Finding(what, rule or "gain", unit, published, scale * gain, scale * low, scale * high, how)


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
        return part.gain, part.gain_low, part.gain_high, counted(len(part.seeds), "seed")
    if other is None:
        raise Missing(f"{against.choice} was not measured")
    auc_by_seed = {seed.seed: seed.auc for seed in other.seeds}
    gains = [seed.auc - auc_by_seed[seed.seed] for seed in part.seeds if seed.seed in auc_by_seed]
    if len(gains) < 2:
        raise Missing(f"they share {counted(len(gains), 'seed')}, and an interval needs two")
    return (*over_seeds(gains), f"{len(gains)} seeds")


def over_seeds(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean and the ends of Student's 95 % interval."""
    from scipy.stats import t  # half of what a script takes to start

    mean = float(np.mean(values))
    margin = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)
    return mean, mean - margin, mean + margin


def _count(evidence: Evidence, value: Value) -> Finding:
    """What a whole table has."""
    finding = Finding(f"{value.model}: {COUNTS[value.metric]}", "count", value.unit, value.value)
    reason = f"the files of {value.model} were not given"
    for record in evidence.measured.records if evidence.measured is not None else ():
        part = record.accuracy
        if part is None or record.cell.model.options.get("dataset") != value.model or part.form != "whole":
            continue
        if (ours := _counted(part).get(value.metric)) is not None:
            return replace(finding, ours=ours)
        reason = "its record counts rows alone"
    return replace(finding, reason=reason)


def _counted(part: Accuracy) -> dict[str, float]:
    """By the keys of COUNTS: rows in millions, those that train, validate and test; no more in older records."""
    counts: dict[str, float] = {"rows": (part.training_rows + part.validation_rows + part.test_rows) / MILLION}
    if (table := part.table) is not None:
        counts["numeric_features"] = table.numeric
        counts["categorical_features"] = table.categorical
        counts["categories"] = table.categories
        counts["positive_share"] = PERCENT * table.positive_share
    return counts
