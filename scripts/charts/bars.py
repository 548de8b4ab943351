"""Bars grouped by model, a bar a system, over as many rows of panels as stay legible."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from results.cell import Choice
from results.selection import Row, Selection

from .places import NOT_MEASURED, places
from .style import FONT, INK, PAPERS, WIDTH, Look, above, broken, inches, look, note, short

SLOTS = 50  # bars, and the gaps between groups, across a page
GAP = 0.9  # of a bar, between two groups
PANEL = 1.75  # inches of height
LOW = 1.15  # inches of height that every panel's axes have
# Of the marks of one paper, a face for each of its GPUs: the first is open.
FACES = ("white", "0.65", "0.35", "black")
ABOVE = 1.35  # a mark higher than so many times the highest bar of its panel is drawn at the edge, with its number


@dataclass(frozen=True)
class Bar:
    """A height and the ends of its 95 % interval, None where it has none."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Mark:
    """A published value: what the legend calls it, and the paper whose mark it wears."""

    value: float
    paper: str
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
    top: float | None = None,
    legend: bool = True,
    starred: Collection[Row] = (),
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
        top: the end of every panel's axis; None for what the bars need.
        legend: whether a legend names the systems.
        starred: rows with a * at their label.
    """

    def empty(row: Row, system: Choice) -> bool:
        return bar(row, system) is None and why(row, system) == NOT_MEASURED and not marks.get((row, system))

    placed = {row: places(systems, partial(empty, row)) for row in rows}
    # The legend names no system without a place; hatches are as if it had one.
    named = [system for system in systems if any(system in own for own, _ in placed.values())]
    width = {row: len(own) + bool(others) + GAP for row, (own, others) in placed.items()}
    panels = packed([width[row] for row in rows])
    widest = max(sum(width[rows[i]] for i in panel) for panel in panels)
    faces = _faces(marks)
    size = WIDTH, PANEL * len(panels) + 0.75
    figure, grid = plt.subplots(len(panels), 1, figsize=size, squeeze=False, layout="constrained")
    for panel, axes in zip(panels, grid[:, 0], strict=True):
        shown = [rows[i] for i in panel]
        # A panel that is not full keeps the width of a bar.
        axes.set_xlim(-0.5 - GAP / 2, widest - 0.5 - GAP / 2)
        bars = {(row, s): height for row in shown for s in systems if (height := bar(row, s)) is not None}
        highest = max((b.high or b.value for b in bars.values()), default=1.0)
        published = [mark.value for row in shown for s in systems for mark in marks.get((row, s), ())]
        high = top or 1.08 * max([highest, line or 0, *(m for m in published if m <= ABOVE * highest)])
        axes.set_ylim(0, high)
        begin, middles = 0.0, []
        for row in shown:
            own, others = placed[row]
            middles.append(begin + (len(own) + bool(others) - 1) / 2)
            for place, system in enumerate(own):
                x = begin + place
                if (height := bars.get((row, system))) is not None:
                    _bar(axes, x, height, look(system, measured.among))
                else:
                    note(axes, why(row, system), (x, 0), (0, 2), rotation=90, ha="center", va="bottom")
                for mark in marks.get((row, system), ()):
                    _mark(axes, x, mark, high, faces[mark.paper, mark.legend])
            if others:
                note(axes, others, (begin + len(own), 0), (0, 2), rotation=90, ha="center", va="bottom")
            begin += width[row]
        labels = zip(shown, measured.row_labels(shown, rows), strict=True)
        axes.set_xticks(middles, [wrapped(text) + (" *" if row in starred else "") for row, text in labels])
        axes.tick_params(axis="x", length=0, pad=2)
        axes.grid(False, axis="x")
        if line is not None:
            axes.axhline(line, color=INK, linewidth=0.7, zorder=2.5)
        axes.set_ylabel(ylabel)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    _legend(figure, named if legend else (), measured.among, marks, title)
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
        for i, width in enumerate(widths):
            if i > begin and filled + width > limit:
                panels.append(range(begin, i))
                begin, filled = i, 0.0
            filled += width
        return [*panels, range(begin, len(widths))]

    fewest = len(cut(most))
    sums = sorted(sum(widths[i:j]) for i in range(len(widths)) for j in range(i + 1, len(widths) + 1))
    return next(panels for limit in sums if len(panels := cut(limit + 1e-9)) <= fewest)


def _bar(axes: Axes, x: float, bar: Bar, style: Look) -> None:
    axes.bar(x, bar.value, 0.92, color=style.colour, hatch=style.hatch, edgecolor="white", linewidth=0.3, zorder=2)
    if bar.low is not None and bar.high is not None:
        errors = [[bar.value - bar.low], [bar.high - bar.value]]
        axes.errorbar(x, bar.value, yerr=errors, fmt="none", ecolor=INK, elinewidth=0.8, capsize=1.4, capthick=0.8, zorder=3)


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
) -> None:
    handles: list[Patch | Line2D] = []
    for system in systems:
        style = look(system, among)
        handles.append(
            Patch(facecolor=style.colour, hatch=style.hatch, edgecolor="white", linewidth=0.3, label=short(system))
        )
    for (paper, label), face in _faces(marks).items():
        handles.append(Line2D([], [], label=label, **_published(paper, face)))
    if handles:
        above(figure, handles, title)
    else:
        figure.suptitle(title, fontsize=FONT)


def wrapped(text: str, most: int = 15) -> str:
    """A model's name over two lines where it is long, at an underscore."""
    lines = []
    for line in text.split("\n"):
        cut = line.rfind("_", 0, most) + 1 if len(line) > most else 0
        lines += [line[:cut], line[cut:]] if cut > 1 else [line]
    return "\n".join(lines)
