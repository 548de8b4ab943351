"""Memory: the peak over weights and inputs, by model and system."""

from collections.abc import Sequence

from results.calls import Memory
from results.cell import Choice
from results.record import Record
from results.selection import NoResults, Row, Selection

from .chart import Chart
from .dots import Dot, draw_dots
from .style import house

LEAST = 2**-4  # MiB; what holds less, or nothing, is drawn here


def draw(measured: Selection) -> Chart:
    """Peak MiB, logarithmic. Raises NoResults where no memory was measured."""

    memories = {
        (row, system): memory
        for row in measured.rows
        for system in measured.systems
        if (memory := measured.part(row, system, _memory)) is not None
    }

    def dots(row: Row, system: Choice) -> Sequence[Dot]:
        memory = memories.get((row, system))
        return () if memory is None else (Dot(max(memory.peak_bytes / 2**20, LEAST)),)

    def largest(row: Row) -> int:
        return max(memory.peak_bytes for (other, _), memory in memories.items() if other == row)

    rows = list(dict.fromkeys(row for row, _ in memories))
    if not rows:
        raise NoResults("no record holds a measurement of memory")
    rows.sort(key=lambda row: (row[1], -largest(row), row[0]))
    sources = {memory.source for memory in memories.values()}
    with house():
        figure = draw_dots(
            *(measured, rows, measured.systems, dots),
            lambda row, system: measured.missing(row, system, _memory),
            "peak memory over weights and inputs, MiB",
            measured.title_of(rows),
        )
    caption = (
        f"Peak memory over the model's weights and inputs ({', '.join(sorted(sources))}), in a process of its own. One "
        "measurement of each, so there are no intervals."
    )
    return Chart("memory", "Memory", caption, figure)


def _memory(record: Record) -> Memory | None:
    return record.memory
