"""How long it takes until a system can be called: the search for a schedule, and all of the preparation."""

from collections.abc import Mapping, Sequence

from matplotlib.lines import Line2D

from .chart import Chart
from .dots import Dot, draw_dots
from .measured import Measured, NoResults, Record, Row
from .style import INK, house

LEAST = 1e-4  # seconds; what takes less is drawn here


def draw(measured: Measured, cold: Mapping[tuple[str, int, str], float] | None = None) -> Chart:
    """Seconds, logarithmic; filled: the search of those that schedule. Raises NoResults where nothing was prepared.

    cold: seconds of searches by model, batch and system, with nothing known of any before. Where given, these are drawn, and
    nothing else: what the records hold was found with what other searches had measured.
    """

    def prepared(row: Row, system: str) -> Record | None:
        record = measured.record(row, system, "preparation_s")
        return record if record is not None and record["status"] == "ok" else None

    def dots(row: Row, system: str) -> Sequence[Dot]:
        if cold is not None:
            return (Dot(max(cold[*row, system], LEAST)),) if (*row, system) in cold else ()
        if (record := prepared(row, system)) is None:
            return ()
        whole = Dot(max(record["preparation_s"], LEAST), filled=False)
        searched = (record.get("schedule") or {}).get("search")
        return (whole, Dot(max(searched["seconds"], LEAST))) if searched else (whole,)

    # Eager prepares nothing.
    systems = [s for s in measured.systems if s != "eager" and any(prepared(row, s) for row in measured.rows)]
    rows = [row for row in measured.rows if any(dots(row, s) for s in systems)]
    if not rows:
        raise NoResults("no record holds a time of preparation")

    def longest(row: Row) -> float:
        return max(dot.value for s in systems for dot in dots(row, s))

    rows.sort(key=lambda row: (row[1], -longest(row), row[0]))
    kinds = [
        Line2D([], [], marker="o", linestyle="none", markersize=4.5, color=INK, label="search for a schedule"),
        Line2D(
            [],
            [],
            marker="o",
            linestyle="none",
            markersize=4.5,
            color=INK,
            markerfacecolor="white",
            label="all of the preparation",
        ),
    ]
    with house():
        figure = draw_dots(
            *(measured, rows, systems, dots),
            lambda row, system: measured.missing(row, system, "preparation_s"),
            "seconds until the first call" if cold is None else "seconds of a search that knows of none before",
            measured.title_of(rows),
            legend=kinds if cold is None else kinds[:1],
        )
    if cold is not None:
        caption = "The search for a schedule, each with nothing known of any before. One measurement of each."
        return Chart("search", "Search for a schedule", caption, figure)
    caption = (
        "Preparation: from the module to what can be called, once for each model and shape (open), and of it the search for "
        "a schedule (filled), for systems that have one. One measurement of each, so there are no intervals."
    )
    return Chart("search", "Search and preparation", caption, figure)
