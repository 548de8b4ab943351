"""Blocks of a model one by one: in the stages of IOS, and one unit after the other."""

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from results.cell import named
from results.selection import NoResults, Selection

from .chart import Chart
from .names import written
from .style import above, foot, house, label, look, note, width

SEQUENTIAL, IOS = named("system", "sequential"), named("system", "ios")
HEIGHT = 1.8  # inches, a model
NOTE = "Under each block its units. Times are what the search measured of each block; the numbers are ratios of them."


def draw(measured: Selection, remark: str = "") -> Chart:
    """Milliseconds of each block of several units, a panel for each model.

    Args:
        measured: the records.
        remark: a note under the bars.

    Raises:
        NoResults: no search tells of any.
    """
    blocks_by_row = {}
    for row in measured.rows:
        schedule = measured.part(row, IOS, lambda record: record.schedule)
        blocks = [part for part in schedule.search.parts if part.units > 1 and part.milliseconds] if schedule else []
        if blocks:
            blocks_by_row[row] = blocks
    if not blocks_by_row:
        raise NoResults("no record of IOS tells of its blocks")
    with house():
        figure, grid = plt.subplots(
            *(len(blocks_by_row), 1),
            figsize=(width(), HEIGHT * len(blocks_by_row) + 0.4),
            squeeze=False,
            layout="constrained",
        )
        for axes, (row, blocks) in zip(grid[:, 0], blocks_by_row.items(), strict=True):
            for number, block in enumerate(blocks):
                in_turn, in_stages = block.sequential_milliseconds or 0.0, block.milliseconds or 0.0
                for offset, system, ms in ((-0.2, SEQUENTIAL, in_turn), (0.2, IOS, in_stages)):
                    axes.bar(
                        number + offset, ms, 0.38, color=look(system).colour, edgecolor="white", linewidth=0.3, zorder=2
                    )
                note(axes, f"{in_turn / in_stages:.2f}", (number, in_turn), (0, 4), ha="center", va="bottom")
            axes.set_xticks(range(len(blocks)), [f"{n}\n{block.units}" for n, block in enumerate(blocks, start=1)])
            axes.margins(y=0.15)
            axes.grid(False, axis="x")
            axes.set_ylabel("ms")
            axes.set_xlabel(written(f"block of {', batch '.join(map(str, row))}"))
            for side in ("top", "right", "left"):
                axes.spines[side].set_visible(False)
        handles = [Patch(facecolor=look(s).colour, label=label(s)) for s in (SEQUENTIAL, IOS)]
        above(figure, handles, measured.title_of(list(blocks_by_row)))
        foot(figure, " ".join(filter(None, [NOTE, remark])))
    caption = (
        "Each block of several units as the search measured it: its stages, and its units one after the other. The numbers "
        "are how many times as fast the stages are."
    )
    return Chart("blocks", "Block by block", caption, figure)
