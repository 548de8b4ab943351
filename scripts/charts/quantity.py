"""Any quantity that a measurement describes by itself: bars by model and system, its unit on the axis."""

from results.cell import Choice
from results.selection import NoResults, Row, Selection, quantity_of

from .bars import Bar, draw_bars
from .chart import Chart
from .style import house


def draw(measured: Selection, name: str) -> Chart:
    """A bar for each cell that has the quantity.

    Args:
        measured: the records.
        name: of the quantity, "MEASUREMENT.NAME".

    Raises:
        NoResults: no record has a value of it; with the reasons that they give.
    """
    read = quantity_of(name)
    values = {
        (row, system): quantity
        for row in measured.rows
        for system in measured.systems
        if (quantity := measured.part(row, system, read)) is not None
    }
    if not values:
        reasons = measured.reasons_without(name)
        raise NoResults(f"no record holds a value of {name}{': ' if reasons else ''}{'; '.join(reasons)}")
    example = next(iter(values.values()))

    def bar(row: Row, system: Choice) -> Bar | None:
        quantity = values.get((row, system))
        return None if quantity is None else Bar(quantity.value or 0.0, quantity.low, quantity.high)

    rows = [row for row in measured.rows if any((row, system) in values for system in measured.systems)]
    with house():
        figure = draw_bars(
            *(measured, rows, measured.systems, bar),
            lambda row, system: measured.missing(row, system, read),
            *({}, example.title, measured.title_of(rows)),
        )
    sources = sorted({quantity.source for quantity in values.values() if quantity.source is not None})
    unit = f" in {example.unit}" if example.unit else ""
    caption = f"{example.heading[:1].upper()}{example.heading[1:]}{unit}; {_better(example.is_more_better)}"
    caption += f" ({', '.join(sources)})." if sources else "."
    if any(quantity.low is not None for quantity in values.values()):
        caption += " The line on a bar is the 95 % interval."
    return Chart(name, example.heading, caption, figure)


def _better(is_more_better: bool) -> str:
    return f"{'more' if is_more_better else 'less'} is better"
