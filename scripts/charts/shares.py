"""Shares of a call's time: how long the GPU is idle, and how long the critical path is beside all kernels."""

from .bars import Bar, draw_bars
from .chart import Chart
from .limits import limits_of
from .measured import Measured, NoResults, Row
from .style import house


def draw_idle(measured: Measured) -> Chart:
    """The share of a call in which no kernel runs, %, by model and system. Raises NoResults where no record tells of it."""

    def bar(row: Row, system: str) -> Bar | None:
        record, limits = measured.record(row, system, "latency"), limits_of(measured, row)
        if record is None or record["status"] != "ok" or limits is None:
            return None
        statistics = record["latency"]["statistics"]["host"]
        median, (low, high) = statistics["median"], statistics["ci95"]
        return Bar(*(100 * max(0.0, 1 - limits[1] / latency) for latency in (median, low, high)))

    rows = [row for row in measured.rows if any(bar(row, s) for s in measured.systems)]
    if not rows:
        raise NoResults("no record has both a latency and the time of its kernels")
    rows.sort(key=lambda row: -max(found.value for s in measured.systems if (found := bar(row, s)) is not None))
    with house():
        figure = draw_bars(
            *(measured, rows, measured.systems, bar),
            lambda row, system: measured.missing(row, system, "latency"),
            *({}, "time in which the GPU is idle, %", measured.title_of(rows)),
            top=100.0,
        )
    caption = (
        "The share of a call in which no kernel runs: all but the sum of the kernels' own times. The line on a bar is the "
        "95 % interval that the latency leaves it."
    )
    return Chart("idle", "Idle time of the GPU", caption, figure)


def draw_critical_path(measured: Measured) -> Chart:
    """The critical path over the sum of all kernels, %, by model. Raises NoResults where no record tells of it."""
    limits = {row: found for row in measured.rows if (found := limits_of(measured, row)) is not None}
    if not limits:
        raise NoResults("no record holds a critical path")
    rows = sorted(limits, key=lambda row: (row[1], limits[row][0] / limits[row][1]))
    with house():
        figure = draw_bars(
            *(measured, rows, ["the model"], lambda row, _: Bar(100 * limits[row][0] / limits[row][1])),
            *(lambda row, system: "", {}, "critical path / GPU active time, %", measured.title_of(rows)),
            top=100.0,
            legend=False,
        )
    caption = (
        "The critical path, the longest chain of dependent operators at their own times, over the sum of all kernels: at "
        "50 % a schedule with every stream it wants could halve the latency. It is the model's, not a system's."
    )
    return Chart("critical_path", "Critical path over the GPU's active time", caption, figure)
