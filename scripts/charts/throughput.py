"""Throughput over batch sizes: a panel for each model, a line for each system."""

from textwrap import wrap
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from .chart import Chart
from .measured import Measured, NoResults
from .places import FEW, NOT_MEASURED
from .style import WIDTH, above, house, look, note, set_log, short

ACROSS = 3  # panels
PANEL = 2.0  # inches of height
LINE = 36  # letters of a note
APART = 0.08  # of a factor two, between the points of two systems at one batch
FARTHEST = 0.5  # and between the first and the last of many
MOST = 6  # lines that a panel has room for


def draw(measured: Measured) -> Chart:
    """Samples a second over the batch, both logarithmic, of models that were measured at several.

    Raises NoResults where there is none.
    """
    systems = measured.systems
    panels = {}
    for model in measured.models:
        batches = [batch for name, batch in measured.rows if name == model]
        found = {(b, s): t for b in batches for s in systems if (t := _of(measured, model, b, s)) is not None}
        if len({batch for batch, _ in found}) > 1:
            panels[model] = batches, found
    if not panels:
        raise NoResults("no model's throughput was measured at several batches")
    models = sorted(panels)
    with house():
        across = min(ACROSS, len(models))
        down = -(-len(models) // across)
        figure, grid = plt.subplots(
            *(down, across), figsize=(WIDTH, PANEL * down + 0.7), squeeze=False, layout="constrained"
        )
        for axes, model in zip(grid.flat, models, strict=False):
            _panel(axes, measured, model, *panels[model])
        for axes in list(grid.flat)[len(models) :]:
            axes.set_axis_off()
        for axes in grid[:, 0]:
            axes.set_ylabel("samples/s")
        for number, axes in enumerate(grid.flat):
            if number < len(models) and number + across >= len(models):
                axes.set_xlabel("batch")
        handles = []
        # What has no point in any panel, nor a reason why, is told apart by no legend.
        for system in [s for s in systems if any(_known(measured, model, panels[model][0], s) for model in models)]:
            style = look(system, systems)
            handles.append(
                Line2D([], [], color=style.colour, marker=style.marker, markersize=4.5, linewidth=1, label=system)
            )
        above(figure, handles, measured.setting.label)
    caption = (
        "Throughput: calls back to back, without a synchronisation between them. A point is the median of five runs, the "
        "line on it the bootstrap 95 % interval. Points of one batch are set a little apart."
    )
    return Chart("throughput", "Throughput over batch sizes", caption, figure)


def _known(measured: Measured, model: str, batches: list[int], system: str) -> bool:
    """Whether there is anything to say of a system at any of the batches but that it was not measured."""
    rows = [(model, batch) for batch in batches]
    return any(
        _of(measured, *row, system) is not None or measured.missing(row, system, "throughput") != NOT_MEASURED
        for row in rows
    )


def _of(measured: Measured, model: str, batch: int, system: str) -> dict[str, Any] | None:
    record = measured.record((model, batch), system, "throughput")
    if record is None or record["status"] != "ok":
        return None
    return dict(record["throughput"]["statistics"])


def _panel(
    axes: Axes, measured: Measured, model: str, batches: list[int], found: dict[tuple[int, str], dict[str, Any]]
) -> None:
    systems = [s for s in measured.systems if any((batch, s) in found for batch in batches)]
    axes.set_title(model, pad=3)
    ends = [end for t in found.values() for end in t["ci95"]]
    set_log(axes, "y", min(ends) / 1.3, max(ends) * 1.3, most=6)
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(batches) / 1.6, max(batches) * 1.6)
    axes.xaxis.set_major_locator(FixedLocator(batches))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(batch) for batch in batches])
    gaps: dict[tuple[int, str], list[str]] = {}
    step = min(APART, FARTHEST / max(1, len(systems) - 1))
    for system in measured.systems:
        for batch in batches:
            if (batch, system) not in found:
                gaps.setdefault((batch, measured.missing((model, batch), system, "throughput")), []).append(system)
    for place, system in enumerate(systems):
        style = look(system, measured.systems)
        apart = 2.0 ** (step * (place - (len(systems) - 1) / 2))
        xs: list[float] = []
        ys: list[float] = []
        for batch in batches:
            if (t := found.get((batch, system))) is None:  # the line has a gap there
                xs.append(batch)
                ys.append(float("nan"))
                continue
            xs.append(batch * apart)
            ys.append(t["median"])
            low, high = t["ci95"]
            axes.vlines(batch * apart, low, high, color=style.colour, linewidth=1.0, zorder=2.5)
        line: Any = {"linewidth": 0.9, "markersize": 3.6, "markeredgecolor": "white", "markeredgewidth": 0.3}
        axes.plot(xs, ys, color=style.colour, marker=style.marker, zorder=3, **line)
    # The lower right corner is free: throughput grows with the batch.
    told = [line for gap, names in sorted(gaps.items()) for line in wrap(_gap(*gap, names, len(names)), LINE)]
    if len(told) > MOST:
        told = [line for gap, names in sorted(gaps.items()) for line in wrap(_gap(*gap, names, FEW), LINE)]
    if told:
        note(axes, "\n".join(told), (1, 0), (-2, 2), xycoords="axes fraction", ha="right", va="bottom", zorder=4)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _gap(batch: int, word: str, names: list[str], most: int) -> str:
    """names: by name where they are few, or did not run."""
    few = len(names) <= most or word != NOT_MEASURED
    return f"batch {batch} {word}: {', '.join(map(short, names)) if few else f'{len(names)} systems'}"
