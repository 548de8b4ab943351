"""The charts of an exhibit."""

from collections.abc import Callable, Sequence
from functools import partial

from results.finding import Finding
from results.selection import NoResults, Place
from scripts.charts import active_warps, blocks, claims, search, shares
from scripts.charts.chart import Chart
from scripts.plot import CHARTS, draw_all
from scripts.timeline import draw as draw_timelines

from .evidence import Evidence, place_in
from .findings import published_speedups
from .judgement import stands
from .preset import Preset

OWN: dict[str, Callable[..., Chart]] = {
    "idle": shares.draw_idle,
    "critical_path": shares.draw_critical_path,
    "blocks": blocks.draw,
    "active_warps": active_warps.draw,
}


def pictures(preset: Preset, evidence: Evidence, judged: Sequence[Finding]) -> tuple[dict[str, Chart], dict[str, str]]:
    """The charts by file name, the preset's own first, and why some of them are not there."""
    charts: dict[str, Chart] = {}
    refused: dict[str, str] = {}
    if evidence.measured is not None:
        own = OWN | ({"search": partial(search.draw, cold=_searched(evidence))} if preset.cold else {})
        of_plot = [name for name in preset.charts if (name in CHARTS or "." in name) and name not in own]
        charts, refused = draw_all(evidence.measured, of_plot, preset.baseline, published_speedups(preset))
        for name in preset.charts:
            if name in own:
                try:
                    charts[name] = own[name](evidence.measured)
                except NoResults as error:
                    refused[name] = str(error)
        charts = dict(sorted(charts.items(), key=lambda drawn: preset.charts.index(drawn[0].partition("-")[0])))
    if evidence.timelines:
        caption = "Each stream a row, each operator a bar: red where it is bound by arithmetic, blue by memory."
        charts["timeline"] = Chart("timeline", preset.title, caption, draw_timelines(evidence.timelines))
    try:
        charts["claims"] = claims.draw(
            judged, preset.name.partition("/")[0], f"{preset.title}; {evidence.place}", stands(preset, evidence)
        )
    except NoResults as error:
        refused["claims"] = str(error)
    return charts, refused


def _searched(evidence: Evidence) -> dict[Place, float]:
    """Seconds of each search that left a schedule file."""
    files = evidence.schedules.items()
    return {place_in(cell): file.search.seconds for cell, file in files if file.search.seconds is not None}
