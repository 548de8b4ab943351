"""SM efficiency by model and system, from counters or estimated: never both in one chart."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from results.cell import Choice
from results.occupation import SmEfficiency
from results.published.value import Value
from results.record import Record
from results.selection import NoResults, Row, Selection

from .bars import Bar, Mark, draw_bars
from .chart import Chart
from .style import house

SOURCES = {
    "counters": "hardware counters, through Nsight Compute",
    "estimated": "estimated from the timeline of kernels, an upper bound while one runs",
}
NONE: Mapping[tuple[Row, Choice], Sequence[Value]] = MappingProxyType({})
WORDS = {"counters": "counted", "estimated": "estimated"}


def draw(
    measured: Selection, source: str, published: Mapping[tuple[Row, Choice], Sequence[Value]] = NONE, remark: str = ""
) -> Chart:
    """Bars by model and system.

    Args:
        measured: the records.
        source: "counters" or "estimated".
        published: shares in % by row and system, marked where the cell is shown.
        remark: a note under the bars.

    Raises:
        NoResults: nothing was measured that way.
    """
    (other,) = SOURCES.keys() - {source}

    def why(row: Row, system: Choice) -> str:
        if measured.part(row, system, from_source(other)) is not None:
            return WORDS[other]
        return measured.missing(row, system, lambda record: record.sm_efficiency)

    def bar(row: Row, system: Choice) -> Bar | None:
        efficiency = measured.part(row, system, from_source(source))
        return Bar(100 * efficiency.value) if efficiency is not None and efficiency.value is not None else None

    systems = measured.systems
    rows = [row for row in measured.rows if any(bar(row, s) is not None for s in systems)]
    if not rows:
        raise NoResults(f"no record holds an SM efficiency that was {WORDS[source]}")
    rows.sort(key=lambda row: (row[1], -max(share.value for s in systems if (share := bar(row, s)) is not None), row[0]))
    marks = {
        cell: [Mark(value.value, value.paper, f"{value.paper} paper, {value.device}") for value in values]
        for cell, values in published.items()
    }
    with house():
        figure = draw_bars(
            *(measured, rows, systems, bar, why, marks),
            "SM efficiency, %",
            f"{measured.title_of(rows)}; {WORDS[source]}",
            remark=remark,
        )
    caption = (
        f"SM efficiency, the share of time in which an SM has an active warp: {SOURCES[source]}. Counted and estimated "
        "values are not comparable, and stand in charts of their own; a word in a bar's place says where it has one of the "
        "other kind. One measurement of each, so there are no intervals."
    )
    return Chart(f"sm_efficiency-{source}", f"SM efficiency, {source}", caption, figure)


def from_source(source: str) -> Callable[[Record], SmEfficiency | None]:
    """What reads an SM efficiency that was measured one way."""

    def read(record: Record) -> SmEfficiency | None:
        efficiency = record.sm_efficiency
        return efficiency if efficiency and efficiency.source == source and efficiency.value is not None else None

    return read
