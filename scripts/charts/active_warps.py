"""Warps in flight over one call, by system."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from results.course import Course
from results.occupation import ActiveWarps
from results.record import Record
from results.selection import NoResults, Selection

from .chart import Chart
from .names import written
from .sm_efficiency import WORDS
from .style import FAINT, FONT, INK, PAGE, SMALL, above, broken, house, look, plain, width
from .style import WORDS as TEXT

HEIGHT = 1.35  # inches, a panel
ROOM = 1.12  # of the highest course, above it
TICKS = 4
BESIDE = 0.75  # inches beside the axes
# The words of a mean in the legend, and how its line looks, by where the mean is from.
MEANS: dict[str, tuple[str, dict[str, Any]]] = {
    "counters": ("mean of a call, counted by the hardware", {"linestyle": "--", "linewidth": 1.3}),
    "estimated": ("mean of that estimate", {"linestyle": ":", "linewidth": 1.3}),
}


def draw(measured: Selection) -> Chart:
    """A panel for each system, with one scale of time and one of warps for all of a model, which the title names if it is
    one.

    Raises:
        NoResults: no record holds a course.
    """
    cells = [(row, system) for row in measured.rows for system in measured.systems]
    active_by_cell = {cell: active for cell in cells if (active := measured.part(*cell, with_course)) is not None}
    courses = {cell: course for cell, active in active_by_cell.items() if (course := active.estimated_course) is not None}
    if not courses:
        raise NoResults("no record holds the course of warps over a call; force=true measures one that lacks it again")
    rows = list(dict.fromkeys(row for row, _ in courses))
    shown = [cell for cell in cells if cell[0] in rows]
    num_models = len({model for model, _ in rows})
    with house():
        figure, grid = plt.subplots(
            *(len(shown), 1), figsize=(width(), HEIGHT * len(shown) + 0.75), squeeze=False, layout="constrained"
        )
        for axes, (row, system) in zip(grid[:, 0], shown, strict=True):
            siblings = [course for (other, _), course in courses.items() if other == row]
            axes.set_xlim(0, max(course.duration for course in siblings))
            axes.set_ylim(0, ROOM * max(1.0, *(max(course.warps) for course in siblings)))
            model = f", {row[0]}" if num_models > 1 else ""
            batch = f", batch {row[1]}" if len(measured.batches) > 1 else ""
            axes.set_title(written(f"{system}{model}{batch}"), loc="left", pad=3)
            if (row, system) in courses:
                _panel(axes, courses[row, system], active_by_cell[row, system], look(system, measured.among).colour)
            else:
                missing = measured.missing(row, system, with_course)
                middle: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "va": "center"}
                axes.text(0.5, 0.5, missing, color=FAINT, backgroundcolor="white", **middle)
            axes.set_ylabel("warps")
            axes.yaxis.set_major_locator(MaxNLocator(TICKS, integer=True))
            axes.yaxis.set_major_formatter(FuncFormatter(plain))
            for side in ("top", "right", "left"):
                axes.spines[side].set_visible(False)
        grid[-1, 0].set_xlabel("milliseconds from the call's first kernel")
        sources = {active_by_cell[cell].source for cell in courses}
        handles: list[Artist] = [Patch(facecolor="0.7", edgecolor=INK, label="course of a call, estimated from its kernels")]
        handles += [Line2D([], [], color=INK, label=words, **line) for of, (words, line) in MEANS.items() if of in sources]
        above(figure, handles, measured.title_of(rows, with_model=True))
    caption = (
        "Warps that the whole GPU has in flight over one call, the shortest of a few. Their course is estimated from the "
        "timeline of kernels: each keeps all the warps that its occupancy allows it for as long as it runs, which rather is "
        "more than the hardware counts. Dashed: the mean of a call, from hardware counters through Nsight Compute; dotted: "
        "that of the estimate. The two are not comparable. One measurement of each, so there are no intervals."
    )
    return Chart("active_warps", "Active warps over a call", caption, figure)


def with_course(record: Record) -> ActiveWarps | None:
    """The warps of a record where it holds their mean and their course too."""
    active = record.active_warps
    if active is None or active.source is None or active.estimated_course is None or not active.estimated_course.warps:
        return None
    return active


def _panel(axes: Axes, course: Course, active: ActiveWarps, colour: Any) -> None:
    axes.stairs(course.warps, course.moments, fill=True, color=colour, alpha=0.35, linewidth=0)
    axes.stairs(course.warps, course.moments, color=colour, linewidth=0.6)
    white = [Stroke(linewidth=3.0, foreground="white", alpha=0.8), Normal()]  # else the steps would swallow it
    assert active.source is not None  # with_course leaves it out
    axes.hlines(active.value or 0.0, 0, course.duration, color=colour, path_effects=white, **MEANS[active.source][1])
    words = f"mean {active.value:,.0f} {WORDS[active.source]}"
    words += "" if active.source == "estimated" else f", {course.mean:,.0f} estimated"
    if width() < PAGE:
        lines = broken(f"{axes.get_title(loc='left')}: {words}", width() - BESIDE, FONT, (TEXT,))
        axes.set_title("\n".join(lines), loc="left", pad=3)
    else:
        axes.set_title(words, loc="right", pad=3, fontsize=SMALL, color=INK)
