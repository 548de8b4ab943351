"""What a chart of an exhibit shows of the paper's own: ranges, and a note of what has no mark in it."""

from collections.abc import Sequence

from conf.text import counted
from results.cell import Choice
from results.finding import IN_WORDS
from results.published.value import FOR_WORDS, Value
from results.selection import Selection
from scripts.charts.bars import Band
from scripts.charts.claims import TITLES
from scripts.charts.names import written
from scripts.charts.speedup import LARGEST, SMALLEST, published_marks

from .findings import published_speedups
from .preset import Preset

IDLE, PARALLELISM = "gpu_idle", "parallelism"


def speedup_bands(preset: Preset, measured: Selection) -> list[Band]:
    """Published ranges, and largest values, of speedups of a system that is shown over the chart's baseline."""
    values = [v for v in _numbers(preset) if preset.baseline_of(v) == preset.baseline]
    values = [v for v in values if preset.system_of(v) in measured.systems and not _is_elsewhere(preset, v)]
    bands = []
    for low in (v for v in values if v.metric == SMALLEST):
        for high in (v for v in values if v.metric == LARGEST and (v.device, v.model) == (low.device, low.model)):
            bands.append(Band(low.value, high.value, f"{_whose(low)}: {low.value:g} to {high.value:g}"))
    for value in values:
        if value.metric == "speedup" and value.model == "up to":
            bands.append(Band(value.value, value.value, f"{_whose(value)}: up to {value.value:g}"))
    return bands


def share_bands(preset: Preset, measured: Selection) -> list[Band]:
    """Published shares: of a call in which kernels run, or of the GPU's active time that the critical path takes."""
    bands = []
    for value in _numbers(preset):
        if value.metric == IDLE and preset.system_of(value) in measured.systems and not _is_elsewhere(preset, value):
            words = f"{_whose(value)}: {written(value.system)} idle for up to {value.value:g} %"
            bands.append(Band(100 - value.value, 100 - value.value, words))
        if value.metric == PARALLELISM:
            words = f"{_whose(value)}: up to {value.value:g} times as long as it"
            bands.append(Band(100 / value.value, 100 / value.value, words))
    return bands


def remark(preset: Preset, measured: Selection, bands: Sequence[Band] = ()) -> str:
    """Which of the paper's systems have no mark in the chart, and which systems of the chart have no published value."""
    speedups = published_speedups(preset)
    marks = published_marks(speedups, preset.baseline, measured.rows, measured.systems)
    marked: set[Choice | None] = {system for _, system in marks}
    if bands:
        marked |= {preset.system_of(v) for v in _numbers(preset)}
    # Over several batches no bar is the one that they are of.
    largest = [v for v in speedups if not v.batch.isdigit() and v.our_baseline == preset.baseline and v.our_system]
    marked |= {value.our_system for value in largest}
    shown = [system for system in measured.systems if system not in marked | {preset.baseline}]
    parts = []
    if shown:
        names = ", ".join(written(system.label) for system in shown)
        parts.append(f"No published value of: {names}.")
    lacking = sorted({written(name) for name in paper_systems(preset) if _is_lacking(preset, name, measured)})
    if lacking:
        parts.append(f"In the paper and not comparable here: {', '.join(lacking)}.")
    for value in largest:
        name = written(value.our_system.label)  # type: ignore[union-attr]
        parts.append(f"{_whose(value)}, {name}, largest over batches: {value.value:.2f}.")
    models = sorted({row[0] for row in measured.rows} - {row[0] for row, _ in marks})
    if marks and models:
        parts.append(f"Without a number of the paper's: {', '.join(map(written, models))}.")
    return " ".join(parts)


def stream_words(preset: Preset) -> str:
    """On how many streams each network runs under each of the paper's systems, where it prints that."""
    values = [value for value in _numbers(preset) if value.metric == "streams" and value.source != FOR_WORDS]
    systems: dict[str, list[str]] = {}
    for value in values:
        under = systems.setdefault(f"{_whose(value)}: {written(value.model)}", [])
        number = f"{value.value:g}" if under else counted(int(value.value), "stream")
        under.append(f"{number} under {written(value.system)}")
    return " ".join(f"{network} on {', '.join(under)}." for network, under in systems.items())


def paper_systems(preset: Preset) -> set[str]:
    """The paper's names of the systems that it compares."""
    return {name for value, _ in preset.figures for name in (value.system, value.baseline) if name}


def _is_lacking(preset: Preset, name: str, measured: Selection) -> bool:
    """Whether no system of the chart stands for one of the paper's."""
    if name in preset.absent or name in preset.incomparable:
        return True
    stand_ins = {preset.system_of(v) for v, _ in preset.figures if v.system == name}
    stand_ins |= {preset.baseline_of(v) for v, _ in preset.figures if v.baseline == name}
    return not stand_ins & {*measured.systems}


def _numbers(preset: Preset) -> list[Value]:
    """The values that are numbers."""
    return [value for value, rule in preset.figures if rule not in IN_WORDS]


def _is_elsewhere(preset: Preset, value: Value) -> bool:
    """Whether a value is of something that is absent here, or compared otherwise."""
    return bool((preset.absent.keys() | preset.incomparable.keys()) & {*preset.names_of(value)})


def _whose(value: Value) -> str:
    return ", ".join(filter(None, [value.whose.replace(value.paper, TITLES.get(value.paper, value.paper)), value.device]))
