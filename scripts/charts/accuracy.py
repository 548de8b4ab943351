"""AUC of what learns from tables, and what each gains over the pipeline that it tunes."""

from collections.abc import Callable

from results.accuracy import Accuracy
from results.cell import Choice
from results.record import Record
from results.selection import NoResults, Row, Selection

from .chart import Chart
from .dots import Dot, Sign, draw_dots
from .style import house


def draw(measured: Selection) -> Chart:
    """AUC with its 95 % interval. Raises NoResults where none was measured."""
    return _drawn(
        measured,
        "accuracy",
        "AUC",
        "area under the ROC curve on test rows",
        "The mean over seeds. Its 95 % interval is over draws of the test rows and of the seeds, and not for comparing "
        "systems: these see the same rows.",
        lambda part: Dot(part.auc, part.low, part.high),
    )


def draw_gain(measured: Selection) -> Chart:
    """AUC over the pipeline's with its 95 % interval. Raises NoResults where nothing was tuned."""

    def dot(part: Accuracy) -> Dot | None:
        return None if part.gain is None else Dot(part.gain, part.gain_low, part.gain_high)

    return _drawn(
        measured,
        "gain",
        "AUC over the pipeline's",
        "AUC over that of the pipeline",
        "The mean over seeds of the difference to the pipeline itself on the same test rows, with DeLong's 95 % interval of "
        "paired scores. At 0 nothing is gained.",
        dot,
        (Sign(0.0, "the pipeline itself"),),
    )


def _drawn(
    measured: Selection,
    name: str,
    title: str,
    xlabel: str,
    caption: str,
    dot: Callable[[Accuracy], Dot | None],
    signs: tuple[Sign, ...] = (),
) -> Chart:
    def part(record: Record) -> Dot | None:
        return None if record.accuracy is None else dot(record.accuracy)

    dots = {
        (row, system): shown
        for row in measured.rows
        for system in measured.systems
        if (shown := measured.part(row, system, part)) is not None
    }
    rows = [row for row in measured.rows if any(other == row for other, _ in dots)]
    systems = [system for system in measured.systems if any(other == system for _, other in dots)]
    if not rows:
        raise NoResults(f"no record holds {title}")

    def dots_of(row: Row, system: Choice) -> tuple[Dot, ...]:
        return (dots[row, system],) if (row, system) in dots else ()

    with house():
        figure = draw_dots(
            *(measured, rows, systems, dots_of),
            lambda row, system: measured.missing(row, system, part),
            xlabel,
            measured.title_of(rows),
            signs=lambda _: signs,
            is_linear=True,
        )
    return Chart(name, title, caption, figure)
