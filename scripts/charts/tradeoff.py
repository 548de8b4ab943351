"""What a cheaper search costs: the latency of its schedule over the time of the search, both over those of one search."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import cos, radians, sin
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from results.selection import NoResults

from .chart import Chart
from .names import written
from .style import FAINT, INK, PAPERS, above, house, note, set_log, width

HEIGHT = 1.75  # inches, a panel
OURS = "#6c2400"
MARK, NAME = 7.0, (20.0, 12.0)  # pixels at 100 an inch, of a mark, and a name's width and height


@dataclass(frozen=True)
class Search:
    """One search.

    Args:
        name: its pruning: "3, 8".
        cost: its time over that of the search without pruning.
        latency: of its schedule, over that of the schedule of the search without pruning.
        text: both as they were measured.
    """

    name: str
    cost: float
    latency: float
    text: str


def draw(here: Mapping[str, Sequence[Search]], published: Mapping[str, Sequence[Search]], paper: str, setting: str) -> Chart:
    """A panel for each model.

    Args:
        here, published: by model.
        paper: whose the published ones are.
        setting: words of the machine.

    Raises:
        NoResults: nothing was measured.
    """
    if not here:
        raise NoResults("no search has both a time and a latency")
    searches = [one for by_model in (here, published) for of in by_model.values() for one in of]
    costs, latencies = [one.cost for one in searches], [one.latency for one in searches]
    span = max(latencies) - min(latencies) or 0.1
    with house():
        figure, grid = plt.subplots(
            *(len(here), 1), figsize=(width(), HEIGHT * len(here) + 0.7), squeeze=False, sharex=True, layout="constrained"
        )
        for axes, model in zip(grid[:, 0], here, strict=True):
            axes.set_title(written(model), pad=3)
            set_log(axes, "x", min(costs) / 1.5, max(costs) * 1.5)
            axes.set_ylim(min(latencies) - 0.12 * span, max(latencies) + 0.25 * span)
            of_paper = published.get(model, ())
            axes.plot(*_points(of_paper), marker=PAPERS[paper], linestyle="none", markerfacecolor="white", **_line("black"))
            axes.plot(*_points(here[model]), marker="o", linestyle="none", **_line(OURS))
            axes.set_ylabel("latency / that of\nr=3, s=8")
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        grid[-1, 0].set_xlabel("time of the search / that of r=3, s=8")
        theirs = f"{written(paper)} paper, V100, costs ≈ by eye (r, s)"
        handles = [
            Line2D([], [], marker="o", linestyle="none", label="here (r, s)", **_line(OURS)),
            Line2D([], [], marker=PAPERS[paper], linestyle="none", markerfacecolor="white", label=theirs, **_line("black")),
        ]
        above(figure, handles, setting)
        figure.draw_without_rendering()  # where marks lie is known once all is laid out
        for axes, model in zip(grid[:, 0], here, strict=True):
            _place_names(axes, [(here[model], INK, -90.0), (published.get(model, ()), FAINT, 90.0)])
    texts = "; ".join(f"{model}: {', '.join(one.text for one in of)}" for model, of in here.items())
    caption = (
        "Each mark is a search that a smaller r (units a group) or s (groups a stage) cuts short: what it takes, and what "
        f"its schedule takes, over those of r=3, s=8. Here latencies are compared in interleaved rounds: {texts}."
    )
    return Chart("tradeoff", "Latency over the cost of the search", caption, figure)


def _line(colour: str) -> dict[str, Any]:
    return {"color": colour, "linewidth": 0.7, "markersize": 4.5, "markeredgecolor": colour, "markeredgewidth": 0.8}


def _points(searches: Sequence[Search]) -> tuple[list[float], list[float]]:
    in_order = sorted(searches, key=lambda one: one.cost)
    return [one.cost for one in in_order], [one.latency for one in in_order]


def _place_names(axes: Axes, series: Sequence[tuple[Sequence[Search], str, float]]) -> None:
    """Beside each mark, where the fewest other marks and names lie.

    Args:
        series: searches, the colour of their names, and the angle that these are at where there is room, in degrees.
    """
    marks = [axes.transData.transform((one.cost, one.latency)) for searches, _, _ in series for one in searches]
    taken = [Bbox.from_bounds(x - MARK / 2, y - MARK / 2, MARK, MARK) for x, y in marks]
    inner = axes.bbox.padded(-1)
    for searches, colour, first in series:
        for one in searches:
            x, y = axes.transData.transform((one.cost, one.latency))
            boxes = []
            for away in (0, 45, -45, 90, -90, 135, -135, 180):  # the nearest to the first angle before the others
                angle = radians(first + away)
                middle = x + round(cos(angle)) * (NAME[0] + MARK) / 2, y + round(sin(angle)) * (NAME[1] + MARK) / 2
                boxes.append(Bbox.from_bounds(middle[0] - NAME[0] / 2, middle[1] - NAME[1] / 2, *NAME))
            best = min(boxes, key=lambda box: sum(_common(box, other) for other in taken) + _outside(inner, box))
            taken.append(best)
            to_points = 72 / axes.figure.dpi
            offset = ((best.x0 + best.x1) / 2 - x) * to_points, ((best.y0 + best.y1) / 2 - y) * to_points
            note(axes, one.name, (one.cost, one.latency), offset, ha="center", color=colour)


def _common(one: Bbox, other: Bbox) -> float:
    """The area that two boxes share."""
    part = Bbox.intersection(one, other)
    return float(part.width * part.height) if part is not None else 0.0


def _outside(outer: Bbox, inner: Bbox) -> float:
    """The area of a box that lies outside another."""
    return float(inner.width * inner.height) - _common(outer, inner)
