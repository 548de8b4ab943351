"""Two sets of results side by side: how a cell of one compares with the same cell of the other."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .comparison import comparable, is_disturbed, round_ratios
from .record import Record
from .setting import Setting
from .statistics import interval, resampled_medians

# What may be compared, and whether more of it is better.
METRICS = {"latency": False, "throughput": True, "memory": False, "preparation": False, "speedup": True}
REGRESSION, IMPROVEMENT, UNCERTAIN, SAME = "regression", "improvement", "uncertain", "same"


@dataclass(frozen=True)
class Change:
    """A cell that both sets have. Where a system stopped being ok, or began to be, the numbers are None.

    Args:
        key: Model, batch, system and setting, as words.
        before: In the metric's unit.
        after: In the metric's unit.
        worse: How many times worse it became: a latency's after / before, a throughput's before / after.
        low: The lower end of the bootstrap 95 % interval of `worse`, which is its value where each has one sample.
        high: The upper end.
        statuses: Before and after.
    """

    key: tuple[str, ...]
    before: float | None
    after: float | None
    worse: float | None
    low: float | None
    high: float | None
    statuses: tuple[str, str]

    def verdict(self, threshold: float) -> str:
        """Whether it is a regression, for which the whole interval lies beyond the threshold.

        Args:
            threshold: 0.05 lets a cell become 5 % worse.
        """
        if self.statuses[0] != self.statuses[1] or self.worse is None or self.low is None or self.high is None:
            if "ok" in self.statuses and self.statuses[0] != self.statuses[1]:
                return REGRESSION if self.statuses[0] == "ok" else IMPROVEMENT
            return SAME
        if self.low > 1 + threshold:
            return REGRESSION
        if self.high < 1 / (1 + threshold):
            return IMPROVEMENT
        return UNCERTAIN if self.worse > 1 + threshold or self.worse < 1 / (1 + threshold) else SAME


def cell_key(record: Record) -> tuple[str, ...]:
    """What makes a cell the same in two sets: all that was asked but what it was measured with, and not where.

    Records of `bench` and of `latency` are the same cell's: the one of the two that has the metric is taken. A step of
    training, a virtual clock and each load of requests are cells of their own.
    """
    cell, c, setting = record.cell, record.cell.conditions, Setting.of(record)
    return (
        *(cell.model.label, str(c.batch), cell.system.label),
        *(c.device, c.precision, c.layout, str(c.seed), c.algorithms, setting.kind, setting.load),
    )


def changes(before: Iterable[Record], after: Iterable[Record], metric: str, baseline: str) -> list[Change]:
    """A change for each cell that both sets have, the most certain regression first.

    Args:
        before: records of the one set.
        after: records of the other.
        metric: of METRICS.
        baseline: the label of the system that a "speedup" is over: each set's own, from the rounds that the two shared and
            no profiler disturbed, so that two machines may be compared by it.
    """
    old, new = _newest(before, metric, baseline), _newest(after, metric, baseline)
    return sorted((_change(key, old[key], new[key], METRICS[metric]) for key in old if key in new), key=_order)


def only_in(one: Iterable[Record], other: Iterable[Record]) -> list[tuple[str, ...]]:
    """The cells of `one` that `other` lacks."""
    return sorted({cell_key(record) for record in one} - {cell_key(record) for record in other})


def untold(before: Iterable[Record], after: Iterable[Record], metric: str, baseline: str) -> list[tuple[str, ...]]:
    """The cells that both sets have, of which the later one does not tell the metric any more.

    Args:
        before: records of the one set.
        after: records of the other.
        metric: of METRICS.
        baseline: as of `changes`.
    """
    before, after = list(before), list(after)
    old, new = _newest(before, metric, baseline), _newest(after, metric, baseline)
    told = {key for key, (_, samples) in old.items() if samples is not None}
    return sorted(told - set(new) - set(only_in(before, after)))


Measurement = tuple[str, Sequence[float] | None]  # a status, and the samples of a metric


def _newest(records: Iterable[Record], metric: str, baseline: str) -> dict[tuple[str, ...], Measurement]:
    """For each cell its newest record that has the metric or is not ok, and of that one's rounds the newest."""
    records = sorted(records, key=lambda record: (record.when, record.comparison.when if record.comparison else ""))
    newest: dict[tuple[str, ...], Measurement] = {}
    for record in records:
        samples = _samples(record, records, metric, baseline)
        if not record.is_ok or samples is not None:
            newest[cell_key(record)] = record.status, samples
    return newest


def _samples(record: Record, records: Sequence[Record], metric: str, baseline: str) -> Sequence[float] | None:
    if not record.is_ok:
        return None
    if metric == "latency":
        return record.latency.host_ms if record.latency else None
    if metric == "throughput":
        return record.throughput.runs if record.throughput else None
    if metric == "memory":
        return [record.memory.peak_bytes / 2**20] if record.memory and record.memory.peak_bytes else None
    if metric == "preparation":
        return [record.preparation_s] if record.preparation_s else None
    for other in records:
        is_baseline = other.cell.group == record.cell.group and other.cell.system.label == baseline
        is_sound = comparable(record, other) and not (is_disturbed(record) or is_disturbed(other))
        if is_baseline and other is not record and is_sound:
            return round_ratios(record, other)
    return None


def _change(key: tuple[str, ...], before: Measurement, after: Measurement, more_is_better: bool) -> Change:
    statuses = before[0], after[0]
    if before[1] is None or after[1] is None:
        return Change(key, None, None, None, None, None, statuses)
    middles = tuple(float(np.median(samples)) for samples in (before[1], after[1]))
    resampled = [resampled_medians(samples, seed) for seed, samples in enumerate((before[1], after[1]))]
    better, worse = (1, 0) if more_is_better else (0, 1)
    low, high = interval(resampled[worse] / resampled[better])
    return Change(key, middles[0], middles[1], middles[worse] / middles[better], low, high, statuses)


def _order(change: Change) -> tuple[int, float, str, int, tuple[str, ...]]:
    name = change.key[0], int(change.key[1]), change.key[2:]
    if change.statuses[0] != change.statuses[1]:
        return (0 if change.statuses[0] == "ok" else 2), 0.0, *name
    return 1, -(change.low or 0.0), *name
