"""Warps in flight over one call, by system."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from results.course import Course
from results.record import ActiveWarps, Record
from results.selection import NoResults, Selection

from .chart import Chart
from .names import written
from .style import FAINT, INK, PAGE, SMALL, above, house, look, plain, width

HEIGHT = 1.35  # inches, a panel
ROOM = 1.12  # of the highest course, above it
TICKS = 4
MEAN: dict[str, Any] = {"linestyle": "--", "linewidth": 1.3}


def draw(measured: Selection) -> Chart:
    """A panel for each system, with one scale of time and one of warps for all of a model.

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
    with house():
        figure, grid = plt.subplots(
            *(len(shown), 1), figsize=(width(), HEIGHT * len(shown) + 0.75), squeeze=False, layout="constrained"
        )
        for axes, (row, system) in zip(grid[:, 0], shown, strict=True):
            siblings = [course for (other, _), course in courses.items() if other == row]
            axes.set_xlim(0, max(course.duration for course in siblings))
            axes.set_ylim(0, ROOM * max(1.0, *(max(course.warps) for course in siblings)))
            batch = f", batch {row[1]}" if len(measured.batches) > 1 else ""
            axes.set_title(written(f"{system}, {row[0]}{batch}"), loc="left", pad=3)
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
        handles = [
            Patch(facecolor=INK, alpha=0.35, label="one call, estimated from its kernels"),
            Line2D([], [], color=INK, label="mean over a call", **MEAN),
        ]
        above(figure, handles, measured.title_of(rows))
    caption = (
        "Warps that the whole GPU has in flight over one call, the shortest of a few. Their course is estimated from the "
        "timeline of kernels: each keeps all the warps that its occupancy allows it for as long as it runs, which rather is "
        "more than the hardware counts. Dashed: the mean over a call, from hardware counters through Nsight Compute or of "
        "that estimate, as it says; the two are not comparable. One measurement of each, so there are no intervals."
    )
    return Chart("active_warps", "Active warps over a call", caption, figure)


def with_course(record: Record) -> ActiveWarps | None:
    """The warps of a record where it holds their course too."""
    active = record.active_warps
    return active if active is not None and active.estimated_course is not None and active.estimated_course.warps else None


def _panel(axes: Axes, course: Course, active: ActiveWarps, colour: Any) -> None:
    axes.stairs(course.warps, course.moments, fill=True, color=colour, alpha=0.35, linewidth=0)
    axes.stairs(course.warps, course.moments, color=colour, linewidth=0.6)
    white = [Stroke(linewidth=3.0, foreground="white", alpha=0.8), Normal()]  # else the steps would swallow it
    axes.hlines(active.value or 0.0, 0, course.duration, color=colour, path_effects=white, **MEAN)
    words = f"mean {active.value:,.0f} ({active.source})"
    words += "" if active.source == "estimated" else f", of the estimate {course.mean:,.0f}"
    if width() < PAGE:
        axes.set_title(f"{axes.get_title(loc='left')}\n{words}", loc="left", pad=3)
    else:
        axes.set_title(words, loc="right", pad=3, fontsize=SMALL, color=INK)
