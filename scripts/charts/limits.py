"""How far each system is from the critical path: latency over it, beside the busy time."""

from collections.abc import Sequence
from typing import Any

from .chart import Chart
from .dots import Dot, Sign, draw_dots
from .measured import Measured, NoResults, Record, Row
from .style import house

PATH, BUSY = "critical path", "busy time: every operator in turn"


def draw(measured: Measured) -> Chart:
    """Latency divided by the critical path, logarithmic. Raises NoResults where no record has both."""
    limits = {row: found for row in measured.rows if (found := limits_of(measured, row)) is not None}
    systems = measured.systems

    def latency(row: Row, system: str) -> dict[str, Any] | None:
        record = measured.record(row, system, "latency")
        return record["latency"]["statistics"]["host"] if record is not None and record["status"] == "ok" else None

    def dots(row: Row, system: str) -> Sequence[Dot]:
        if (found := latency(row, system)) is None:
            return ()
        path = limits[row][0]
        low, high = found["ci95"]
        return (Dot(found["median"] / path, low / path, high / path),)

    def nearest(row: Row) -> float:
        return min(found["median"] for s in systems if (found := latency(row, s)) is not None) / limits[row][0]

    rows = [row for row in limits if any(latency(row, s) is not None for s in systems)]
    if not rows:
        raise NoResults("no record has both a latency and a critical path")
    rows.sort(key=lambda row: (row[1], nearest(row), row[0]))
    with house():
        figure = draw_dots(
            measured,
            rows,
            systems,
            dots,
            lambda row, system: measured.missing(row, system, "latency"),
            "latency / critical path",
            measured.title_of(rows),
            lambda row: (Sign(1.0, PATH), Sign(limits[row][1] / limits[row][0], BUSY, ":")),
        )
    caption = (
        "Host latency (median and 95 % interval of single calls) over the critical path: the longest chain of dependent "
        "operators, each at its own measured time. No schedule of these kernels is faster, so what lies right of the line "
        "is what a better schedule could still win; a system left of it runs fewer or faster kernels. The dotted line is "
        "the busy time, all operators one after another: a system right of it also waits for the host."
    )
    return Chart("limits", "Distance to the critical path", caption, figure)


def limits_of(measured: Measured, row: Row) -> tuple[float, float] | None:
    """Critical path and busy time of a model and batch in ms; they are the model's, the same for every system."""
    for system in measured.systems:
        record: Record | None = measured.record(row, system, "limits")
        if record is not None and record["status"] == "ok" and record["limits"].get("critical_path_ms"):
            return record["limits"]["critical_path_ms"], record["limits"]["busy_ms"]
    return None
