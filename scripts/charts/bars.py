"""Bars grouped by model, a bar a system, over as many rows of panels as stay legible."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import Normal, Stroke

from results.cell import Choice
from results.selection import Row, Selection

from .names import written
from .places import ABSENT, FEW, NOT_MEASURED, places
from .style import (
    FONT,
    INK,
    PAGE,
    PAPERS,
    POINTS,
    SMALL,
    TINY,
    WORDS,
    Look,
    above,
    broken,
    foot,
    inches,
    label,
    look,
    note,
    width,
)

SLOTS = 50  # bars, and the gaps between groups, across a page
GAP = 0.9  # of a bar, between two groups
LEAST = 4.4  # bars' room that a group's label needs
PANEL, PANEL_OF_COLUMN = 1.75, 1.45  # inches of height
BESIDE = 0.5  # inches that the axes leave for the numbers and the label beside them
REST = "0.88"  # of a whole, what a bar leaves of it
LOW = 1.15  # inches of height that every panel's axes have
HALO = [Stroke(linewidth=1.8, foreground="white"), Normal()]  # of a whisker, which a dark bar would swallow
APART = 0.88  # of a bar's room, over which numbers side by side would read as one
ASIDE = 0.03  # inches between two labels side by side
UNDER = 2  # points between an axis, the numbers and the labels
MARGIN = 0.06  # of the bars' span, beyond them
# Of the marks of one paper, a face for each of its GPUs: the first is open.
DASHES = re.compile(r"(?<=-)")
FACES = ("white", "0.65", "0.35", "black")
ABOVE = 1.8  # a mark higher than so many times the highest bar of its panel is drawn at the edge, with its number


@dataclass(frozen=True)
class Bar:
    """A height and the ends of its 95 % interval, None where it has none.

    Args:
        value, low, high: in the unit of the axis.
        whole: what the bar is a part of, drawn above it; None for none.
        text: the number under it; the value where it is empty.
    """

    value: float
    low: float | None = None
    high: float | None = None
    whole: float | None = None
    text: str = ""

    @property
    def top(self) -> float:
        return max(self.value, self.high or self.value, self.whole or self.value)


@dataclass(frozen=True)
class Mark:
    """A published value: what the legend calls it, and the paper whose mark it wears."""

    value: float
    paper: str
    legend: str


@dataclass(frozen=True)
class Band:
    """A published range, or a level where both ends are one; legend: whose it is."""

    low: float
    high: float
    legend: str


Marks: TypeAlias = Mapping[tuple[Row, Choice], Sequence[Mark]]


def draw_bars(
    measured: Selection,
    rows: Sequence[Row],
    systems: Sequence[Choice],
    bar: Callable[[Row, Choice], Bar | None],
    why: Callable[[Row, Choice], str],
    marks: Marks,
    ylabel: str,
    title: str,
    line: float | None = None,
    legend: bool = True,
    starred: Collection[Row] = (),
    base: float = 0.0,
    bands: Sequence[Band] = (),
    handles: Sequence[Patch] = (),
    remark: str = "",
) -> Figure:
    """A figure of bars.

    Args:
        measured: the records that are shown, for labels and looks.
        rows, systems: a group of bars each, and the bars of a group.
        bar: of a cell; None where it has none.
        why: what stands in the place of a bar.
        marks: published values.
        ylabel, title: words.
        line: a level to draw.
        legend: whether a legend names the systems.
        starred: rows with a * at their label.
        base: where bars begin.
        bands: published ranges, over all rows.
        handles: further entries of the legend.
        remark: a note under the bars.
    """

    def empty(row: Row, system: Choice) -> bool:
        return bar(row, system) is None and why(row, system) == NOT_MEASURED and not marks.get((row, system))

    is_narrow = width() < PAGE
    placed = {row: places(systems, partial(empty, row), 0 if is_narrow else FEW) for row in rows}
    if is_narrow and any(others for _, others in placed.values()):
        remark = " ".join(filter(None, [remark, ABSENT.format("bar")]))
    if is_narrow:
        placed = {row: (own, "") for row, (own, _) in placed.items()}
    # The legend names no system without a place; hatches are as if it had one.
    named = [system for system in systems if any(system in own for own, _ in placed.values())]
    widths = {row: len(own) + bool(others) + GAP for row, (own, others) in placed.items()}
    panels = packed([max(LEAST, widths[row]) for row in rows], SLOTS * width() / PAGE)
    widest = max(sum(widths[rows[i]] for i in panel) for panel in panels)
    faces = _faces(marks)
    bars = {(row, s): height for row in rows for s in systems if (height := bar(row, s)) is not None}
    texts = {cell: height.text or number(height.value) for cell, height in bars.items()}
    room = (width() - BESIDE) / widest
    longest = max((inches(text, TINY) for text in texts.values()), default=0.0)
    is_upright = longest > APART * room
    highest = max((b.top for b in bars.values()), default=1.0)
    published = [mark.value for row in rows for s in systems for mark in marks.get((row, s), ())]
    ends = [end for band in bands for end in (band.low, band.high)]
    reach = max([highest, line or 0, *ends, *(m for m in published if m <= ABOVE * highest)])
    panel_height = (PANEL if width() == PAGE else PANEL_OF_COLUMN) + (longest if is_upright else 0.0)
    lowest = min([b.low or b.value for b in bars.values()] + published + ends, default=base) if base else base
    margin = MARGIN * (reach - min(lowest, base))
    low, high = lowest - margin if lowest < base else base, reach + margin
    if any(mark > high for mark in published):
        high *= 1.15  # a row of marks at the edge
    high = high if high > low else low + 1.0  # all are zero
    size = width(), panel_height * len(panels) + 0.75
    figure, grid = plt.subplots(len(panels), 1, figsize=size, squeeze=False, layout="constrained")
    for panel, axes in zip(panels, grid[:, 0], strict=True):
        shown = [rows[i] for i in panel]
        # A panel that is not full keeps the width of a bar.
        axes.set_xlim(-0.5 - GAP / 2, widest - 0.5 - GAP / 2)
        axes.set_ylim(low, high)
        for band in bands:
            _band(axes, band)
        begin, middles = 0.0, []
        bars_by_place: dict[float, Bar] = {}
        for row in shown:
            own, others = placed[row]
            middles.append(begin + (len(own) + bool(others) - 1) / 2)
            for place, system in enumerate(own):
                x = begin + place
                if (height := bars.get((row, system))) is not None:
                    bars_by_place[x] = height
                    _bar(axes, x, height, look(system, measured.among), base)
                    _number(axes, x, texts[row, system], is_upright)
                else:
                    note(axes, why(row, system), (x, low), (0, 2), rotation=90, ha="center", va="bottom")
                for mark in marks.get((row, system), ()):
                    _mark(axes, x, mark, high, faces[mark.paper, mark.legend])
            if others:
                note(axes, others, (begin + len(own), low), (0, 2), rotation=90, ha="center", va="bottom")
            begin += widths[row]
        _whiskers(axes, bars_by_place)
        labels = zip(shown, measured.row_labels(shown, rows), strict=True)
        axes.set_xticks(
            middles, [wrapped(text, room * widths[row] - ASIDE) + (" *" if row in starred else "") for row, text in labels]
        )
        # The labels stand under the numbers.
        pad = 2 * UNDER + (POINTS * longest if is_upright else TINY)
        axes.tick_params(axis="x", length=0, pad=pad, labelsize=TINY if width() < PAGE else SMALL)
        axes.grid(False, axis="x")
        if line is not None:
            axes.axhline(line, color=INK, linewidth=0.7, zorder=2.5)
        axes.set_ylabel(ylabel)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    _legend(figure, named if legend else (), measured.among, marks, title, bands, handles)
    foot(figure, remark)
    if inches(ylabel, FONT) > LOW:
        # Only now is it known how high the axes are.
        figure.draw_without_rendering()
        for axes in grid[:, 0]:
            high = axes.get_window_extent().height / figure.dpi
            axes.set_ylabel("\n".join(broken(ylabel, high, FONT)))
    return figure


def packed(widths: Sequence[float], most: float = SLOTS) -> list[range]:
    """The places of consecutive groups on as few panels as `most` allows, the widest of them as narrow as it can be."""

    def cut(limit: float) -> list[range]:
        panels, begin, filled = [], 0, 0.0
        for i, wide in enumerate(widths):
            if i > begin and filled + wide > limit:
                panels.append(range(begin, i))
                begin, filled = i, 0.0
            filled += wide
        return [*panels, range(begin, len(widths))]

    fewest = len(cut(most))
    sums = sorted(sum(widths[i:j]) for i in range(len(widths)) for j in range(i + 1, len(widths) + 1))
    return next(panels for limit in sums if len(panels := cut(limit + 1e-9)) <= fewest)


def _number(axes: Axes, x: float, text: str, is_upright: bool) -> None:
    """Under a bar, clear of hatches, whiskers and marks: at a whisker's end it would read as the whisker's."""
    under: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "rotation": 90 if is_upright else 0, "bbox": None}
    note(axes, text, (x, 0), (0, -UNDER), ha="center", va="top", color=INK, **under)


def number(value: float) -> str:
    """Three digits that mean something, or all before the point: 0.97, 17.2, 412."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def _bar(axes: Axes, x: float, bar: Bar, style: Look, base: float) -> None:
    shared: Any = {"linewidth": 0.3, "zorder": 2, "width": 0.92}
    axes.bar(x, bar.value - base, bottom=base, color=style.colour, hatch=style.hatch, edgecolor="white", **shared)
    if bar.whole is not None:
        axes.bar(x, bar.whole - bar.value, bottom=bar.value, color=REST, hatch="//", edgecolor="0.6", **shared)


def _whiskers(axes: Axes, bars: Mapping[float, Bar]) -> None:
    """The intervals of bars by their places, in one artist: one each would make a report much larger."""
    ends = [(x, bar.value, bar.low, bar.high) for x, bar in bars.items() if bar.low is not None and bar.high is not None]
    if not ends:
        return
    xs, values, lows, highs = map(np.array, zip(*ends, strict=True))
    thin: dict[str, Any] = {"fmt": "none", "ecolor": INK, "elinewidth": 0.8, "capsize": 1.4, "capthick": 0.8}
    _, caps, lines = axes.errorbar(xs, values, yerr=[values - lows, highs - values], **thin)
    for zorder, parts in ((3, lines), (3.1, caps)):
        for part in parts:
            part.set(path_effects=HALO, zorder=zorder)


def _band(axes: Axes, band: Band) -> None:
    if band.low < band.high:
        axes.axhspan(band.low, band.high, color="0.9", zorder=0.5, linewidth=0)
    for end in {band.low, band.high}:
        axes.axhline(end, color=INK, linewidth=0.8, linestyle="--", zorder=1.5)


def _faces(marks: Marks) -> dict[tuple[str, str], str]:
    """The face of the marks of a paper and a legend, in the order of the legend."""
    faces: dict[tuple[str, str], str] = {}
    for mark in chain.from_iterable(marks.values()):
        before = sum(paper == mark.paper for paper, _ in faces)
        faces.setdefault((mark.paper, mark.legend), FACES[before % len(FACES)])
    return faces


def _published(paper: str, face: str) -> dict[str, Any]:
    """How the marks of a paper look."""
    return {
        "marker": PAPERS.get(paper, "o"),
        "markersize": 4,
        "markerfacecolor": face,
        "markeredgecolor": "black",
        "linestyle": "none",
    }


def _mark(axes: Axes, x: float, mark: Mark, high: float, face: str) -> None:
    style = _published(mark.paper, face)
    if mark.value <= high:
        axes.plot(x, mark.value, zorder=4, clip_on=False, **style)
        return
    axes.plot(x, high * 0.93, zorder=4, **style)
    arrow = {"arrowstyle": "-|>", "mutation_scale": 5, "linewidth": 0.6, "color": INK}
    axes.annotate("", (x, high), (x, high * 0.955), arrowprops=arrow, zorder=4, annotation_clip=False)
    note(axes, f"{mark.value:g}", (x, high * 0.93), (4, 0), color=INK)


def _legend(
    figure: Figure,
    systems: Sequence[Choice],
    among: Sequence[Choice],
    marks: Marks,
    title: str,
    bands: Sequence[Band],
    more: Sequence[Patch],
) -> None:
    handles: list[Patch | Line2D] = []
    for system in systems:
        style = look(system, among)
        handles.append(
            Patch(facecolor=style.colour, hatch=style.hatch, edgecolor="white", linewidth=0.3, label=label(system))
        )
    for (paper, legend), face in _faces(marks).items():
        handles.append(Line2D([], [], label=written(legend), **_published(paper, face)))
    handles += [Line2D([], [], color=INK, linewidth=0.8, linestyle="--", label=written(band.legend)) for band in bands]
    handles += more
    if handles:
        above(figure, handles, title)
    else:
        figure.suptitle(written(title), fontsize=FONT)


def wrapped(text: str, most: float = 1.1) -> str:
    """A model's name as people write it, over several lines where it is longer than `most` inches."""
    lines = [broken(written(line), most, TINY if width() < PAGE else SMALL, (WORDS, DASHES)) for line in text.split("\n")]
    return "\n".join(line for part in lines for line in part)
