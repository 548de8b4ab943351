"""SM efficiency by model and system, from counters or estimated: never both in one chart."""

from .bars import Bar, draw_bars
from .chart import Chart
from .measured import Measured, NoResults, Row
from .style import house

SOURCES = {
    "counters": "hardware counters, through Nsight Compute",
    "estimated": "estimated from the timeline of kernels, an upper bound while one runs",
}
WORDS = {"counters": "counted", "estimated": "estimated"}


def draw(measured: Measured, source: str) -> Chart:
    """source: "counters" or "estimated". Raises NoResults where nothing was measured that way."""
    (other,) = SOURCES.keys() - {source}

    def share(row: Row, system: str, source: str = source) -> float | None:
        for record in measured.records_of(row, system):
            if record["status"] != "ok":
                return None
            efficiency = record.get("sm_efficiency") or {}
            if efficiency.get("source") == source and efficiency.get("value") is not None:
                return 100 * efficiency["value"]
        return None

    def why(row: Row, system: str) -> str:
        if share(row, system, other) is not None:
            return WORDS[other]
        return measured.missing(row, system, "sm_efficiency")

    def bar(row: Row, system: str) -> Bar | None:
        found = share(row, system)
        return None if found is None else Bar(found)

    systems = measured.systems
    rows = [row for row in measured.rows if any(share(row, s) is not None for s in systems)]
    if not rows:
        raise NoResults(f"no record holds an SM efficiency that was {WORDS[source]}")
    rows.sort(key=lambda row: (row[1], -max(found for s in systems if (found := share(row, s)) is not None), row[0]))
    with house():
        figure = draw_bars(
            *(measured, rows, systems, bar, why, {}),
            "SM efficiency, %",
            f"{measured.title_of(rows)}; {WORDS[source]}",
            top=100.0,
        )
    caption = (
        f"SM efficiency, the share of time in which an SM has an active warp: {SOURCES[source]}. Counted and estimated "
        "values are not comparable, and stand in charts of their own; a word in a bar's place says where it has one of the "
        "other kind. One measurement of each, so there are no intervals."
    )
    return Chart(f"sm_efficiency-{source}", f"SM efficiency, {source}", caption, figure)
