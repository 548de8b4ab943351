"""The charts of an exhibit, each as wide as a column of a paper."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from results.cell import Choice
from results.comparison import has_sound_rounds, is_disturbed
from results.finding import IN_WORDS, Finding
from results.published.value import Value
from results.record import Record
from results.selection import NoResults, Place, Row, Selection
from scripts import agreement
from scripts.charts import (
    active_warps,
    blocks,
    claims,
    matrix,
    search,
    serving,
    shares,
    sm_efficiency,
    speedup,
    style,
    tradeoff,
)
from scripts.charts.chart import Chart
from scripts.plot import CHARTS, Drawing, draw_all
from scripts.timeline import draw as draw_timelines

from .evidence import Evidence, place_in
from .findings import published_speedups
from .judgement import simulated_by, stands
from .marks import remark, share_bands, speedup_bands, stream_words
from .preset import Preset

TRADEOFF, MATRIX, CLAIMS = "tradeoff", "matrix", "claims"
MANY = 24  # figures side by side, over which they are as wide as a page
OWN = ("idle", "critical_path", "blocks", "active_warps", TRADEOFF, MATRIX, CLAIMS)  # beside those of plot.py
FOR_BATCH = re.compile(r"optimized_for_batch=(\d+)")  # of a paper's name of a schedule


def pictures(preset: Preset, evidence: Evidence, judged: Sequence[Finding]) -> tuple[dict[str, Chart], dict[str, str]]:
    """The charts by file name, the preset's own first, and why some of them are not there."""
    charts: dict[str, Chart] = {}
    refused: dict[str, str] = {}
    with style.column():
        if evidence.measured is not None:
            own = _own(preset, evidence, evidence.measured)
            for name in preset.charts:
                if name in own:
                    drawn, why = _drawn(name, own[name])
                elif name == "speedup" or name in CHARTS or "." in name:
                    drawn, why = _of_plot(name, preset, evidence.measured)
                else:
                    continue
                charts |= drawn
                refused |= why
        if evidence.timelines:
            caption = "Each stream a row, each operator a bar: dark where it is bound by arithmetic, light by memory."
            charts["timeline"] = Chart(
                "timeline", preset.title, caption, draw_timelines(evidence.timelines, remark=stream_words(preset))
            )
        paper = preset.name.partition("/")[0]
        many = style.page() if len(judged) > MANY else nullcontext()
        with many:
            drawn, why = _drawn(CLAIMS, lambda: claims.draw(judged, paper, evidence.setting, stands(preset, evidence)))
        charts |= drawn
        refused |= why
        for name, chart in charts.items():
            style.head(
                chart.figure, preset.title + ("; the figures side by side" if name == CLAIMS and len(charts) > 1 else "")
            )
    return charts, refused


def _own(preset: Preset, evidence: Evidence, measured: Selection) -> dict[str, Callable[[], Chart]]:
    """The charts that know the paper's values, by name."""
    bands = share_bands(preset, measured)
    own: dict[str, Callable[[], Chart]] = {
        "idle": lambda: shares.draw_idle(measured, bands, remark(preset, measured, bands)),
        "critical_path": lambda: shares.draw_critical_path(measured, bands),
        "blocks": lambda: blocks.draw(measured, _block_words(preset)),
        "active_warps": lambda: active_warps.draw(measured),
        TRADEOFF: lambda: _tradeoff(preset, evidence, measured),
        MATRIX: lambda: _matrix(preset, measured),
    }
    if preset.cold:
        own["search"] = lambda: search.draw(measured, cold=_searched(evidence))
    return own


def _drawn(name: str, draw: Callable[[], Chart]) -> tuple[dict[str, Chart], dict[str, str]]:
    try:
        return {name: draw()}, {}
    except NoResults as error:
        return {}, {name: str(error)}


def _of_plot(name: str, preset: Preset, measured: Selection) -> tuple[dict[str, Chart], dict[str, str]]:
    """Charts that plot.py draws of anybody's records, with what the paper prints beside them."""
    published = published_speedups(preset)
    if name == "speedup":
        if preset.shown:
            labels = [system.label for system in measured.systems]
            shown = [label for label in preset.shown if label in labels]
            measured = measured.only(systems=shown, always=[preset.baseline.label])
        bands = speedup_bands(preset, measured)

        def speedups(part: Selection, baseline: Choice, values: Sequence[Value]) -> list[Drawing]:
            return [partial(speedup.draw, part, baseline, values, bands, remark(preset, part, bands))]

        return draw_all(measured, [name], preset.baseline, published, {name: speedups})
    if name == "sm_efficiency":
        shares = _shares(preset)
        words = _without_bar(shares, measured)

        def efficiencies(part: Selection, *_: object) -> list[Drawing]:
            return [partial(sm_efficiency.draw, part, source, shares, words) for source in sm_efficiency.SOURCES]

        return draw_all(measured, [name], preset.baseline, published, {name: efficiencies})
    if name == "serving" and (real := _real(measured)):
        return draw_all(
            measured, [name], preset.baseline, published, {name: lambda part, *_: [partial(serving.draw, part, real)]}
        )
    return draw_all(measured, [name], preset.baseline, published)


def _real(measured: Selection) -> dict[Place, list[serving.Point]]:
    """What engines did at the rates that simulations with the same costs are held against."""
    of_place: dict[Place, list[serving.Point]] = {}
    for costs, lengths in simulated_by(measured):
        for point in agreement.points_of(costs, lengths):
            place = place_in(point.cell)
            of_place.setdefault(place, []).append(serving.Point(point.throughput_real, point.normalized_ms_real))
    return of_place


def _shares(preset: Preset) -> dict[tuple[Row, Choice], list[Value]]:
    """The paper's shares of SM efficiency, each of one network at one batch under one system."""
    shares: dict[tuple[Row, Choice], list[Value]] = {}
    for value, _ in preset.figures:
        model, system = preset.model_of(value), preset.system_of(value)
        if value.metric == "sm_efficiency" and model is not None and system is not None and value.batch.isdigit():
            shares.setdefault(((model, int(value.batch)), system), []).append(value)
    return shares


def _without_bar(shares: Iterable[tuple[Row, Choice]], measured: Selection) -> str:
    """Which of the paper's shares the chart has no bar of."""
    rows = {f"{row[0]}, batch {row[1]}" for row, _ in shares if row not in measured.rows}
    return f"In the paper and not measured here: {'; '.join(map(style.written, sorted(rows)))}." if rows else ""


def _block_words(preset: Preset) -> str:
    """What the paper says of its fastest block."""
    values = [value for value, _ in preset.figures if value.metric == "block_speedup"]
    return " ".join(f"The paper, {v.device}: its fastest block is {v.value:g} times as fast." for v in values)


def _searched(evidence: Evidence) -> dict[Place, float]:
    """Seconds of each search that left a schedule file."""
    files = evidence.schedules.items()
    return {place_in(cell): file.search.seconds for cell, file in files if file.search.seconds is not None}


def _tradeoff(preset: Preset, evidence: Evidence, measured: Selection) -> Chart:
    """Of the searches that the preset's ratio compares, or of those beside: what each takes and what its schedule takes."""
    (unpruned,) = preset.ratio.values()
    here: dict[str, list[tradeoff.Search]] = {}
    published: dict[str, list[tradeoff.Search]] = {}
    setting = measured.title_of(measured.rows)
    for row in measured.rows:
        theirs = {name: point for name in preset.systems if (point := _published(preset, row, name)) is not None}
        if unpruned in theirs:
            cost, ms = theirs[unpruned]
            published[row[0]] = [_search(name, s / cost, one / ms, s, one) for name, (s, one) in theirs.items()]
        here[row[0]] = _searches(preset.systems, unpruned, row, evidence, measured)
        if not here[row[0]] and (beside := _searches(preset.beside, unpruned, row, evidence, measured)):
            here[row[0]] = beside
            setting = f"{measured.title_of(measured.rows)}; ours in another setting than the paper's"
    here = {model: searches for model, searches in here.items() if searches}
    return tradeoff.draw(here, published, preset.name.partition("/")[0], setting)


def _searches(
    systems: Mapping[str, Choice], unpruned: str, row: Row, evidence: Evidence, measured: Selection
) -> list[tradeoff.Search]:
    """Those of a model whose cost is known and whose schedule has a ratio to that of the search without pruning."""
    seconds = _searched(evidence)
    if unpruned not in systems or (*row, systems[unpruned]) not in seconds:
        return []
    own, searches = systems[unpruned], list[tradeoff.Search]()
    for name, system in systems.items():
        cost, ms = seconds.get((*row, system)), measured.part(row, system, _call_ms)
        ratio = measured.over(row, system, own)
        if cost is not None and ms is not None and ratio is not None:
            searches.append(_search(name, cost / seconds[*row, own], 1 / ratio.ratio, cost, ms))
    return searches


def _search(name: str, cost: float, latency: float, seconds: float, ms: float) -> tradeoff.Search:
    """A search by its numbers as ratios and as they are."""
    return tradeoff.Search(", ".join(re.findall(r"\d+", name)), cost, latency, f"{name}: {seconds:.1f} s, {ms:.2f} ms")


def _call_ms(record: Record) -> float | None:
    """Median milliseconds of a call in the rounds, or alone where there are none that a ratio is of."""
    if record.comparison is not None and has_sound_rounds(record) and not is_disturbed(record):
        return record.comparison.median_ms
    return None if record.latency is None else record.latency.host.median


def _published(preset: Preset, row: Row, name: str) -> tuple[float, float] | None:
    """The cost in s and the latency in ms that the paper has of a search."""
    values = [v for v, _ in preset.figures if v.system == name and preset.model_of(v) == row[0]]
    by_metric = {v.metric: v.value for v in values}
    return (by_metric["optimization_cost"], by_metric["latency"]) if len(by_metric) == 2 else None


def _matrix(preset: Preset, measured: Selection) -> Chart:
    """Of schedules that were each searched for a batch size."""
    of_batch = {of: name for name in preset.systems if (of := _searched_for(name))}
    (model,) = measured.models
    cells = {(batch, of): preset.systems[name] for batch in measured.batches for of, name in of_batch.items()}
    here = {
        (batch, of): ms
        for (batch, of), system in cells.items()
        if (ms := measured.part((model, batch), system, _call_ms)) is not None
    }
    times = {
        (batch, of): ratio.ratio
        for (batch, of), system in cells.items()
        if (own := cells.get((batch, batch))) and (ratio := measured.over((model, batch), own, system)) is not None
    }
    values = [value for value, rule in preset.figures if value.device not in preset.absent and rule not in IN_WORDS]
    theirs = {(int(v.batch), of): v.value for v in values if v.metric == "latency" and (of := _searched_for(v.system))}
    slower = {(batch, of): ms / theirs[batch, batch] for (batch, of), ms in theirs.items()}
    slower |= {(int(v.batch), of): v.value for v in values if v.metric == "speedup" and (of := _searched_for(v.baseline))}
    slower |= {(batch, batch): 1.0 for batch, _ in slower}
    devices = sorted({value.device for value, _ in preset.figures} - preset.absent.keys())
    whose = f"the paper, {', '.join(filter(None, devices))}"
    matrices = [matrix.Matrix("here", here, times), matrix.Matrix(whose, theirs, slower)]
    absent = sorted(set(preset.absent.values()))
    words = f"Not here: {'; '.join(absent)}." if absent else ""
    return matrix.draw(matrices, style.written(f"{measured.setting.label}, {model}"), words)


def _searched_for(system: str) -> int | None:
    """The batch size that a schedule was searched for, by a paper's name of the system."""
    match = FOR_BATCH.search(system)
    return int(match[1]) if match else None
