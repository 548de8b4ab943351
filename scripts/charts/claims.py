"""A paper's figures beside ours, a line each: open marks are the paper's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from results.finding import (
    CANNOT,
    DIRECTION,
    DOES_NOT_HOLD,
    EXCEEDS,
    HOLDS,
    IN_PART,
    IN_WORDS,
    JUDGED,
    NOT_COMPARABLE,
    UNDECIDED,
    Finding,
)
from results.published.value import WHOSE
from results.selection import NoResults

from .chart import Chart
from .names import written
from .style import (
    FAINT,
    INK,
    PAGE,
    PAPERS,
    PARTS,
    POINTS,
    SIDES,
    SMALL,
    TINY,
    WORDS,
    above,
    broken,
    house,
    inches,
    note,
    set_log,
    width,
)

LINE = 0.17  # inches of height, a figure
FURTHER = 0.65  # of that, each further line of words beside it
MOST_LABEL = 0.48  # of the width, a line of what a figure is of
MARGIN = 0.3  # inches that are neither of the axes nor of those words
ASIDE = 8  # points between a mark and words beside it
NARROW = 4  # an axis over less than this factor is linear: a logarithmic one would have few ticks
TITLES = {"nimble": "Nimble", "ios": "IOS", "opara": "Opara", "windtunnel": "WindTunnel", "orca": "Orca"}
SIGNED = ("AUC", "tau")  # units of what may be below 0
AXES = {
    **{"x": "times", "G": "10⁹ multiply-accumulates", "M": "millions", "B": "billions"},
    **{"AUC": "difference of AUC", "tau": "rank correlation (Kendall's tau)"},
}
# Told apart by their fill as well, so that print without colours keeps them.
COLOURS = {
    HOLDS: "#0b7a4b",
    EXCEEDS: "#2266b8",
    IN_PART: "#e0a100",
    DIRECTION: "#a8650c",
    DOES_NOT_HOLD: "#b3261e",
    UNDECIDED: "#6b4fa0",
    NOT_COMPARABLE: "#707a8a",
    CANNOT: "#707a8a",
}
FILLS = {
    HOLDS: "full",
    EXCEEDS: "top",
    IN_PART: "left",
    DIRECTION: "bottom",
    DOES_NOT_HOLD: "none",
    UNDECIDED: "none",
    NOT_COMPARABLE: "right",
    CANNOT: "full",
}


@dataclass(frozen=True)
class _Line:
    """A figure as it is drawn, its words broken to the room that they have.

    Args:
        finding: the figure.
        what: the lines of its label.
        reason: the lines that say why it was not measured.
        right: whether these stand right of the mark.
        height: in lines.
        at: its middle, in lines from the top.
    """

    finding: Finding
    what: list[str]
    reason: list[str]
    right: bool
    height: float
    at: float


def draw(findings: Sequence[Finding], paper: str, title: str, stands: bool = True) -> Chart:
    """A panel for each unit.

    Args:
        findings: the figures.
        paper: whose mark they wear.
        title: of the chart.
        stands: whether our figures say how the paper's stand. A CPU's say so of counts alone, which are of a graph.

    Raises:
        NoResults: none was measured.
    """
    if not any(finding.ours is not None for finding in findings):
        raise NoResults("none of the paper's figures was measured")
    units = list(dict.fromkeys(finding.unit for finding in findings))
    panels = {unit: [finding for finding in findings if finding.unit == unit] for unit in units}
    with house():
        labels = {
            finding.what: broken(_label(finding), MOST_LABEL * width(), SMALL, (SIDES, WORDS, PARTS)) for finding in findings
        }
        widest = max(inches(line, SMALL) for lines in labels.values() for line in lines)
        room = width() - widest - MARGIN
        limits = {unit: _limits(part, unit) for unit, part in panels.items()}
        lines = {unit: _lines(part, labels, limits[unit], room) for unit, part in panels.items()}
        heights = [sum(line.height for line in shown) + 1.2 for shown in lines.values()]
        figure, grid = plt.subplots(
            *(len(units), 1),
            figsize=(width(), LINE * sum(heights) + 0.42 * len(units) + 0.6),
            height_ratios=heights,
            squeeze=False,
            layout="constrained",
        )
        for axes, (unit, shown) in zip(grid[:, 0], lines.items(), strict=True):
            _panel(axes, shown, limits[unit], unit, paper, stands)
        shape = PAPERS.get(paper, "o")
        hollow: dict[str, Any] = {
            "linestyle": "none",
            "markersize": 7,
            "markerfacecolor": "white",
            "markeredgecolor": "black",
        }
        numbers = [finding for finding in findings if finding.rule not in IN_WORDS]
        whose = dict.fromkeys(WHOSE.get(finding.source, "paper") for finding in numbers)
        by_eye = ", ≈ read off a figure" if any(finding.is_by_eye for finding in findings) else ""
        label = f"{TITLES.get(paper, paper)} {' or '.join(whose)}{by_eye}"
        handles = [Line2D([], [], marker=shape, label=label, **hollow)] if numbers else []
        standing = [finding for finding in findings if finding.ours is not None and (stands or finding.rule == "count")]
        in_order = (*JUDGED, UNDECIDED, NOT_COMPARABLE)
        verdicts = [verdict for verdict in in_order if any(finding.verdict == verdict for finding in standing)]
        handles += [Line2D([], [], label=f"here: {verdict}", **_look(verdict)) for verdict in verdicts]
        if any(finding.ours is not None for finding in findings if finding not in standing):
            handles.append(Line2D([], [], label="here, not on a GPU", **_look(CANNOT)))
        above(figure, handles, title)
    caption = (
        "The paper's figures (open marks) and ours (round, a cross where undecided) with their 95 % intervals, which may be "
        "narrower than the mark. What was not measured says why."
    )
    return Chart("claims", "The paper's figures beside ours", caption, figure)


def _look(verdict: str) -> dict[str, Any]:
    """A round mark, whose fill says the verdict too; a cross where that is undecided."""
    colour = COLOURS[verdict]
    return {
        "linestyle": "none",
        "marker": "x" if verdict == UNDECIDED else "o",
        "markersize": 4.2,
        "color": colour,
        "fillstyle": FILLS[verdict],
        "markeredgecolor": colour,
        "markerfacecoloralt": "white",
    }


def _label(finding: Finding) -> str:
    """What a figure is of, with both numbers."""
    text = written(finding.what)
    if finding.ours is None:
        return text
    if finding.rule in IN_WORDS:
        return f"{text} ({_number(finding.ours)} here)"
    if finding.words:
        return f"{text} ({finding.words}, {_number(finding.ours)} here)"
    whose = "released" if finding.is_released else "published"
    return f"{text} ({_number(finding.published)} {whose}, {_number(finding.ours)} here)"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _limits(findings: Sequence[Finding], unit: str) -> tuple[float, float]:
    """The ends of an axis, which has a 0 where the paper has one."""
    if unit in SIGNED or any(finding.published == 0 for finding in findings):
        ends = [v for f in findings for v in (f.published, 0.0, *_extent(f))]
        margin = 0.06 * (max(ends) - min(ends)) or 0.01
        return min(ends) - margin, max(ends) + margin
    shown = [v for f in findings for v in (f.published, *_extent(f)) if v > 0]
    margin = max(1.15, (max(shown) / min(shown)) ** 0.06)  # that marks at the ends of a long axis need too
    low, high = min(shown) / margin, max(shown) * margin
    if unit == "x":
        low, high = min(low, 0.9), max(high, 1.1)
    return low, high


def _extent(finding: Finding) -> tuple[float, ...]:
    """From the lower end of our interval to the upper; empty where nothing was measured."""
    return (*finding.bounds, finding.ours) if finding.ours is not None else ()


def _is_log(low: float, high: float) -> bool:
    return low > 0 and high / low > NARROW


def _lines(
    findings: Sequence[Finding], labels: Mapping[str, list[str]], limits: tuple[float, float], room: float
) -> list[_Line]:
    """From the top. room: inches that the axes are wide."""
    low, high = limits
    lines: list[_Line] = []
    for finding in findings:
        reason: list[str] = []
        right = True
        if finding.ours is None:
            part = (finding.published - low) / (high - low)
            if _is_log(low, high):
                part = log(finding.published / low) / log(high / low)
            right = part <= 0.5
            reason = broken(written(finding.reason), max(part, 1 - part) * room - ASIDE / POINTS, TINY)
        height = 1 + FURTHER * (max(len(labels[finding.what]), len(reason)) - 1)
        end = lines[-1].at + lines[-1].height / 2 if lines else -0.5
        lines.append(_Line(finding, labels[finding.what], reason, right, height, end + height / 2))
    return lines


def _panel(axes: Axes, lines: Sequence[_Line], limits: tuple[float, float], unit: str, paper: str, stands: bool) -> None:
    low, high = limits
    if _is_log(low, high):
        set_log(axes, "x", low, high, 8 if width() == PAGE else 5)
    else:
        axes.set_xlim(low, high)
    axes.set_ylim(lines[-1].at + lines[-1].height / 2 + 0.1, -0.6)
    for line in lines:
        finding, place = line.finding, line.at
        marker: dict[str, Any] = {"markersize": 7, "markerfacecolor": "white", "markeredgecolor": "black", "zorder": 3}
        if finding.rule not in IN_WORDS:
            axes.plot(finding.published, place, marker=PAPERS.get(paper, "o"), linestyle="none", **marker)
            if finding.is_by_eye:
                note(axes, "≈", (finding.published, place), (0, 0), ha="center", color=INK, bbox=None, zorder=5)
        if finding.ours is None:
            offset, ha = ((ASIDE, 0), "left") if line.right else ((-ASIDE, 0), "right")
            note(axes, "\n".join(line.reason), (finding.published, place), offset, ha=ha)
            continue
        shown = max(finding.ours or 0.0, low)
        if finding.rule not in IN_WORDS:
            axes.plot([finding.published, shown], [place, place], color="0.75", linewidth=0.8, zorder=1.5)
        look = _look(finding.verdict if stands or finding.rule == "count" else CANNOT)
        axes.plot(shown, place, zorder=4, **look)
        if (finding.ours or 0.0) < low:  # a 0, which a logarithmic axis has no place for
            note(axes, f"← {finding.ours:g}", (shown, place), (ASIDE, 0), ha="left", color=INK)
        if (bounds := finding.bounds)[0] < bounds[1]:
            axes.hlines(place, *bounds, color=look["color"], linewidth=1.4, zorder=3)
    axes.set_yticks([line.at for line in lines], ["\n".join(line.what) for line in lines], fontsize=SMALL)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_xlabel(AXES.get(unit, unit), color=INK)
    if unit in ("x", *SIGNED):
        axes.axvline(1 if unit == "x" else 0, color=FAINT, linewidth=0.7, zorder=1)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
