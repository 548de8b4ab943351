"""Blocks of a model one by one: in the stages that IOS found, and one unit after the other."""

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from .chart import Chart
from .measured import Measured, NoResults
from .style import WIDTH, above, house, look, note

SYSTEMS = {"sequential": "sequential_milliseconds", "ios": "milliseconds"}
HEIGHT = 2.3  # inches, a model


def draw(measured: Measured) -> Chart:
    """Milliseconds of each block of several units, a panel for each model. Raises NoResults where no search tells of any."""
    found = {}
    for row in measured.rows:
        record = measured.record(row, "ios", "schedule")
        search = (record or {}).get("schedule") or {}
        parts = [part for part in search.get("search", {}).get("parts", []) if part["units"] > 1 and "milliseconds" in part]
        if record is not None and record["status"] == "ok" and parts:
            found[row] = parts
    if not found:
        raise NoResults("no record of IOS tells of its blocks")
    with house():
        figure, grid = plt.subplots(
            *(len(found), 1), figsize=(WIDTH, HEIGHT * len(found) + 0.4), squeeze=False, layout="constrained"
        )
        for axes, (row, parts) in zip(grid[:, 0], found.items(), strict=True):
            for number, part in enumerate(parts):
                for offset, (system, key) in zip((-0.2, 0.2), SYSTEMS.items(), strict=True):
                    axes.bar(number + offset, part[key], 0.38, color=look(system).colour, edgecolor="white", linewidth=0.3)
                gain = part["sequential_milliseconds"] / part["milliseconds"]
                note(axes, f"{gain:.2f}x", (number, part["sequential_milliseconds"]), (0, 4), ha="center", va="bottom")
            axes.set_xticks(range(len(parts)), [f"{n}\n{part['units']} units" for n, part in enumerate(parts, start=1)])
            axes.margins(y=0.15)
            axes.grid(False, axis="x")
            axes.set_ylabel("ms")
            axes.set_xlabel(f"block of {', batch '.join(map(str, row))}")
            for side in ("top", "right", "left"):
                axes.spines[side].set_visible(False)
        above(figure, [Patch(facecolor=look(s).colour, label=s) for s in SYSTEMS], measured.title_of(list(found)))
    caption = (
        "Each block of several units as the search measured it: its stages, and its units one after the other. The numbers "
        "are how many times as fast the stages are."
    )
    return Chart("blocks", "Block by block", caption, figure)
