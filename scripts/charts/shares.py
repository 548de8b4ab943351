"""Shares of a call's time: how long the GPU is idle, and how long the critical path is beside all kernels."""

from results.cell import Choice
from results.selection import NoResults, Row, Selection, latency_of

from .bars import Bar, draw_bars
from .chart import Chart
from .limits import limits_by_row
from .style import house


def draw_idle(measured: Selection) -> Chart:
    """The share of a call in which no kernel runs, %, by model and system. Raises NoResults where no record tells of it."""

    limits = limits_by_row(measured)

    def bar(row: Row, system: Choice) -> Bar | None:
        latency = measured.part(row, system, latency_of)
        if latency is None or row not in limits:
            return None
        host = latency.host
        return Bar(*(100 * max(0.0, 1 - limits[row].busy_ms / ms) for ms in (host.median, *host.ci95)))

    rows = [row for row in measured.rows if any(bar(row, s) for s in measured.systems)]
    if not rows:
        raise NoResults("no record has both a latency and the time of its kernels")
    rows.sort(key=lambda row: -max(share.value for s in measured.systems if (share := bar(row, s)) is not None))
    with house():
        figure = draw_bars(
            *(measured, rows, measured.systems, bar),
            lambda row, system: measured.missing(row, system, latency_of),
            *({}, "time in which the GPU is idle, %", measured.title_of(rows)),
            top=100.0,
        )
    caption = (
        "The share of a call in which no kernel runs: all but the sum of the kernels' own times. The line on a bar is the "
        "95 % interval that the latency leaves it."
    )
    return Chart("idle", "Idle time of the GPU", caption, figure)


def draw_critical_path(measured: Selection) -> Chart:
    """The critical path over the sum of all kernels, %, by model. Raises NoResults where no record tells of it."""
    limits = limits_by_row(measured)
    if not limits:
        raise NoResults("no record holds a critical path")
    shares = {row: of.critical_path_ms / of.busy_ms for row, of in limits.items()}
    rows = sorted(limits, key=lambda row: (row[1], shares[row]))
    with house():
        figure = draw_bars(
            *(measured, rows, [Choice("the model", "the model")], lambda row, _: Bar(100 * shares[row])),
            *(lambda row, system: "", {}, "critical path / GPU active time, %", measured.title_of(rows)),
            top=100.0,
            legend=False,
        )
    caption = (
        "The critical path, the longest chain of dependent operators at their own times, over the sum of all kernels: at "
        "50 % a schedule with every stream it wants could halve the latency. It is the model's, not a system's."
    )
    return Chart("critical_path", "Critical path over the GPU's active time", caption, figure)
