"""Memory: the peak over weights and inputs, by model and system."""

from collections.abc import Sequence

from .chart import Chart
from .dots import Dot, draw_dots
from .measured import Measured, NoResults, Record, Row
from .style import house

LEAST = 2**-4  # MiB; what holds less, or nothing, is drawn here


def draw(measured: Measured) -> Chart:
    """Peak MiB, logarithmic. Raises NoResults where no memory was measured."""

    def peak(row: Row, system: str) -> float | None:
        record: Record | None = measured.record(row, system, "memory")
        if record is None or record["status"] != "ok":
            return None
        return record["memory"]["peak_bytes"] / 2**20

    def dots(row: Row, system: str) -> Sequence[Dot]:
        found = peak(row, system)
        return () if found is None else (Dot(max(found, LEAST)),)

    rows = [row for row in measured.rows if any(peak(row, s) is not None for s in measured.systems)]
    if not rows:
        raise NoResults("no record holds a measurement of memory")
    rows.sort(key=lambda row: (row[1], -max(found for s in measured.systems if (found := peak(row, s)) is not None), row[0]))
    sources = {
        record["memory"]["source"]
        for row in rows
        for s in measured.systems
        if (record := measured.record(row, s, "memory")) is not None and record["status"] == "ok"
    }
    with house():
        figure = draw_dots(
            *(measured, rows, measured.systems, dots),
            lambda row, system: measured.missing(row, system, "memory"),
            "peak memory over weights and inputs, MiB",
            measured.title_of(rows),
        )
    caption = (
        f"Peak memory over the model's weights and inputs ({', '.join(sorted(sources))}), in a process of its own. One "
        "measurement of each, so there are no intervals."
    )
    return Chart("memory", "Memory", caption, figure)
