"""Speedup over one system: bars grouped by model, 95 % intervals, and the papers' values as marks."""

from collections.abc import Sequence

from results.published.value import Value

from .bars import Bar, Mark, draw_bars
from .chart import Chart
from .measured import Measured, NoResults, Row
from .style import house, short


def draw(measured: Measured, baseline: str = "eager", published: Sequence[Value] = ()) -> Chart:
    """published: speedups; those over this baseline, of a model, batch and system that are shown, are marked.

    Batches stand in their order, models in that of the largest speedup that was measured. Raises NoResults where no system
    shares rounds with the baseline.
    """
    systems = [system for system in measured.systems if system != baseline]
    ratios = {(row, s): r for row in measured.rows for s in systems if (r := measured.over(row, s, baseline)) is not None}
    rows = [row for row in measured.rows if any((row, s) in ratios for s in systems)]
    if not rows:
        told = ", ".join(map(short, systems))
        raise NoResults(f"nothing was measured in turn with {baseline}" + (f"; --baseline takes {told}" if told else ""))
    rows.sort(key=lambda row: (row[1], -max(ratios[row, s].ratio for s in systems if (row, s) in ratios), row[0]))

    def bar(row: Row, system: str) -> Bar | None:
        found = ratios.get((row, system))
        return Bar(found.ratio, found.low, found.high) if found is not None else None

    def why(row: Row, system: str) -> str:
        missing = measured.missing(row, system, "latency")
        measured_alone = missing == "not measured" and measured.record(row, system, "latency") is not None
        return "not in turn" if measured_alone else missing

    marks = published_marks(published, baseline, rows, systems)
    alone = [row for row in rows if not all(ratios[row, s].in_turn for s in systems if (row, s) in ratios)]
    starred = alone if any(ratio.in_turn for ratio in ratios.values()) else []
    left_out = [row for row in measured.rows if row not in rows]
    title = measured.title_of(rows) + (f"; {'* ' if starred else ''}measured alone" if alone else "")
    if left_out:
        title += f"; {len(left_out)} without {short(baseline)} left out"
    with house():
        figure = draw_bars(
            *(measured, rows, systems, bar, why, marks, f"speedup over {short(baseline)}", title),
            line=1.0,
            starred=starred,
        )
    in_turn = "systems measured in turn on one machine, in interleaved rounds. A bar is the median over rounds"
    not_in_turn = (
        "the ratio of the median latencies of systems each measured alone, since a profiler had been in these processes "
        "before their rounds and slowed them"
    )
    caption = (
        f"Speedup over {short(baseline)}: {in_turn if starred or not alone else not_in_turn}, the line on it the bootstrap "
        "95 % interval."
    )
    if starred:
        caption += f" Beside a *, some bars or all: {not_in_turn}."
    if left_out:
        names = ", ".join(label.replace("\n", ", ") for label in measured.row_labels(left_out, measured.rows))
        caption += f" Left out, where {short(baseline)} was not measured in turn: {names}."
    if marks:
        caption += (
            " Open marks are the papers' values, on the papers' GPUs (grey: those of a paper's further GPUs); "
            "one that would leave the axis has its number."
        )
    return Chart("speedup", f"Speedup over {short(baseline)}", caption, figure)


def published_marks(
    published: Sequence[Value], baseline: str, rows: Sequence[Row], systems: Sequence[str]
) -> dict[tuple[Row, str], list[Mark]]:
    """The published speedups over `baseline` of these rows and systems."""
    found: dict[tuple[Row, str], list[Mark]] = {}
    for value in published:
        if (
            value.metric != "speedup"
            or value.our_baseline != baseline
            or value.zoo_model is None
            or not value.batch.isdigit()
        ):
            continue
        row = value.zoo_model, int(value.batch)
        if row in rows and value.our_system in systems:
            mark = Mark(value.value, value.paper, ", ".join(filter(None, [f"{value.paper} paper", value.device])))
            found.setdefault((row, value.our_system), []).append(mark)
    return found
