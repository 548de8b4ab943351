"""Dots on a logarithmic axis, a line of them for each model and system: what bars, which begin at zero, cannot show."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .bars import wrapped
from .measured import Measured, Row
from .style import INK, WIDTH, above, look, note, set_log

LINE = 0.088  # inches of height, a system
BETWEEN = 1.1  # lines, between two models
LONG = 8  # rows, over which they stand in two columns


@dataclass(frozen=True)
class Dot:
    """A value, the ends of its 95 % interval (None where it has none), and whether its marker is filled."""

    value: float
    low: float | None = None
    high: float | None = None
    filled: bool = True


@dataclass(frozen=True)
class Sign:
    """A value of the model, for all of its systems: drawn over the height of the row. legend: what it is."""

    value: float
    legend: str
    linestyle: Any = "-"


def draw_dots(
    measured: Measured,
    rows: Sequence[Row],
    systems: Sequence[str],
    dots: Callable[[Row, str], Sequence[Dot]],
    why: Callable[[Row, str], str],
    xlabel: str,
    title: str,
    signs: Callable[[Row], Sequence[Sign]] = lambda _: (),
    legend: Sequence[Artist] = (),
) -> Figure:
    """dots: of a cell; where there is none, `why` stands. signs: of a row. legend: entries beside the systems."""
    columns = 2 if len(rows) > LONG else 1
    height = -(-len(rows) // columns)
    group = len(systems) + BETWEEN
    figure, grid = plt.subplots(
        *(1, columns), figsize=(WIDTH, height * group * LINE + 1.0), squeeze=False, sharex=True, layout="constrained"
    )
    values = [end for row in rows for s in systems for d in dots(row, s) for end in (d.value, d.low, d.high) if end]
    values += [sign.value for row in rows for sign in signs(row)]
    low, high = min(values) / 1.25, max(values) * 1.25
    seen: dict[str, Sign] = {}
    for column, axes in enumerate(grid[0]):
        shown = rows[column * height : (column + 1) * height]
        set_log(axes, "x", low, high)
        axes.set_ylim(height * group - 0.5 - BETWEEN / 2, -0.5 - BETWEEN / 2)
        for number, row in enumerate(shown):
            begin = number * group
            if number:
                axes.axhline(begin - 0.5 - BETWEEN / 2, color="0.88", linewidth=0.6)
            for sign in signs(row):
                seen.setdefault(sign.legend, sign)
                ends = begin - 0.75, begin + len(systems) - 0.25
                axes.vlines(sign.value, *ends, color=INK, linewidth=1.0, linestyle=sign.linestyle, zorder=2)
            for place, system in enumerate(systems):
                found = dots(row, system)
                if not found:
                    note(axes, f"{system}: {why(row, system)}", (low, begin + place), (3, 0))
                for dot in found:
                    _dot(axes, begin + place, dot, system, systems)
        middles = [number * group + (len(systems) - 1) / 2 for number in range(len(shown))]
        axes.set_yticks(middles, [wrapped(text) for text in measured.row_labels(shown)])
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.set_xlabel(xlabel)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    handles: list[Artist] = []
    for system in systems:
        style = look(system, systems)
        line: Any = {"linestyle": "none", "markersize": 4.5, "markeredgecolor": style.colour, "markeredgewidth": 0.6}
        handles.append(Line2D([], [], marker=style.marker, color=style.colour, label=system, **line))
    for sign in seen.values():
        handles.append(Line2D([], [], color=INK, linewidth=1.0, linestyle=sign.linestyle, label=sign.legend))
    above(figure, [*handles, *legend], title)
    return figure


def _dot(axes: Axes, y: float, dot: Dot, system: str, systems: Sequence[str]) -> None:
    style = look(system, systems)
    if dot.low is not None and dot.high is not None:
        axes.hlines(y, dot.low, dot.high, color=style.colour, linewidth=1.0, zorder=2.5)
    axes.plot(
        dot.value,
        y,
        linestyle="none",
        marker=style.marker,
        markersize=4.2,
        markeredgewidth=0.6,
        zorder=3,
        markeredgecolor=style.colour,
        markerfacecolor=style.colour if dot.filled else "white",
    )
