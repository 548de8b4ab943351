"""How single calls scatter: the distribution of each system's latency around its median, a panel for each model."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from results.cell import Choice
from results.selection import NoResults, Row, Selection, latency_of

from .chart import Chart
from .names import written
from .places import NOT_MEASURED, places
from .style import FONT, INK, above, house, label, look, note, plain, width

ACROSS = 2  # panels
PAGE = 14  # models
LINE = 0.15  # inches of height, a system
LEAST = 0.05  # of the median, that a panel shows at least to either side
FARTHEST = 0.6  # and at most
BESIDE = "axes fraction", "data"


def pages(measured: Selection) -> list[Selection]:
    """The measured, a page's models at a time."""
    parts = -(-len(measured.models) // PAGE)
    each = -(-len(measured.models) // parts)
    return [measured.only(models=measured.models[i : i + each]) for i in range(0, len(measured.models), each)]


def draw(measured: Selection, page: int | None = None) -> Chart:
    """Host latency of every call over the median. page: its number, of several. Raises NoResults for no latency at all."""
    systems = measured.systems
    rows = [row for row in measured.rows if any(measured.part(row, s, latency_of) is not None for s in systems)]
    if not rows:
        raise NoResults("no record holds a latency")
    with house():
        across = min(ACROSS, len(rows))
        down = -(-len(rows) // across)
        placed = [_places(measured, row) for row in rows]
        named = [system for system in systems if any(system in own for own, _ in placed)]
        lines = [len(own) + bool(others) for own, others in placed]
        tallest = [max(lines[i : i + across]) for i in range(0, len(rows), across)]
        heights = [LINE * (most + 0.6) + 0.42 for most in tallest]
        figure, grid = plt.subplots(
            *(down, across),
            figsize=(width(), sum(heights) + 0.7),
            height_ratios=heights,
            squeeze=False,
            layout="constrained",
        )
        for number, (axes, row) in enumerate(zip(grid.flat, rows, strict=False)):
            _panel(axes, measured, row, *placed[number], tallest[number // across])
        for axes in list(grid.flat)[len(rows) :]:
            axes.set_axis_off()
        for number, axes in enumerate(grid.flat):
            if number < len(rows) and number + across >= len(rows):
                axes.set_xlabel("latency / its median")
        handles: list[Artist] = []
        for system in named:
            style = look(system, measured.among)
            handles.append(Patch(facecolor=style.colour, hatch=style.hatch, edgecolor="white", label=label(system)))
        handles += [
            Patch(facecolor="0.6", label="10 % to 90 % of calls"),
            Line2D([], [], color="0.45", linewidth=1, label="1 % to 99 %"),
            Line2D([], [], color=INK, linewidth=2, label="median, 95 % interval"),
            Line2D([], [], linestyle="none", label="numbers: median, 99 %, in ms"),
        ]
        above(figure, handles, measured.title_of(rows))
    caption = (
        "Host latency of single calls, each ended by a synchronisation, divided by the median of its system. The box holds "
        "the calls from 10 % to 90 %, the thin line those from 1 % to 99 %, dots are the others, and the dark bar is the "
        "bootstrap 95 % interval of the median. Beside each: the median and the 99th percentile in milliseconds; an arrow "
        "tells the slowest call where it leaves the axis."
    )
    name = "latency" if page is None else f"latency-{page}"
    return Chart(name, "Scatter of the latency", caption, figure)


def _places(measured: Selection, row: Row) -> tuple[list[Choice], str]:
    def empty(system: Choice) -> bool:
        return measured.part(row, system, latency_of) is None and measured.missing(row, system, latency_of) == NOT_MEASURED

    return places(measured.systems, empty)


def _panel(axes: Axes, measured: Selection, row: Row, systems: list[Choice], others: str, lines: int) -> None:
    """lines: how many systems the panel has room for, as the one beside it."""
    (title,) = measured.row_labels([row]) if len(measured.batches) == 1 else (f"{row[0]}, batch {row[1]}",)
    axes.set_title(written(title), pad=3, fontsize=FONT)
    latencies = {s: latency for s in systems if (latency := measured.part(row, s, latency_of)) is not None}
    relative = {s: np.asarray(latency.host_ms) / latency.host.median for s, latency in latencies.items()}
    tails = [np.quantile(calls, [0.01, 0.99]) for calls in relative.values()]
    low = max(1 - FARTHEST, min(1 - LEAST, *(float(tail[0]) for tail in tails)) - 0.01)
    high = min(1 + FARTHEST, max(1 + LEAST, *(float(tail[1]) for tail in tails)) + 0.01)
    axes.set_xlim(low, high)
    axes.set_ylim(lines - 0.4, -0.6)
    axes.axvline(1, color="0.75", linewidth=0.7, zorder=1)
    for place, system in enumerate(systems):
        style = look(system, measured.among)
        if system not in latencies:
            note(axes, measured.missing(row, system, latency_of), (1, place), (3, 0))
            continue
        calls, statistics = relative[system], latencies[system].host
        p1, p10, p90, p99 = np.quantile(calls, [0.01, 0.1, 0.9, 0.99])
        axes.barh(
            place,
            p90 - p10,
            0.7,
            left=p10,
            color=style.colour,
            hatch=style.hatch,
            edgecolor="white",
            linewidth=0.3,
            zorder=2,
        )
        axes.hlines(place, p1, p99, color=style.colour, linewidth=1.0, zorder=2)
        outside = calls[(calls < p1) | (calls > p99)]
        axes.plot(outside, np.full(len(outside), place), ".", color=style.colour, markersize=2, zorder=2)
        start, end = (value / statistics.median for value in statistics.ci95)
        axes.plot([start, end], [place, place], color=INK, linewidth=2.4, solid_capstyle="butt", zorder=3)
        axes.vlines(1, place - 0.35, place + 0.35, color=INK, linewidth=0.8, zorder=3)
        text = f"{_ms(statistics.median)}, {_ms(statistics.p99)}"
        if calls.max() > high:
            text += f"  \N{RIGHTWARDS ARROW} {calls.max():.1f}x"
        note(axes, text, (1, place), (4, 0), xycoords=BESIDE, color=INK)
    if others:
        note(axes, others, (1, len(systems)), (3, 0))
    axes.set_yticks(range(len(systems)), [label(system) for system in systems])
    axes.tick_params(axis="y", length=0, pad=1)
    axes.grid(False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(plain))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _ms(value: float) -> str:
    """Three digits that mean something, or more before the point."""
    return f"{value:,.{max(0, 2 - int(np.floor(np.log10(value))))}f}"
