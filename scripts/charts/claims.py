"""A paper's figures beside ours, a line each: open marks are the paper's."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from results.finding import CANNOT, DOES_NOT_HOLD, HOLDS, IN_PART, IN_WORDS, VERDICTS, Finding

from .chart import Chart
from .measured import NoResults
from .style import FAINT, INK, PAPERS, SMALL, WIDTH, above, house, note, set_log

LINE = 0.17  # inches of height, a figure
MOST_REASON = 60  # letters
NARROW = 4  # an axis over less than this factor is linear: a logarithmic one would have few ticks
TITLES = {"nimble": "Nimble", "ios": "IOS", "opara": "Opara"}
AXES = {"x": "times", "G": "10⁹ multiply-accumulates"}
# Told apart by their fill as well, so that print without colours keeps them.
COLOURS = {HOLDS: "#0b7a4b", IN_PART: "#e0a100", DOES_NOT_HOLD: "#b3261e", CANNOT: "#707a8a"}
FILLS = {HOLDS: "full", IN_PART: "left", DOES_NOT_HOLD: "none", CANNOT: "full"}


def draw(findings: Sequence[Finding], paper: str, title: str, stands: bool = True) -> Chart:
    """A panel for each unit. stands: whether what was measured says how the figures stand; a CPU does not of a GPU's, but
    for counts, which are of a graph.

    Raises NoResults where none was measured.
    """
    if not any(finding.ours is not None for finding in findings):
        raise NoResults("none of the paper's figures was measured")
    units = list(dict.fromkeys(finding.unit for finding in findings))
    panels = {unit: [finding for finding in findings if finding.unit == unit] for unit in units}
    heights = [len(found) + 1.2 for found in panels.values()]
    with house():
        figure, grid = plt.subplots(
            *(len(units), 1),
            figsize=(WIDTH, LINE * sum(heights) + 0.42 * len(units) + 0.6),
            height_ratios=heights,
            squeeze=False,
            layout="constrained",
        )
        for axes, (unit, found) in zip(grid[:, 0], panels.items(), strict=True):
            _panel(axes, found, unit, paper, stands)
        shape = PAPERS.get(paper, "o")
        hollow: dict[str, Any] = {
            "linestyle": "none",
            "markersize": 7,
            "markerfacecolor": "white",
            "markeredgecolor": "black",
        }
        numbers = any(finding.rule not in IN_WORDS for finding in findings)
        handles = [Line2D([], [], marker=shape, label=f"{TITLES.get(paper, paper)} paper", **hollow)] if numbers else []
        standing = [finding for finding in findings if stands or finding.rule == "count"]
        there = [verdict for verdict in VERDICTS[:3] if any(finding.verdict == verdict for finding in standing)]
        handles += [Line2D([], [], label=f"here: {verdict}", **_look(verdict)) for verdict in there]
        if any(finding.ours is not None for finding in findings if finding not in standing):
            handles.append(Line2D([], [], label="here, not on a GPU", **_look(CANNOT)))
        above(figure, handles, title)
    caption = (
        "The paper's figures (open marks) and ours (round) with their 95 % intervals, which may be narrower than the mark. "
        "What was not measured says why."
    )
    return Chart("claims", "The paper's figures beside ours", caption, figure)


def _look(verdict: str) -> dict[str, Any]:
    """A round mark, whose fill says the verdict too."""
    colour = COLOURS[verdict]
    return {
        "linestyle": "none",
        "marker": "o",
        "markersize": 4.2,
        "color": colour,
        "fillstyle": FILLS[verdict],
        "markeredgecolor": colour,
        "markerfacecoloralt": "white",
    }


def _panel(axes: Axes, findings: Sequence[Finding], unit: str, paper: str, stands: bool) -> None:
    shown = [v for f in findings for v in (f.published, f.ours, f.low, f.high) if v is not None and v > 0]
    low, high = min(shown) / 1.15, max(shown) * 1.15
    if unit == "x":
        low, high = min(low, 0.9), max(high, 1.1)
    if high / low > NARROW:
        set_log(axes, "x", low, high)
    else:
        axes.set_xlim(low, high)
    axes.set_ylim(len(findings) - 0.4, -0.6)
    for place, finding in enumerate(findings):
        marker: dict[str, Any] = {"markersize": 7, "markerfacecolor": "white", "markeredgecolor": "black", "zorder": 3}
        if finding.rule not in IN_WORDS:
            axes.plot(finding.published, place, marker=PAPERS.get(paper, "o"), linestyle="none", **marker)
        if finding.verdict == CANNOT:
            reason = finding.reason if len(finding.reason) <= MOST_REASON else finding.reason[: MOST_REASON - 1] + "…"
            left = finding.published < ((low * high) ** 0.5 if high / low > NARROW else (low + high) / 2)
            offset = (8, 0) if left else (-8, 0)
            note(axes, reason, (finding.published, place), offset, ha="left" if left else "right")
            continue
        ours = max(finding.ours or 0.0, low)
        if finding.rule not in IN_WORDS:
            axes.plot([finding.published, ours], [place, place], color="0.75", linewidth=0.8, zorder=1.5)
        look = _look(finding.verdict if stands or finding.rule == "count" else CANNOT)
        axes.plot(ours, place, zorder=4, **look)
        if finding.low is not None and finding.high is not None and finding.high > finding.low:
            axes.hlines(place, finding.low, finding.high, color=look["color"], linewidth=1.4, zorder=3)
    axes.set_yticks(range(len(findings)), [finding.what for finding in findings], fontsize=SMALL)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_xlabel(AXES.get(unit, unit), color=INK)
    if unit == "x":
        axes.axvline(1, color=FAINT, linewidth=0.7, zorder=1)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
