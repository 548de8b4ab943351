"""How long it takes until a system can be called: the search for a schedule, and all of the preparation."""

from collections.abc import Mapping, Sequence

from matplotlib.lines import Line2D

from results.cell import Choice, named
from results.record import Record
from results.selection import NoResults, Place, Row, Selection

from .chart import Chart
from .dots import Dot, draw_dots
from .style import INK, house

EAGER = named("system", "eager")
LEAST = 1e-4  # seconds; what takes less is drawn here


def draw(measured: Selection, cold: Mapping[Place, float] | None = None) -> Chart:
    """Seconds, logarithmic; filled marks are the search of the systems that schedule.

    Args:
        measured: the records.
        cold: seconds of searches that knew of none before, which alone are drawn. Searches of records read what others had
            measured. None for the records' own.

    Raises:
        NoResults: nothing was prepared.
    """

    def dots(row: Row, system: Choice) -> Sequence[Dot]:
        if cold is not None:
            return (Dot(max(cold[*row, system], LEAST)),) if (*row, system) in cold else ()
        if (record := measured.part(row, system, _prepared)) is None:
            return ()
        whole = Dot(max((record.preparation_s or 0.0) + (record.learning_s or 0.0), LEAST), filled=False)
        search = record.schedule.search if record.schedule is not None else None
        if search is None or search.seconds is None or (search.measured == 0 and search.simulated is None):
            return (whole,)
        return whole, Dot(max(search.seconds, LEAST))

    # Eager prepares nothing.
    systems = [s for s in measured.systems if s != EAGER and any(measured.part(row, s, _prepared) for row in measured.rows)]
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
    are_filled = {dot.filled for row in rows for system in systems for dot in dots(row, system)}
    with house():
        figure = draw_dots(
            *(measured, rows, systems, dots),
            lambda row, system: measured.missing(row, system, _prepared),
            "seconds until the first call" if cold is None else "seconds of a search that knows of none before",
            measured.title_of(rows),
            legend=[kind for kind, is_filled in zip(kinds, (True, False), strict=True) if is_filled in are_filled],
        )
    if cold is not None:
        caption = "The search for a schedule, each with nothing known of any before. One measurement of each."
        return Chart("search", "Search for a schedule", caption, figure)
    caption = (
        "Preparation: what a system learns, and then from the module to what can be called, once for each model and shape "
        "(open), and of it the search for a schedule (filled), for systems that have one, unless it measured nothing anew. "
        "One measurement of each."
    )
    return Chart("search", "Search and preparation", caption, figure)


def _prepared(record: Record) -> Record | None:
    """A record that says how long the preparation took."""
    return record if record.preparation_s else None
