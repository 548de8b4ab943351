"""A chart: a figure with the words around it."""

from dataclasses import dataclass

from matplotlib.figure import Figure


@dataclass(frozen=True)
class Chart:
    """A drawn chart.

    Args:
        name: a part of a file's name.
        title: for people.
        caption: how it is read, for the text beside it.
        figure: matplotlib's.
    """

    name: str
    title: str
    caption: str
    figure: Figure
