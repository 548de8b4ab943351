"""Dots, a line of them for each model and system: what bars, which begin at zero, cannot show."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from results.cell import Choice
from results.selection import Row, Selection

from .bars import wrapped
from .places import ABSENT, FEW, NOT_MEASURED, places
from .style import FONT, INK, PAGE, WORDS, Look, above, broken, foot, label, look, note, set_log, width

LINE = 0.1  # inches of height, a system
BETWEEN = 1.1  # lines, between two models
NAME = 1.2  # lines, that one of a model's name takes
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
    measured: Selection,
    rows: Sequence[Row],
    systems: Sequence[Choice],
    dots: Callable[[Row, Choice], Sequence[Dot]],
    why: Callable[[Row, Choice], str],
    xlabel: str,
    title: str,
    signs: Callable[[Row], Sequence[Sign]] = lambda _: (),
    legend: Sequence[Artist] = (),
    is_linear: bool = False,
) -> Figure:
    """A figure of dots.

    Args:
        measured: the records that are shown, for labels and looks.
        rows, systems: the models, and the lines of each.
        dots: of a cell.
        why: what stands in the place of no dots.
        xlabel, title: words.
        signs: of a row.
        legend: entries beside the systems.
        is_linear: whether the axis is; otherwise it is logarithmic, and all values are above 0.
    """

    def empty(row: Row, system: Choice) -> bool:
        return not dots(row, system) and why(row, system) == NOT_MEASURED

    is_narrow = width() < PAGE
    placed = {row: places(systems, partial(empty, row), 0 if is_narrow else FEW) for row in rows}
    remark = ABSENT.format("mark") if is_narrow and any(others for _, others in placed.values()) else ""
    if is_narrow:
        placed = {row: (own, "") for row, (own, _) in placed.items()}
    # The legend names no system without a place; markers are as if it had one.
    named = [system for system in systems if any(system in own for own, _ in placed.values())]
    # A model's name has room for its own lines.
    names = dict(zip(rows, map(wrapped, measured.row_labels(rows)), strict=True))
    tall = {
        row: max(len(own) + bool(others), NAME * len(names[row].splitlines())) + BETWEEN
        for row, (own, others) in placed.items()
    }
    label_lines = broken(xlabel, 0.6 * width() if is_narrow else PAGE, FONT, (WORDS,))
    cut = _half([tall[row] for row in rows]) if len(rows) > LONG and width() == PAGE else len(rows)
    columns = [part for part in (rows[:cut], rows[cut:]) if part]
    height = max(sum(tall[row] for row in part) for part in columns)
    figure, grid = plt.subplots(
        *(1, len(columns)),
        figsize=(width(), height * LINE + 0.86 + 0.14 * len(label_lines)),
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    values = [
        end for row in rows for s in systems for d in dots(row, s) for end in (d.value, d.low, d.high) if end is not None
    ]
    values += [sign.value for row in rows for sign in signs(row)]
    low, high = min(values) / 1.25, max(values) * 1.25
    if is_linear:
        margin = 0.05 * (max(values) - min(values)) or 0.01
        low, high = min(values) - margin, max(values) + margin
    seen: dict[str, Sign] = {}
    for shown, axes in zip(columns, grid[0], strict=True):
        if is_linear:
            axes.set_xlim(low, high)
        else:
            set_log(axes, "x", low, high)
        axes.set_ylim(height - 0.5 - BETWEEN / 2, -0.5 - BETWEEN / 2)
        begin, middles = 0.0, []
        for row in shown:
            own, others = placed[row]
            lines = tall[row] - BETWEEN
            middles.append(begin + (lines - 1) / 2)
            first = begin + (lines - len(own) - bool(others)) / 2
            if begin:
                axes.axhline(begin - 0.5 - BETWEEN / 2, color="0.88", linewidth=0.6)
            for sign in signs(row):
                seen.setdefault(sign.legend, sign)
                ends = begin - 0.75, begin + lines - 0.25
                axes.vlines(sign.value, *ends, color=INK, linewidth=1.0, linestyle=sign.linestyle, zorder=2)
            for place, system in enumerate(own):
                own_dots = dots(row, system)
                if not own_dots:
                    note(axes, f"{label(system)}: {why(row, system)}", (low, first + place), (3, 0))
                for dot in own_dots:
                    _dot(axes, first + place, dot, look(system, measured.among))
            if others:
                note(axes, others, (low, first + len(own)), (3, 0))
            begin += tall[row]
        axes.set_yticks(middles, [names[row] for row in shown])
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.set_xlabel("\n".join(label_lines))
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    handles: list[Artist] = []
    for system in named:
        style = look(system, measured.among)
        line: Any = {"linestyle": "none", "markersize": 4.5, "markeredgecolor": style.colour, "markeredgewidth": 0.6}
        handles.append(Line2D([], [], marker=style.marker, color=style.colour, label=label(system), **line))
    for sign in seen.values():
        handles.append(Line2D([], [], color=INK, linewidth=1.0, linestyle=sign.linestyle, label=sign.legend))
    above(figure, [*handles, *legend], title)
    foot(figure, remark)
    return figure


def _half(heights: Sequence[float]) -> int:
    """Where two columns are cut, so that the taller is as low as it can be, and that the first of two that are alike."""
    return min(range(1, len(heights) + 1), key=lambda i: (round(max(sum(heights[:i]), sum(heights[i:])), 6), -i))


def _dot(axes: Axes, y: float, dot: Dot, style: Look) -> None:
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
