"""Schedules that were each searched for one batch size, at all of them: a matrix here beside the paper's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import TypeAlias

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from results.selection import NoResults

from .chart import Chart
from .style import FONT, SMALL, foot, house, width

HEIGHT = 1.75  # inches
LIGHTEST, DARKEST = 0.93, 1.35  # times as long as a schedule of the batch's own takes
WHITE = 1.2  # from here on the text is white
Numbers: TypeAlias = Mapping[tuple[int, int], float]  # by the batch that runs and the batch that was searched for


@dataclass(frozen=True)
class Matrix:
    """What schedules take, and who measured it.

    Args:
        title: who.
        latency_ms: of a call.
        times: how many times as long it is as with the batch's own schedule.
    """

    title: str
    latency_ms: Numbers
    times: Numbers

    def share(self, run: int, of: int) -> float:
        """How many times as long as with the batch's own schedule; nan where that is not known."""
        return self.times.get((run, of), float("nan"))

    def text(self, run: int, of: int) -> str:
        """The latency over its share, or what there is of the two."""
        ms, share = self.latency_ms.get((run, of)), self.share(run, of)
        if isnan(share):
            return "not\nmeasured" if ms is None else f"{ms:.3g} ms\nno ratio"
        return f"{share:.2f}x" if ms is None else f"{ms:.3g} ms\n{share:.2f}x"


def draw(matrices: Sequence[Matrix], setting: str, remark: str = "") -> Chart:
    """A cell holds the latency and how many times as long that is as with the batch's own schedule.

    Args:
        matrices: ours first.
        setting: words of the machine.
        remark: a note under them.

    Raises:
        NoResults: no batch size ran with a schedule of another.
    """
    batches = sorted({run for run, _ in matrices[0].latency_ms})
    if not any(run != of for run, of in matrices[0].latency_ms):
        raise NoResults("no schedule ran at a batch size that it was not searched for")
    with house():
        size = width(), HEIGHT + 0.35
        figure, grid = plt.subplots(1, len(matrices), figsize=size, squeeze=False, sharey=True, layout="constrained")
        for axes, matrix in zip(grid[0], matrices, strict=True):
            _panel(axes, matrix, batches)
        grid[0, 0].set_ylabel("executed at batch")
        figure.suptitle(setting, fontsize=FONT)
        foot(figure, remark)
    caption = (
        "Milliseconds of a schedule that was searched for one batch size (columns) at each (rows), and how many times as "
        "long that is as with the schedule of its own, which is 1 on the diagonal. Here both are of interleaved rounds "
        "where there are some. Dark is slow."
    )
    return Chart("matrix", "Schedules at other batch sizes", caption, figure)


def _panel(axes: Axes, matrix: Matrix, batches: Sequence[int]) -> None:
    shades = [[matrix.share(run, of) for of in batches] for run in batches]
    axes.imshow(shades, cmap="Greys", vmin=LIGHTEST, vmax=DARKEST, aspect="auto")
    for row, run in enumerate(batches):
        for place, of in enumerate(batches):
            text = axes.text(place, row, matrix.text(run, of), ha="center", va="center", fontsize=SMALL)
            text.set_color("white" if shades[row][place] >= WHITE else "black")
            text.set_fontweight("bold" if run == of else "normal")
    axes.set_title(matrix.title, pad=3)
    axes.set_xticks(range(len(batches)), map(str, batches))
    axes.set_yticks(range(len(batches)), map(str, batches))
    axes.set_xlabel("searched for batch")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
