"""Throughput over batch sizes: a panel for each model, a line for each system."""

from textwrap import wrap
from typing import Any, TypeAlias

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from conf.text import counted
from results.calls import Throughput
from results.cell import Choice
from results.record import Record
from results.selection import NoResults, Selection
from results.statistics import Statistics

from .chart import Chart
from .names import written
from .places import FEW, NOT_MEASURED
from .style import PAGE, above, house, label, look, note, set_log, width

ACROSS, ACROSS_COLUMN = 3, 1  # panels
PANEL = 2.0  # inches of height
LINE = 36  # letters of a note on one of so many
LEADING = 0.105  # inches of a line of it
AXES = 1.25  # inches of a panel's height that its axes have
Points: TypeAlias = dict[tuple[int, Choice], Statistics]  # by batch and system
MOST = 6  # lines of notes, if they can do with so few


def draw(measured: Selection) -> Chart:
    """Samples a second over the batch, both logarithmic, of models that were measured at several.

    Raises NoResults where there is none.
    """
    systems = measured.systems
    panels = {}
    for model in measured.models:
        batches = [batch for name, batch in measured.rows if name == model]
        points = {
            (b, s): part.statistics
            for b in batches
            for s in systems
            if (part := measured.part((model, b), s, _throughput)) is not None
        }
        if len({batch for batch, _ in points}) > 1:
            panels[model] = batches, points
    if not panels:
        raise NoResults("no model's throughput was measured at several batches")
    models = sorted(panels)
    # A system without a point in any panel, and without a reason why, stands in no legend and in no note.
    named = [s for s in systems if any(_known(measured, model, panels[model][0], s) for model in models)]
    with house():
        across = min(ACROSS if width() == PAGE else ACROSS_COLUMN, len(models))
        down = -(-len(models) // across)
        notes = {
            model: _notes(measured, model, *panels[model], named, int(LINE * ACROSS / across * width() / PAGE))
            for model in models
        }
        tall = LEADING * max(map(len, notes.values()))
        size = width(), (PANEL + tall) * down + 0.7
        figure, grid = plt.subplots(*(down, across), figsize=size, squeeze=False, layout="constrained")
        for axes, model in zip(grid.flat, models, strict=False):
            axes.set_title(written(model) if len(models) > 1 else "", pad=3)
            _panel(axes, measured, model, *panels[model], notes[model], LEADING * len(notes[model]) / (AXES + tall))
        for axes in list(grid.flat)[len(models) :]:
            axes.set_axis_off()
        for axes in grid[:, 0]:
            axes.set_ylabel("samples/s")
        for number, axes in enumerate(grid.flat):
            if number < len(models) and number + across >= len(models):
                axes.set_xlabel("batch")
        handles = []
        for system in [s for s in named if any((b, s) in points for _, points in panels.values() for b, _ in points)]:
            style = look(system, measured.among)
            handles.append(
                Line2D([], [], color=style.colour, marker=style.marker, markersize=4.5, linewidth=1, label=label(system))
            )
        above(figure, handles, ", ".join([measured.setting.label, *(models if len(models) == 1 else [])]))
    caption = (
        "Throughput: calls back to back, without a synchronisation between them. A point is the median of five runs, the "
        "line on it the bootstrap 95 % interval."
    )
    return Chart("throughput", "Throughput over batch sizes", caption, figure)


def _known(measured: Selection, model: str, batches: list[int], system: Choice) -> bool:
    """Whether there is anything to say of a system at any of the batches but that it was not measured."""
    rows = [(model, batch) for batch in batches]
    return any(
        measured.part(row, system, _throughput) is not None or measured.missing(row, system, _throughput) != NOT_MEASURED
        for row in rows
    )


def _throughput(record: Record) -> Throughput | None:
    return record.throughput


def _panel(
    axes: Axes,
    measured: Selection,
    model: str,
    batches: list[int],
    points: Points,
    notes: list[str],
    room: float,
) -> None:
    """notes: lines that stand below all points. room: the share of the axes' height that they take."""
    systems = [s for s in measured.systems if any((batch, s) in points for batch in batches)]
    ends = [end for statistics in points.values() for end in statistics.ci95]
    low, high = min(ends) / 1.3, max(ends) * 1.3
    set_log(axes, "y", low * (low / high) ** (room / (1 - room)), high, most=6)
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(batches) / 1.6, max(batches) * 1.6)
    axes.xaxis.set_major_locator(FixedLocator(batches))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(batch) for batch in batches])
    for system in systems:
        style = look(system, measured.among)
        xs: list[float] = []
        ys: list[float] = []
        for batch in batches:
            if (statistics := points.get((batch, system))) is None:  # the line has a gap there
                xs.append(batch)
                ys.append(float("nan"))
                continue
            xs.append(batch)
            ys.append(statistics.median)
            low, high = statistics.ci95
            axes.vlines(batch, low, high, color=style.colour, linewidth=1.0, zorder=2.5)
        line: Any = {"linewidth": 0.9, "markersize": 3.6, "markeredgecolor": "white", "markeredgewidth": 0.3}
        axes.plot(xs, ys, color=style.colour, marker=style.marker, zorder=3, **line)
    if notes:
        note(axes, "\n".join(notes), (1, 0), (-2, 2), xycoords="axes fraction", ha="right", va="bottom", zorder=4)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _notes(
    measured: Selection,
    model: str,
    batches: list[int],
    points: Points,
    systems: list[Choice],
    line: int,
) -> list[str]:
    """Which of the systems have no point at which batches, and why, in lines of so many letters."""
    gaps: dict[tuple[tuple[int, ...], str], list[Choice]] = {}
    for system in systems:
        lacking: dict[str, list[int]] = {}
        for batch in batches:
            if (batch, system) not in points:
                lacking.setdefault(measured.missing((model, batch), system, _throughput), []).append(batch)
        for word, where in lacking.items():
            gaps.setdefault((tuple(where), word), []).append(system)
    for most in (len(systems), FEW, 0):  # by name, if that does with few lines
        lines = []
        for (at, word), names in sorted(gaps.items(), key=lambda gap: gap[0]):
            which = f"batch{'es' * (len(at) > 1)} {', '.join(map(str, at))} " if len(at) < len(batches) else ""
            few = len(names) <= most or word != NOT_MEASURED  # what did not run is always named
            lines += wrap(f"{which}{word}: {', '.join(map(label, names)) if few else counted(len(names), 'system')}", line)
        if len(lines) <= MOST:
            break
    return lines
