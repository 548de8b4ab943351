"""Speedup over one system: bars grouped by model, 95 % intervals, and the papers' values as marks."""

from collections.abc import Sequence

from results.cell import Choice, named
from results.published.value import BY_EYE, Value
from results.selection import NoResults, Row, Selection, latency_of

from .bars import Band, Bar, Mark, draw_bars
from .chart import Chart
from .style import house, label, short

EAGER = named("system", "eager")
NEAR = 0.7, 1.6  # ratios that all lie within are drawn from 1: bars from 0 would all look alike
SMALLEST, LARGEST = "speedup_min", "speedup_max"


def draw(
    measured: Selection,
    baseline: Choice = EAGER,
    published: Sequence[Value] = (),
    bands: Sequence[Band] = (),
    remark: str = "",
) -> Chart:
    """Batches stand in their order, models in that of their largest speedup.

    Args:
        measured: the records.
        baseline: the system that speedups are over.
        published: speedups, marked where they are over this baseline and of a cell that is shown.
        bands: published ranges of speedups over this baseline.
        remark: a note under the bars.

    Raises:
        NoResults: no system shares rounds with the baseline.
    """
    systems = [system for system in measured.systems if system != baseline]
    ratios = {(row, s): r for row in measured.rows for s in systems if (r := measured.over(row, s, baseline)) is not None}
    rows = [row for row in measured.rows if any((row, s) in ratios for s in systems)]
    if not rows:
        names = ", ".join(map(short, systems))
        raise NoResults(f"nothing was measured in turn with {baseline}" + (f"; --baseline takes {names}" if names else ""))
    rows.sort(key=lambda row: (row[1], -max(ratios[row, s].ratio for s in systems if (row, s) in ratios), row[0]))

    def bar(row: Row, system: Choice) -> Bar | None:
        ratio = ratios.get((row, system))
        return Bar(ratio.ratio, ratio.low, ratio.high) if ratio is not None else None

    def why(row: Row, system: Choice) -> str:
        has_latency = measured.part(row, system, latency_of) is not None
        return "not in turn" if has_latency else measured.missing(row, system, latency_of)

    marks = published_marks(published, baseline, rows, systems)
    rows_alone = [row for row in rows if not all(ratios[row, s].is_in_turn for s in systems if (row, s) in ratios)]
    starred = rows_alone if any(ratio.is_in_turn for ratio in ratios.values()) else []
    left_out = [row for row in measured.rows if row not in rows]
    title = measured.title_of(rows) + (f"; {'* ' if starred else ''}measured alone" if rows_alone else "")
    if left_out:
        title += f"; {len(left_out)} without {short(baseline)} left out"
    ends = [end for r in ratios.values() for end in (r.low, r.high)]
    ends += [mark.value for of_cell in marks.values() for mark in of_cell] + [end for b in bands for end in (b.low, b.high)]
    is_near = min(ends) > NEAR[0] and max(ends) < NEAR[1]
    with house():
        figure = draw_bars(
            *(measured, rows, systems, bar, why, marks, f"speedup over {label(baseline)}", title),
            line=1.0,
            starred=starred,
            base=1.0 if is_near else 0.0,
            bands=bands,
            remark=" ".join(filter(None, ["Bars begin at 1." if is_near else "", remark])),
        )
    in_turn = "systems measured in turn on one machine, in interleaved rounds. A bar is the median over rounds"
    not_in_turn = (
        "the ratio of the median latencies of systems each measured alone, since a profiler had been in these processes "
        "before their rounds and slowed them"
    )
    caption = (
        f"Speedup over {short(baseline)}: {in_turn if starred or not rows_alone else not_in_turn}, the line on it the "
        "bootstrap 95 % interval."
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
    published: Sequence[Value], baseline: Choice, rows: Sequence[Row], systems: Sequence[Choice]
) -> dict[tuple[Row, Choice], list[Mark]]:
    """The published speedups over `baseline` of these rows and systems."""
    marks: dict[tuple[Row, Choice], list[Mark]] = {}
    for value in published:
        if (
            value.metric != "speedup"
            or value.our_baseline != baseline
            or value.zoo_model is None
            or not value.batch.isdigit()
        ):
            continue
        row = value.zoo_model, int(value.batch)
        if row in rows and (system := value.our_system) is not None and system in systems:
            read_off = "≈ read off a figure" if value.source == BY_EYE else ""
            legend = ", ".join(filter(None, [value.whose, value.device, read_off]))
            mark = Mark(value.value, value.paper, legend)
            marks.setdefault((row, system), []).append(mark)
    return marks
