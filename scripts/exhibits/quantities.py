"""What each metric of a published value is here: a number with its interval, or why there is none."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

from results.finding import IN_WORDS, Finding
from results.published.names import NO_MODEL
from results.published.value import Value
from scripts.charts.measured import Measured, Row
from scripts.charts.style import short

from .evidence import Evidence, labels
from .preset import Preset, Renamed, systems_here

WORSE = ("latency", "stream_assignment_time", "optimization_cost", "makespan")  # of these less is better
PERCENT = 100.0
EXTREMES = {"speedup_min": "smallest", "speedup_max": "largest"}
WORDS = {
    "gpu_idle": "GPU idle",
    "macs": "MACs",
    "parallelism": "GPU active time over critical path",
    "sm_efficiency": "SM efficiency",
    "block_speedup": "its fastest block over sequential",
}
LIMITS = {"busy_ms": "busy time", "critical_path_ms": "critical path", "width": "width", "macs": "MACs"}


class Missing(Exception):
    """A figure is not there; the message says why, in a line."""


@dataclass(frozen=True)
class Number:
    """A value with the ends of its 95 % interval, which are the value where it has none. of: which of several it is.
    in_turn: as of a Speedup.
    """

    value: float
    low: float
    high: float
    of: str = ""
    in_turn: bool = True

    @classmethod
    def exact(cls, value: float) -> "Number":
        return cls(value, value, value)


def findings(preset: Preset, evidence: Evidence) -> list[Finding]:
    """Every figure of the exhibit beside ours."""
    made = (_Figure(preset, evidence, value, rule).finding() for value, rule in preset.figures)
    found = [finding for finding in made if finding is not None]
    times = Counter(finding.what for finding in found)
    # What a paper gives a figure for and says in words is judged twice.
    twice = [finding.rule in IN_WORDS and times[finding.what] > 1 for finding in found]
    return [replace(f, what=f"{f.what}, in words") if again else f for f, again in zip(found, twice, strict=True)]


def published_speedups(preset: Preset) -> list[Value]:
    """The speedups that the exhibit has figures for, and those over the preset's baseline that its latencies make, by the
    preset's labels; without what is absent here and what the paper says in words alone.
    """
    found: list[Value] = []
    for value, rule in preset.figures:
        if rule in IN_WORDS or preset.absent.keys() & {value.system, value.baseline, value.device}:
            continue
        system, ratios = preset.system_of(value), list[tuple[str, float]]()
        if value.metric in RATIOS and RATIOS[value.metric] is None and value.metric not in EXTREMES:
            ratios = [(preset.baseline_of(value), _as_ratio(value.metric, value.value))]
        elif value.metric in COMPARED and COMPARED[value.metric] is None and system != preset.baseline:
            sides = [other for other in preset.beside(value) if preset.system_of(other) == preset.baseline]
            ratios = [(preset.baseline, _ratio(value, other)) for other in sides]
        for baseline, ratio in ratios:
            named: dict[str, Any] = {"model_here": preset.model_of(value), "system_here": system, "baseline_here": baseline}
            found.append(Renamed(**(vars(value) | {"metric": "speedup", "value": ratio, "unit": "x"} | named)))
    return found


class _Figure:
    """One published value, and what stands for it here."""

    def __init__(self, preset: Preset, evidence: Evidence, value: Value, rule: str | None):
        self.preset, self.evidence, self.value, self.rule = preset, evidence, value, rule
        self.system, self.baseline = preset.system_of(value), preset.baseline_of(value)
        self.model = preset.model_of(value)

    def finding(self) -> Finding | None:
        """None for a value that only serves as the other side of a ratio."""
        metric = self.value.metric
        if metric in RATIOS:
            published = _as_ratio(metric, self.value.value)
            what, rule, unit = f"{short(self.system)} over {short(self.baseline)}", self.rule or "ratio", "x"
            compute: Callable[[], Number] = self._direct
            what += {"sm_efficiency_gain": ", SM efficiency", "active_warps": ", active warps"}.get(metric, "")
            if self.model and metric in EXTREMES:
                what += f", {EXTREMES[metric]}"
        elif metric in PLAIN:
            published, unit, rule = self.value.value, self.value.unit, self.rule or PLAIN[metric][1]
            what, compute = ", ".join(filter(None, [self.system, WORDS.get(metric, metric.replace("_", " "))])), self._plain
        elif metric in COMPARED and self.preset.ratio:
            ((side, other),) = self.preset.ratio.items()
            if self.value.system == other:
                return None
            partner = next((value for value in self.preset.beside(self.value) if value.system == other), None)
            if partner is None:
                return self._alone(other)
            better, worse = (partner, self.value) if side == "of" else (self.value, partner)
            published = _ratio(better, worse)
            fast, slow = self.preset.system_of(better), self.preset.system_of(worse)
            what, rule, unit = f"{short(fast)} over {short(slow)}", self.rule or "ratio", "x"
            what += "" if metric == "latency" else f", {metric.replace('_', ' ')}"
            compute = lambda: self._over(COMPARED[metric], fast, slow)  # noqa: E731
        else:
            raise ValueError(f"{self.preset.name}: the metric {metric} is none that can be reproduced")
        what = ": ".join(filter(None, [self._where(), what]))
        try:
            self._refuse_what_is_absent()
            ours = compute()
        except Missing as error:
            return Finding(what, rule, unit, published, reason=str(error))
        alone = "one measurement, without an interval" if rule in IN_WORDS and ours.low == ours.high else ""
        apart = "" if ours.in_turn else "not in turn"
        told = "; ".join(filter(None, [ours.of, self._doubt(), apart, alone]))
        return Finding(what, rule, unit, published, ours.value, ours.low, ours.high, told)

    def _doubt(self) -> str:
        """What a reader has to know of a figure that was not counted as the paper's was."""
        metric = self.value.metric
        quantity = PLAIN[metric][0] if metric in PLAIN else RATIOS.get(metric)
        if quantity is makespan:
            return "the shortest call"
        if quantity is None or quantity not in SOURCED:
            return ""
        source = _part(self.evidence, self._rows()[0], self.system, SOURCED[quantity])["source"]
        return "" if source == "counters" else str(source)

    def _alone(self, other: str) -> Finding:
        """A value that the paper gives no other side of a ratio for."""
        reason = f"the paper prints no {self.value.metric} of {other} to compare it with"
        try:
            self._refuse_what_is_absent()
        except Missing as error:
            reason = str(error)
        what = f"{self._where()}, {self.value.device}: {short(self.system)}"
        return Finding(what, "ratio", self.value.unit, self.value.value, reason=reason)

    def _where(self) -> str:
        batch = "" if self.value.batch == "1" and not self._several_batches else f"batch {self.value.batch}"
        device = self.value.device if self.value.metric == "latency_reduction" else ""
        return ", ".join(filter(None, [self.model or self._several_models, batch, device]))

    @property
    def _several_models(self) -> str:
        """What a value of no single model is of several."""
        if self.value.model == "geomean":
            return "geometric mean"
        if self.rule in IN_WORDS:
            return "every network"
        return EXTREMES.get(self.value.metric, "largest")

    @property
    def _several_batches(self) -> bool:
        return len({value.batch for value, _ in self.preset.figures}) > 1

    def _refuse_what_is_absent(self) -> None:
        for name in (self.value.system, self.value.baseline, self.value.device):
            if name in self.preset.absent:
                raise Missing(self.preset.absent[name])
        for name in filter(None, (self.system, self.baseline)):
            if (plain := name.partition(" (")[0]) not in systems_here():
                raise Missing(f"{plain} is no system here")
        asked = {model for sweep in (self.preset.sweep, *self.preset.also) for model in labels("model", sweep)}
        if self.model is not None and asked and self.model not in asked:
            raise Missing(f"{self.model} was not asked for")

    # Which rows of ours a value is about, and what becomes of several.

    def _rows(self) -> list[Row]:
        measured = self._measured()
        if "-" in self.value.batch:
            first, last = map(int, self.value.batch.split("-"))
            batches: Iterable[int] = [b for b in map(int, self.preset.sweep["batch"].split(",")) if first <= b <= last]
            if lacking := set(batches) - {b for model, b in measured.rows if self.model in (None, model)}:
                raise Missing(f"it is over batches {', '.join(map(str, batches))}, and {min(lacking)} was not measured")
        else:
            batches = [int(self.value.batch)] if self.value.batch.isdigit() else measured.batches
        models = measured.models if self.model is None else [self.model]
        rows = [row for row in measured.rows if row[0] in models and row[1] in batches]
        if not rows:
            raise Missing(f"{self.model or 'no model'} was not measured at batch {self.value.batch}")
        return rows

    def _networks(self) -> set[str]:
        """Of the figures of this exhibit: what a mean of it is over."""
        same = (self.preset.model_of(v) for v, _ in self.preset.figures if v.exhibit == self.value.exhibit)
        return {model for model in same if model}

    def _measured(self) -> Measured:
        if self.evidence.measured is None:
            raise Missing("not measured")
        return self.evidence.measured

    def _over_rows(self, of: Callable[[Row], Number]) -> Number:
        """Of the rows of a value: the one, or as the value says their extreme or geometric mean. A mean is over all of the
        paper's networks or it is none; an extreme is over those that are there.
        """
        found, reasons, rows = [], [], self._rows()
        for row in rows:
            try:
                found.append(replace(of(row), of=self._told_apart(row, rows)))
            except Missing as error:
                reasons.append(f"{row[0]}: {error}" if self.model is None else str(error))
        if not found:
            raise Missing(reasons[0])
        if self.value.model == "geomean":
            if lacking := self._networks() - {row[0] for row in rows}:
                raise Missing(f"it is over {len(self._networks())} networks, and {min(lacking)} was not measured")
            if reasons:
                raise Missing(reasons[0])
            ends = zip(*((n.value, n.low, n.high) for n in found), strict=True)
            value, low, high = (exp(sum(map(log, end)) / len(found)) for end in ends)
            return Number(value, low, high, in_turn=all(number.in_turn for number in found))
        smallest = EXTREMES.get(self.value.metric) == "smallest"
        if self.rule in IN_WORDS:  # holds for all, so for the worst of them
            worst = min(found, key=lambda number: number.low if self.rule == "direction" else number.value)
            return replace(worst, of=f"the least of {len(found)}, {worst.of}") if worst.of else worst
        return (min if smallest else max)(found, key=lambda number: number.value)

    @staticmethod
    def _told_apart(row: Row, rows: Sequence[Row]) -> str:
        """What a row is called among these: by that alone in which they differ."""
        model, batch = (len(set(values)) > 1 for values in zip(*rows, strict=True))
        return ", ".join(filter(None, [f"on {row[0]}" if model else "", f"at batch {row[1]}" if batch else ""]))

    # Kinds of figures.

    def _direct(self) -> Number:
        return self._over(RATIOS[self.value.metric], self.system, self.baseline)

    def _over(self, quantity: "Quantity | None", better: str, worse: str) -> Number:
        """quantity: None for speed, whose ratio is of systems measured in turn."""
        if quantity is None:
            return self._over_rows(lambda row: _speedup(self._measured(), row, better, worse))
        if quantity in SOURCED and self.model is not None:
            row = self.model, int(self.value.batch)
            sources = [_part(self.evidence, row, s, SOURCED[quantity]).get("source") for s in (better, worse)]
            if sources[0] != sources[1]:
                raise Missing(f"{better} is {sources[0]} and {worse} {sources[1]}, which are not comparable")
        of = self._values(quantity, better), self._values(quantity, worse)
        ratio = of[1] / of[0] if quantity in COSTS else of[0] / of[1]
        return Number.exact(ratio)

    def _values(self, quantity: "Quantity", system: str) -> float:
        if self.model is None:
            raise Missing("of no single model")
        return quantity(self.evidence, (self.model, int(self.value.batch)), system)

    def _plain(self) -> Number:
        quantity, _ = PLAIN[self.value.metric]
        if self.model is not None:
            return Number.exact(quantity(self.evidence, (self.model, int(self.value.batch)), self.system))
        return self._over_rows(lambda row: Number.exact(quantity(self.evidence, row, self.system)))


Quantity = Callable[[Evidence, Row, str], float]


def _ratio(better: Value, worse: Value) -> float:
    """How many times better one published value is than another of the same metric."""
    return worse.value / better.value if better.metric in WORSE else better.value / worse.value


def _as_ratio(metric: str, value: float) -> float:
    if metric == "latency_reduction":
        return 1 / (1 - value / PERCENT)
    return 1 + value / PERCENT if metric == "sm_efficiency_gain" else value


def _speedup(measured: Measured, row: Row, system: str, baseline: str) -> Number:
    found = measured.over(row, system, baseline)
    if found is None:
        reasons = [_why(measured, row, s) for s in (system, baseline)]
        raise Missing(next(filter(None, reasons), f"{system} and {baseline} were not measured in turn"))
    return Number(found.ratio, found.low, found.high, in_turn=found.in_turn)


def _why(measured: Measured, row: Row, system: str) -> str:
    """Why a system has no speed; "" where it has."""
    records = measured.records_of(row, system)
    if not records:
        return f"{system} was not measured"
    record = records[0]
    return "" if record["status"] == "ok" else f"{system} is {record['status']}: {record['reason']}"


def _part(evidence: Evidence, row: Row, system: str, part: str) -> dict[str, Any]:
    """A measurement of a cell; of any system where `system` is "": the model's own."""
    if evidence.measured is None:
        raise Missing("not measured")
    if row not in evidence.measured.rows:
        raise Missing(f"{row[0]} was not measured at batch {row[1]}")
    systems: Sequence[str] = [system] if system else evidence.measured.systems
    for one in systems:
        for record in evidence.measured.records_of(row, one):
            if record["status"] == "ok" and record.get(part):
                return dict(record[part])
    raise Missing(_why(evidence.measured, row, systems[0]) or f"no record of {systems[0]} holds it")


def sm_efficiency(evidence: Evidence, row: Row, system: str) -> float:
    found = _part(evidence, row, system, "sm_efficiency")
    if found["value"] is None:
        raise Missing(found["reason"] or "no SM efficiency")
    return PERCENT * float(found["value"])


def active_warps(evidence: Evidence, row: Row, system: str) -> float:
    found = _part(evidence, row, system, "active_warps")
    if found["value"] is None:
        raise Missing(found["reason"])
    return float(found["value"])


def idle(evidence: Evidence, row: Row, system: str) -> float:
    """The share of a call in which the GPU has nothing to do, %: all but the time that its kernels take."""
    busy = limit(evidence, row, "busy_ms")
    latency = _part(evidence, row, system, "latency")["statistics"]["host"]["median"]
    return PERCENT * max(0.0, 1 - busy / latency)


def limit(evidence: Evidence, row: Row, key: str) -> float:
    """One of the limits of a model, which are the same for every system."""
    found = _part(evidence, row, "", "limits").get(key)
    if found is None:
        raise Missing(f"no record holds the model's {LIMITS[key]}")
    return float(found)


def parallelism(evidence: Evidence, row: Row, _: str) -> float:
    """How many times shorter than the kernels' time the critical path is: what full parallelism would gain."""
    return limit(evidence, row, "busy_ms") / limit(evidence, row, "critical_path_ms")


def schedule_of(evidence: Evidence, row: Row, system: str) -> dict[str, Any]:
    """The schedule file of a cell, or the summary in its record."""
    if (found := evidence.schedules.get((*row, system))) is not None:
        return found
    if evidence.schedules:
        raise Missing(f"no schedule of {system} for {row[0]} at batch {row[1]}")
    return _part(evidence, row, system, "schedule")


def search_seconds(evidence: Evidence, row: Row, system: str) -> float:
    return float(schedule_of(evidence, row, system)["search"]["seconds"])


def assignment_ms(evidence: Evidence, row: Row, system: str) -> float:
    """What assigning streams took, without what a scheduler does beside it."""
    search = schedule_of(evidence, row, system)["search"]
    return 1e3 * float(search.get("allocation_seconds", search["seconds"]))


def streams(evidence: Evidence, row: Row, system: str) -> float:
    """Of the schedule; those that were seen where a timeline does not tell."""
    for timeline in evidence.timelines:
        model, of, *_ = timeline.title.split(", ")
        if (model, of) == (row[0], system):
            return float(timeline.scheduled or len(timeline.streams))
    return float(schedule_of(evidence, row, system)["streams"])


def makespan(evidence: Evidence, row: Row, system: str) -> float:
    """Milliseconds from the beginning of a call's first operator to the end of its last."""
    for timeline in evidence.timelines:
        model, of, *_ = timeline.title.split(", ")
        if (model, of) == (row[0], system):
            return max(bar.end for bar in timeline.bars)
    raise Missing(f"no timeline of {system} on {row[0]}")


def _blocks(evidence: Evidence, row: Row, system: str) -> list[dict[str, Any]]:
    """The blocks of several units that IOS cut a model into."""
    search = schedule_of(evidence, row, system or "ios")["search"]
    if "parts" not in search:
        raise Missing("its search does not tell of blocks")
    return [part for part in search["parts"] if part["units"] > 1]


def _largest(evidence: Evidence, row: Row, system: str) -> dict[str, Any]:
    return max(_blocks(evidence, row, system), key=lambda part: (part.get("transitions", 0), part["units"]))


def block_gain(evidence: Evidence, row: Row, system: str) -> float:
    """The largest gain of a block's stages over its units one after the other."""
    return max(part["sequential_milliseconds"] / part["milliseconds"] for part in _blocks(evidence, row, system))


# A metric -> the quantity whose ratio it is, None for speed; in COSTS less is better.
SOURCED: dict[Quantity, str] = {sm_efficiency: "sm_efficiency", active_warps: "active_warps"}
COSTS: tuple[Quantity, ...] = (assignment_ms, search_seconds, makespan)
RATIOS: dict[str, Quantity | None] = {
    **dict.fromkeys(("speedup", "speedup_min", "speedup_max", "latency_reduction")),
    "sm_efficiency_gain": sm_efficiency,
    "active_warps": active_warps,
    "makespan": makespan,
}
# A metric of one system that becomes a ratio where the preset says to which.
COMPARED: dict[str, Quantity | None] = {
    "latency": None,
    "stream_assignment_time": assignment_ms,
    "optimization_cost": search_seconds,
    "streams": streams,
}
# A metric -> what it is, and the rule that it stands by.
PLAIN: dict[str, tuple[Quantity, str]] = {
    "sm_efficiency": (sm_efficiency, "at_most"),
    "gpu_idle": (idle, "at_least"),
    "parallelism": (parallelism, "at_least"),
    "degree_of_logical_concurrency": (lambda evidence, row, _: limit(evidence, row, "width"), "count"),
    "macs": (lambda evidence, row, _: limit(evidence, row, "macs") / 1e9, "count"),
    "blocks": (lambda evidence, row, system: len(_blocks(evidence, row, system)), "count"),
    "operators": (lambda evidence, row, system: schedule_of(evidence, row, system or "ios")["search"]["units"], "count"),
    "largest_block_operators": (lambda evidence, row, system: _largest(evidence, row, system)["units"], "count"),
    "largest_block_width": (lambda evidence, row, system: _largest(evidence, row, system)["width"], "count"),
    "transitions": (lambda evidence, row, system: _largest(evidence, row, system)["transitions"], "count"),
    "block_speedup": (block_gain, "at_least"),
}
assert set(NO_MODEL) >= {"geomean", "up to", "geometric range"}
