"""The figures of an exhibit, as published and as measured here, and how they stand."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median

import conf
from results.cell import Choice
from results.finding import IN_WORDS, OF_RATIOS, Finding
from results.published.names import NO_MODEL
from results.published.value import FOR_WORDS, Value
from results.selection import Row, Selection
from results.statistics import median_interval
from scripts.charts.style import short

from . import accuracy
from .evidence import Evidence, choices
from .missing import Missing, Unable
from .number import Number, geometric_mean, least, rank_correlation, ratio_of_ends, speedup
from .preset import Preset, Renamed
from .quantities import (
    COMPARED,
    COSTS,
    PERCENT,
    PLAIN,
    RATIOS,
    SERVED,
    SOURCED,
    TRENDS,
    Quantity,
    block_gain,
    blocks,
    makespan,
    ratios_of_traces,
    served_ends,
    served_from,
)
from .words import EXTREMES, RATIO_WORDS, WORDS

WORSE = (
    "latency",
    "stream_assignment_time",
    "optimization_cost",
    "optimization_hours",
    "makespan",
)  # of these less is better
SPEEDS = ("latency", "images_per_second", "normalized_throughput")  # whose ratio is one of speed
RULE_OF = {"streams": "count"}  # of a ratio of two counts


def findings(preset: Preset, evidence: Evidence) -> list[Finding]:
    """Every figure of the exhibit beside ours."""
    each = (
        accuracy.finding(preset, evidence, value, rule)
        if value.metric in accuracy.METRICS
        else _finding(preset, evidence, value, rule)
        for value, rule in preset.figures
    )
    judged = [finding for finding in each if finding is not None]
    times = Counter(finding.what for finding in judged)
    # A claim that a paper makes in a figure and in words is judged twice.
    twice = [finding.rule in IN_WORDS and times[finding.what] > 1 for finding in judged]
    return [replace(f, what=f"{f.what}, in words") if again else f for f, again in zip(judged, twice, strict=True)]


def _finding(preset: Preset, evidence: Evidence, value: Value, rule: str | None) -> Finding | None:
    """As `_Figure` has it. Where the paper's settings were not measured, those beside them are shown, unjudged."""
    finding = _Figure(preset, evidence, value, rule).finding()
    if finding is None or finding.ours is not None or not preset.beside.keys() & {value.system, value.baseline}:
        return finding
    other = _Figure(replace(preset, systems=preset.systems | preset.beside), evidence, value, rule).finding()
    if other is None or other.ours is None:
        return finding
    reasons = dict.fromkeys(part for each in (finding, other) for part in each.reason.split("; ") if part)
    return replace(other, is_comparable=False, reason="; ".join(reasons))


def published_speedups(preset: Preset) -> list[Value]:
    """The speedups of an exhibit, and those over the preset's baseline that its latencies make, by the preset's names.

    What is absent here or has another baseline, and claims in words alone, are left out.
    """
    speedups: list[Value] = []
    for value, rule in preset.figures:
        others = preset.absent.keys() | preset.incomparable.keys()
        if rule in IN_WORDS or others & {*preset.names_of(value)}:
            continue
        system, ratios = preset.system_of(value), list[tuple[Choice | None, float]]()
        if value.metric in RATIOS and RATIOS[value.metric] is None and value.metric not in EXTREMES:
            ratios = [(preset.baseline_of(value), _as_ratio(value.metric, value.value))]
        elif value.metric in COMPARED and COMPARED[value.metric] is None and system != preset.baseline:
            sides = [other for other in preset.same_figure(value) if preset.system_of(other) == preset.baseline]
            ratios = [(preset.baseline, _ratio(value, other)) for other in sides]
        for baseline, ratio in ratios:
            columns = vars(value) | {"metric": "speedup", "value": ratio, "unit": "x"}
            speedups.append(
                Renamed(**columns, model_here=preset.model_of(value), system_here=system, baseline_here=baseline)
            )
    return speedups


class _Figure:
    """One published value, and what stands for it here."""

    def __init__(self, preset: Preset, evidence: Evidence, value: Value, rule: str | None):
        self.preset, self.evidence, self.value, self.rule = preset, evidence, value, rule
        self.system, self.baseline = preset.system_of(value), preset.baseline_of(value)
        self.model = preset.model_of(value)

    def finding(self) -> Finding | None:
        """None for a value that only serves as the other side of a ratio."""
        metric, counts = self.value.metric, ""
        if metric in RATIOS:
            published = _as_ratio(metric, self.value.value)
            what, rule, unit = f"{_name(self.system)} over {_name(self.baseline)}", self.rule or "ratio", "x"
            compute: Callable[[], Number] = self._direct
            what += RATIO_WORDS.get(metric, "")
            if self.model and metric in EXTREMES:
                what += f", {EXTREMES[metric]}"
        elif metric in TRENDS:
            published, unit, rule = self.value.value, self.value.unit, self.rule or "trend"
            what, compute = f"{_name(self.system)} over {_name(self.baseline)}, {WORDS[metric]}", self._trend
        elif metric in PLAIN:
            published, unit, rule = self.value.value, self.value.unit, self.rule or PLAIN[metric][1]
            system = self.system.label if self.system is not None else ""
            what = ", ".join(filter(None, [system, WORDS.get(metric, metric.replace("_", " "))]))
            compute = self._plain
        elif metric in COMPARED and self.preset.ratio:
            ((side, other),) = self.preset.ratio.items()
            if self.value.system == other:
                return None
            partner = next((value for value in self.preset.same_figure(self.value) if value.system == other), None)
            if partner is None:
                return self._alone(other)
            better, worse = (partner, self.value) if side == "of" else (self.value, partner)
            published = _ratio(better, worse)
            fast, slow = self.preset.system_of(better), self.preset.system_of(worse)
            what, rule, unit = f"{_name(fast)} over {_name(slow)}", self.rule or RULE_OF.get(metric, "ratio"), "x"
            what += "" if metric in SPEEDS else f", {metric.replace('_', ' ')}"
            compute = lambda: self._over(COMPARED[metric], fast, slow)  # noqa: E731
            if metric in RULE_OF:
                counts = self._counts(COMPARED[metric], better, worse)
        else:
            raise ValueError(f"{self.preset.name}: the metric {metric} is none that can be reproduced")
        what = ": ".join(filter(None, [self._where(), what]))
        incomparable = self._incomparable()
        words = self.value.note if self.value.source == FOR_WORDS else ""
        finding = Finding(what, rule, unit, published, reason=incomparable, is_comparable=not incomparable)
        finding = replace(finding, source=self.value.source, words=words)
        try:
            self._refuse_what_is_absent()
            number = compute()
        except Missing as error:
            if incomparable:
                return finding
            return replace(finding, is_comparable=not (reason := self._without_a_library()), reason=reason or str(error))
        processes = ""
        if rule in OF_RATIOS:
            processes = "one measurement" if number.low == number.high else number.counted
        not_in_turn = "" if number.is_in_turn else "not in turn"
        doubts = "; ".join(
            filter(None, [incomparable, counts, number.which, self._doubt(), not_in_turn, processes, number.rounds_differ])
        )
        return replace(
            finding,
            ours=number.value,
            low=number.low,
            high=number.high,
            reason=doubts,
            processes=number.processes,
            chosen_from=number.chosen_from,
        )

    def _counts(self, quantity: Quantity | None, better: Value, worse: Value) -> str:
        """Both sides of a ratio of counts, ours before the paper's where it prints them; "" where ours are not there."""
        if quantity is None or self.model is None:
            return ""
        row, systems = (self.model, int(self.value.batch)), [self.preset.system_of(value) for value in (better, worse)]
        try:
            ours = " over ".join(f"{quantity(self.evidence, row, system):g}" for system in systems)
        except Missing:
            return ""
        return f"{ours} here" + (
            "" if self.value.source == FOR_WORDS else f", {better.value:g} over {worse.value:g} in the paper"
        )

    def _incomparable(self) -> str:
        """Why what is measured here is not what the paper compares; "" where it is."""
        reasons = self.preset.incomparable
        return next((reasons[name] for name in self.preset.names_of(self.value) if name in reasons), "")

    def _without_a_library(self) -> str:
        """Why a system that was not measured cannot be compared with; "" where it could have been measured."""
        reasons = self.preset.optional
        return next((reasons[name] for name in self.preset.names_of(self.value) if name in reasons), "")

    def _doubt(self) -> str:
        """What a reader has to know of a figure that was not counted as the paper's was."""
        metric = self.value.metric
        quantity = PLAIN[metric][0] if metric in PLAIN else RATIOS.get(metric)
        if quantity is makespan:
            return "the shortest call"
        if quantity is block_gain and self.model is not None:
            return f"the largest of {len(blocks(self.evidence, (self.model, int(self.value.batch)), self.system))} blocks"
        if quantity is None or quantity not in SOURCED:
            return ""
        sources = [source for row in self._rows() if (source := self._source(quantity, row))]
        source = sources[0] if sources else ""
        return "" if source == "counters" else str(source)

    def _source(self, quantity: Quantity, row: Row) -> str | None:
        try:
            return SOURCED[quantity](self.evidence, row, self.system).source
        except Missing:
            return None

    def _alone(self, other: str) -> Finding:
        """A value that the paper gives no other side of a ratio for."""
        reason = f"the paper prints no {self.value.metric} of {other} to compare it with"
        try:
            self._refuse_what_is_absent()
        except Missing as error:
            reason = str(error)
        what = f"{self._where()}, {self.value.device}: {_name(self.system)}"
        incomparable = self._incomparable()
        return Finding(
            *(what, "ratio", self.value.unit, self.value.value),
            reason=incomparable or reason,
            is_comparable=not incomparable,
            source=self.value.source,
        )

    def _where(self) -> str:
        if self.value.batch == "several" and self.model is None:
            return self.value.note  # which alone tells the least of a range from the most
        batch = "" if self.value.batch == "1" and not self._several_batches else f"batch {self.value.batch}"
        batch = "largest over batches" if self.value.batch == "several" else batch
        device = self.value.device if self.value.metric == "latency_reduction" else ""
        return ", ".join(filter(None, [self.model or self._several_models, batch, device]))

    @property
    def _several_models(self) -> str:
        """What a value of no single model is of several."""
        if self.value.model in ("geomean", "all four"):
            return "geometric mean" if self.value.model == "geomean" else "all four networks"
        if self.value.metric in TRENDS:
            return "over the networks"
        if self.rule in IN_WORDS:
            return "every network"
        return EXTREMES.get(self.value.metric, "largest")

    @property
    def _several_batches(self) -> bool:
        return len({value.batch for value, _ in self.preset.figures}) > 1

    def _refuse_what_is_absent(self) -> None:
        for name in self.preset.names_of(self.value):
            if name in self.preset.absent:
                raise Missing(self.preset.absent[name])
        for system in filter(None, (self.system, self.baseline)):
            if system.choice not in conf.choices("system"):
                raise Missing(f"{system.choice} is no system here")
        if self.model is not None and self._requested and self.model not in self._requested:
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
        """What a figure of several networks is over: those of this exhibit's other figures, or all that the preset runs."""
        same = (self.preset.model_of(v) for v, _ in self.preset.figures if v.exhibit == self.value.exhibit)
        return {model for model in same if model} or self._requested

    @property
    def _requested(self) -> set[str]:
        sweeps = (self.preset.sweep, *self.preset.also)
        return {model.label for sweep in sweeps for model in choices("model", sweep)}

    def _measured(self) -> Selection:
        if self.evidence.measured is None:
            raise Missing("not measured")
        return self.evidence.measured

    def _over_rows(self, of: Callable[[Row], Number]) -> Number:
        """Of the rows of a value: the one, or as the value says their extreme or geometric mean.

        Either is over all of the paper's networks or batches, or it is none. An extreme leaves out what a system cannot run.
        """
        numbers, reasons, rows = [], [], self._rows()
        for row in rows:
            try:
                numbers.append(replace(of(row), which=self._told_apart(row, rows)))
            except Missing as error:
                reason = f"{row[0]}: {error}" if self.model is None else f"{error} {self._told_apart(row, rows)}".rstrip()
                if not isinstance(error, Unable):
                    raise Missing(reason) from None
                reasons.append(reason)
        if not numbers:
            raise Missing(reasons[0])
        if self.model is None and (lacking := self._networks() - {row[0] for row in rows}):
            raise Missing(f"it is over {len(self._networks())} networks, and {min(lacking)} was not measured")
        if reasons and (self.value.model == "geomean" or self.rule in IN_WORDS):
            raise Missing(reasons[0])
        if self.value.model == "geomean":
            return geometric_mean(numbers)
        if self.rule in IN_WORDS:
            return least(numbers)
        smallest = EXTREMES.get(self.value.metric) == "smallest"
        extreme = (min if smallest else max)(numbers, key=lambda number: number.value)
        return replace(extreme, chosen_from=len(numbers))

    @staticmethod
    def _told_apart(row: Row, rows: Sequence[Row]) -> str:
        """What a row is called among these: by that alone in which they differ."""
        model, batch = (len(set(values)) > 1 for values in zip(*rows, strict=True))
        return ", ".join(filter(None, [f"on {row[0]}" if model else "", f"at batch {row[1]}" if batch else ""]))

    # Kinds of figures.

    def _direct(self) -> Number:
        return self._over(RATIOS[self.value.metric], self.system, self.baseline)

    def _over(self, quantity: Quantity | None, better: Choice | None, worse: Choice | None) -> Number:
        """quantity: None for speed, whose ratio is of systems measured in turn."""
        if better is None or worse is None:
            raise Missing("of no single system")
        if quantity is None:
            return self._over_rows(lambda row: speedup(self._measured(), row, better, worse))
        if self.model is not None:
            return self._ratio_of(quantity, (self.model, int(self.value.batch)), better, worse)
        if self.value.metric not in EXTREMES:
            raise Missing("of no single model")
        return self._over_rows(lambda row: self._ratio_of(quantity, row, better, worse))

    def _ratio_of(self, quantity: Quantity, row: Row, better: Choice, worse: Choice) -> Number:
        """How many times better one measured number is than another of the same cell."""
        if quantity in SOURCED:
            sources = [SOURCED[quantity](self.evidence, row, system).source for system in (better, worse)]
            if sources[0] != sources[1]:
                raise Missing(f"{better} is {sources[0]} and {worse} {sources[1]}, which are not comparable")
        if quantity in SERVED.values():
            ends = [served_ends(self.evidence, row, system, quantity) for system in (better, worse)]
            best_of = max(served_from(self.evidence, row, system, quantity) for system in (better, worse))
            pair = (worse, better) if quantity in COSTS else (better, worse)
            if len(ratios := ratios_of_traces(self.evidence, row, *pair, quantity)) > 1:  # traces differ more than systems
                ratio = Number(median(ratios), *median_interval(ratios))
            else:
                ratio = ratio_of_ends(*(reversed(ends) if quantity in COSTS else ends))
            return replace(ratio, is_in_turn=False, chosen_from=best_of)
        first, second = (quantity(self.evidence, row, system) for system in (better, worse))
        return Number.exact(second / first if quantity in COSTS else first / second)

    def _trend(self) -> Number:
        """Of a quantity and the speedup over the exhibit's networks."""
        if self.system is None or self.baseline is None:
            raise Missing("of no single system")
        quantity, direction = TRENDS[self.value.metric]
        rows = [(model, int(self.value.batch)) for model in sorted(self._networks())]
        ranks = [direction * quantity(self.evidence, row, None) for row in rows]
        return rank_correlation(ranks, [speedup(self._measured(), row, self.system, self.baseline) for row in rows])

    def _plain(self) -> Number:
        quantity, _ = PLAIN[self.value.metric]
        if self.model is not None:
            return Number.exact(quantity(self.evidence, (self.model, int(self.value.batch)), self.system))
        return self._over_rows(lambda row: Number.exact(quantity(self.evidence, row, self.system)))


def _ratio(better: Value, worse: Value) -> float:
    """How many times better one published value is than another of the same metric."""
    return worse.value / better.value if better.metric in WORSE else better.value / worse.value


def _as_ratio(metric: str, value: float) -> float:
    if metric == "latency_reduction":
        return 1 / (1 - value / PERCENT)
    return 1 + value / PERCENT if metric == "sm_efficiency_gain" else value


def _name(system: Choice | None) -> str:
    return short(system) if system is not None else ""


assert set(NO_MODEL) >= {"geomean", "up to", "range"}
