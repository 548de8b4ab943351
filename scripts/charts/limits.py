"""How far each system is from the critical path: latency over it, beside the busy time."""

from collections.abc import Sequence
from dataclasses import dataclass

from results.cell import Choice
from results.selection import NoResults, Row, Selection, latency_of

from .chart import Chart
from .dots import Dot, Sign, draw_dots
from .style import house

PATH, BUSY = "critical path", "busy time: every operator in turn"


def draw(measured: Selection) -> Chart:
    """Latency divided by the critical path, logarithmic. Raises NoResults where no record has both."""
    limits = limits_by_row(measured)
    systems = measured.systems

    def dots(row: Row, system: Choice) -> Sequence[Dot]:
        if (latency := measured.part(row, system, latency_of)) is None:
            return ()
        path = limits[row].critical_path_ms
        low, high = latency.host.ci95
        return (Dot(latency.host.median / path, low / path, high / path),)

    def nearest(row: Row) -> float:
        return min(dot.value for s in systems for dot in dots(row, s))

    rows = [row for row in limits if any(dots(row, s) for s in systems)]
    if not rows:
        raise NoResults("no record has both a latency and a critical path")
    rows.sort(key=lambda row: (row[1], nearest(row), row[0]))
    with house():
        figure = draw_dots(
            measured,
            rows,
            systems,
            dots,
            lambda row, system: measured.missing(row, system, latency_of),
            "latency / critical path",
            measured.title_of(rows),
            lambda row: (Sign(1.0, PATH), Sign(limits[row].busy_ms / limits[row].critical_path_ms, BUSY, ":")),
        )
    caption = (
        "Host latency (median and 95 % interval of single calls) over the critical path: the longest chain of dependent "
        "operators, each at its own measured time. No schedule of these kernels is faster, so what lies right of the line "
        "is what a better schedule could still win; a system left of it runs fewer or faster kernels. The dotted line is "
        "the busy time, all operators one after another: a system right of it also waits for the host."
    )
    return Chart("limits", "Distance to the critical path", caption, figure)


@dataclass(frozen=True)
class ModelLimits:
    """Milliseconds of a model at a batch; the same for every system.

    Args:
        critical_path_ms: the longest chain of dependent operators.
        busy_ms: all operators, one after the other.
    """

    critical_path_ms: float
    busy_ms: float


def limits_of(measured: Selection, row: Row) -> ModelLimits | None:
    for system in measured.systems:
        limits = measured.part(row, system, lambda record: record.limits)
        if limits is not None and limits.critical_path_ms:
            return ModelLimits(limits.critical_path_ms, limits.busy_ms or 0.0)
    return None


def limits_by_row(measured: Selection) -> dict[Row, ModelLimits]:
    """The limits of each row that has some."""
    return {row: limits for row in measured.rows if (limits := limits_of(measured, row)) is not None}
