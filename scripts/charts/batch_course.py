"""Requests of an iteration and K/V slots in use over time, of one record of what serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from results.record import Record
from results.selection import NoResults, Selection
from results.serving import Iterations, Serving

from .chart import Chart
from .names import written
from .serving import size_of
from .style import COLOURS, FAINT, above, house, plain, width

NAME = "batch_course"
HEIGHT = 1.5  # inches, a panel
TICKS = 4
IDLE_S = 0.05  # between two iterations, over which a server has nothing to do: no scheduler takes as long
ROOM = 1.06  # of the largest value, above it
BOUND: dict[str, Any] = {"color": FAINT, "linestyle": ":", "linewidth": 0.9}


def records(measured: Selection) -> list[Record]:
    """The newest record of each cell whose server told of its iterations."""
    newest: dict[object, Record] = {}
    for record in measured.records:
        if record.is_ok and record.serving and any(trace.iterations.rows for trace in record.serving.traces):
            newest.setdefault(record.cell, record)
    return list(newest.values())


def draw(measured: Selection, number: int = 0) -> Chart:
    """The first trace of a record, a panel for requests and one for slots, over one scale of time.

    Args:
        measured: the records.
        number: of those of `records`, from 0.

    Raises:
        NoResults: none tells of iterations.
    """
    shown = records(measured)
    if not shown:
        raise NoResults("no record holds the iterations of what was served")
    record = shown[number]
    assert record.serving is not None
    num_slots, cell = record.serving.num_slots, record.cell
    iterations = _first(record.serving)
    with house():
        figure, (top, bottom) = plt.subplots(2, 1, figsize=(width(), 2 * HEIGHT + 0.6), sharex=True, layout="constrained")
        largest = size_of(cell.system)
        _panel(top, iterations, iterations.rows, "requests", largest)
        most = f", at most {largest}" if largest else ""
        top.set_title(written(f"{cell.system.label}, {cell.model.label}: requests of an iteration{most}"), loc="left")
        _panel(bottom, iterations, iterations.reserved_slots, "slots")
        bottom.set_title(f"K/V slots in use, of {num_slots:,}", loc="left")
        bottom.set_xlabel("seconds from the trace's begin")
        handles = [Line2D([], [], color=COLOURS[0], label="each iteration")]
        handles += [Line2D([], [], label="largest batch", **BOUND)] * bool(largest)
        above(figure, handles, measured.setting.label)
    caption = (
        "What each iteration of one trace had: requests of its batch, and K/V slots that requests held. A static batch "
        "that is packed falls in steps as its requests finish, and the next one begins after its last. Iteration-level "
        "scheduling fills places at once."
    )
    place = f"-{number + 1}" if len(shown) > 1 else ""
    return Chart(f"{NAME}{place}", "Serving: the course of batches", caption, figure)


def _first(serving: Serving) -> Iterations:
    """Of the first trace that has them."""
    return next(trace.iterations for trace in serving.traces if trace.iterations.rows)


def steps(iterations: Iterations, values: Sequence[int]) -> tuple[list[float], list[int]]:
    """Moments in s and values from each on: an iteration's until the next begins, and 0 where the server has none."""
    moments, held = [], []
    ends = zip(iterations.end_s, [*iterations.begin_s[1:], float("inf")], strict=True)
    for begin_s, value, (end_s, next_s) in zip(iterations.begin_s, values, ends, strict=True):
        moments.append(begin_s)
        held.append(value)
        if next_s - end_s > IDLE_S:
            moments.append(end_s)
            held.append(0)
    return moments, held


def _panel(axes: Axes, iterations: Iterations, values: Sequence[int], unit: str, bound: int = 0) -> None:
    moments, held = steps(iterations, values)
    axes.step(moments, held, where="post", color=COLOURS[0], linewidth=0.8)
    axes.set_ylabel(unit)
    axes.set_ylim(0, ROOM * max(bound, *held, 1))
    if bound:
        axes.axhline(bound, **BOUND)
    axes.set_xlim(0, moments[-1])
    axes.yaxis.set_major_locator(MaxNLocator(TICKS, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(plain))
