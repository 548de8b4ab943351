"""What every chart gives."""

from dataclasses import dataclass

from matplotlib.figure import Figure


@dataclass(frozen=True)
class Chart:
    """name: a part of a file's name. caption: how it is read, for the text beside it."""

    name: str
    title: str
    caption: str
    figure: Figure
