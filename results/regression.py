"""Two sets of results side by side: how a cell of one compares with the same cell of the other."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from .comparison import RESAMPLES, comparable, disturbed
from .record import asked, group_key, label

# What may be compared, and whether more of it is better.
METRICS = {"latency": False, "throughput": True, "memory": False, "preparation": False, "speedup": True}
REGRESSION, IMPROVEMENT, UNCERTAIN, SAME = "regression", "improvement", "uncertain", "same"


@dataclass(frozen=True)
class Change:
    """A cell that both sets have. key: model, batch, system and setting, as words. before, after: in the metric's unit.

    worse: how many times worse it became (a latency's after / before, a throughput's before / after), with the ends of its
    bootstrap 95 % interval, which are the value itself where there is one sample of each. Where a system stopped being ok,
    or began to be, the numbers are None and `statuses` says from what to what.
    """

    key: tuple[str, ...]
    before: float | None
    after: float | None
    worse: float | None
    low: float | None
    high: float | None
    statuses: tuple[str, str]

    def verdict(self, threshold: float) -> str:
        """threshold: 0.05 lets a cell become 5 % worse. A regression is one for sure: its whole interval is beyond."""
        if self.statuses[0] != self.statuses[1] or self.worse is None or self.low is None or self.high is None:
            if "ok" in self.statuses and self.statuses[0] != self.statuses[1]:
                return REGRESSION if self.statuses[0] == "ok" else IMPROVEMENT
            return SAME
        if self.low > 1 + threshold:
            return REGRESSION
        if self.high < 1 / (1 + threshold):
            return IMPROVEMENT
        return UNCERTAIN if self.worse > 1 + threshold or self.worse < 1 / (1 + threshold) else SAME


def cell_key(record: dict[str, Any]) -> tuple[str, ...]:
    """What makes a cell the same in two sets: all that was asked but what it was measured with, and not where.

    Records of `bench` and of `latency` are the same cell's: the one of the two that has the metric is taken.
    """
    config = record["config"]
    key = label(config["model"]), str(config["batch"]), label(config["system"])
    return (*key, *(str(asked(config, k)) for k in ("device", "precision", "layout", "seed", "algorithms")))


def changes(before: Iterable[dict[str, Any]], after: Iterable[dict[str, Any]], metric: str, baseline: str) -> list[Change]:
    """A change for each cell that both sets have, the most certain regression first. metric: of METRICS.

    baseline: the system that a metric of "speedup" is over: each set's own, from the rounds that the two shared and no
    profiler disturbed, so that two machines may be compared by it.
    """
    a, b = _newest(before, metric, baseline), _newest(after, metric, baseline)
    found = [_change(key, a[key], b[key], METRICS[metric]) for key in a if key in b]
    return sorted(found, key=_order)


def only_in(one: Iterable[dict[str, Any]], other: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The cells of `one` that `other` lacks."""
    there = {cell_key(record) for record in other}
    return sorted({cell_key(record) for record in one} - there)


Measurement = tuple[str, Any]  # a status, and the samples, or pairs of them for a ratio


def _newest(records: Iterable[dict[str, Any]], metric: str, baseline: str) -> dict[tuple[str, ...], Measurement]:
    """For each cell its newest record that has the metric or is not ok."""
    records = sorted(records, key=lambda record: record["when"])
    found: dict[tuple[str, ...], Measurement] = {}
    for record in records:
        samples = _samples(record, records, metric, baseline)
        if record["status"] != "ok" or samples is not None:
            found[cell_key(record)] = record["status"], samples
    return found


def _samples(record: dict[str, Any], records: Sequence[dict[str, Any]], metric: str, baseline: str) -> Any:
    if record["status"] != "ok":
        return None
    if metric == "latency":
        return (record.get("latency") or {}).get("host_ms")
    if metric == "throughput":
        return (record.get("throughput") or {}).get("runs")
    if metric == "memory":
        size = (record.get("memory") or {}).get("peak_bytes")
        return [size / 2**20] if size else None
    if metric == "preparation":
        return [record["preparation_s"]] if record.get("preparation_s") else None
    for other in records:
        same = group_key(other["config"]) == group_key(record["config"]) and label(other["config"]["system"]) == baseline
        if same and other is not record and comparable(record, other) and not (disturbed(record) or disturbed(other)):
            rounds = zip(other["comparison"]["rounds"], record["comparison"]["rounds"], strict=True)
            return [median(slow) / median(fast) for slow, fast in rounds]
    return None


def _change(key: tuple[str, ...], before: Measurement, after: Measurement, more_is_better: bool) -> Change:
    statuses = before[0], after[0]
    if before[1] is None or after[1] is None:
        return Change(key, None, None, None, None, None, statuses)
    random = np.random.default_rng(0)
    old, new = (np.asarray(samples, dtype=float) for samples in (before[1], after[1]))
    resampled = [np.median(random.choice(x, (RESAMPLES, len(x))), axis=1) for x in (old, new)]
    middles = float(np.median(old)), float(np.median(new))
    better, worse = (1, 0) if more_is_better else (0, 1)
    low, high = np.quantile(resampled[worse] / resampled[better], [0.025, 0.975])
    return Change(key, *middles, middles[worse] / middles[better], float(low), float(high), statuses)


def _order(change: Change) -> tuple[int, float, str, int, tuple[str, ...]]:
    name = change.key[0], int(change.key[1]), change.key[2:]
    if change.statuses[0] != change.statuses[1]:
        return (0 if change.statuses[0] == "ok" else 2), 0.0, *name
    return 1, -(change.low or 0.0), *name
