"""Shares of a call's time: how long the GPU is idle, and how long the critical path is beside all kernels."""

from collections.abc import Sequence

from matplotlib.patches import Patch

from results.cell import Choice
from results.selection import NoResults, Row, Selection, latency_of

from .bars import REST, Band, Bar, draw_bars
from .chart import Chart
from .limits import limits_by_row
from .style import OTHER, house


def draw_idle(measured: Selection, bands: Sequence[Band] = (), remark: str = "") -> Chart:
    """The shares of a call in which kernels run and in which none does, %, one on the other, by model and system.

    Args:
        measured: the records.
        bands: published shares of time in which kernels run.
        remark: a note under the bars.

    Raises:
        NoResults: no record tells of it.
    """

    limits = limits_by_row(measured)

    def bar(row: Row, system: Choice) -> Bar | None:
        latency = measured.part(row, system, latency_of)
        if latency is None or row not in limits:
            return None
        host = latency.host
        active, high, low = (100 * min(1.0, limits[row].busy_ms / ms) for ms in (host.median, *host.ci95))
        return Bar(active, low, high, whole=100.0, text=f"{100 - active:.0f}")

    rows = [row for row in measured.rows if any(bar(row, s) for s in measured.systems)]
    if not rows:
        raise NoResults("no record has both a latency and the time of its kernels")
    rows.sort(key=lambda row: min(share.value for s in measured.systems if (share := bar(row, s)) is not None))
    with house():
        figure = draw_bars(
            *(measured, rows, measured.systems, bar),
            lambda row, system: measured.missing(row, system, latency_of),
            *({}, "share of a call, %", measured.title_of(rows)),
            bands=bands,
            handles=[_rest("idle: no kernel runs (the number, %)")],
            remark=remark,
        )
    caption = (
        "The shares of a call in which kernels run, the sum of their own times (in colour), and in which none does (above "
        "it, and as a number). The line on a bar is the 95 % interval that the latency leaves it."
    )
    return Chart("idle", "Idle time of the GPU", caption, figure)


def draw_critical_path(measured: Selection, bands: Sequence[Band] = (), remark: str = "") -> Chart:
    """The critical path over the sum of all kernels, %, by model.

    Args:
        measured: the records.
        bands: published shares.
        remark: a note under the bars.

    Raises:
        NoResults: no record tells of it.
    """
    limits = limits_by_row(measured)
    if not limits:
        raise NoResults("no record holds a critical path")
    shares = {row: of.critical_path_ms / of.busy_ms for row, of in limits.items()}
    rows = sorted(limits, key=lambda row: (row[1], shares[row]))
    with house():
        figure = draw_bars(
            *(measured, rows, [Choice("the model", "the model")], lambda row, _: Bar(100 * shares[row], whole=100.0)),
            *(lambda row, system: "", {}, "share of the GPU's active time, %", measured.title_of(rows)),
            legend=False,
            bands=bands,
            handles=[Patch(color=OTHER.colour, label="critical path (the number, %)"), _rest("the rest")],
            remark=remark,
        )
    caption = (
        "The critical path, the longest chain of dependent operators at their own times, over the sum of all kernels: at "
        "50 % a schedule with every stream it wants could halve the latency. It is the model's, not a system's."
    )
    return Chart("critical_path", "Critical path over the GPU's active time", caption, figure)


def _rest(words: str) -> Patch:
    return Patch(facecolor=REST, hatch="//", edgecolor="0.6", linewidth=0.3, label=words)
