"""The charts of an exhibit."""

from collections.abc import Sequence

from results.finding import Finding
from scripts.charts import blocks, claims, shares
from scripts.charts.chart import Chart
from scripts.charts.measured import NoResults
from scripts.plot import CHARTS, draw_all
from scripts.timeline import draw as draw_timelines

from .evidence import Evidence
from .judgement import stands
from .preset import Preset

OWN = {"idle": shares.draw_idle, "critical_path": shares.draw_critical_path, "blocks": blocks.draw}


def pictures(preset: Preset, evidence: Evidence, found: Sequence[Finding]) -> tuple[dict[str, Chart], dict[str, str]]:
    """The charts by file name, the preset's own first, and why some of them are not there."""
    charts: dict[str, Chart] = {}
    refused: dict[str, str] = {}
    if evidence.measured is not None:
        of_plot = [name for name in preset.charts if name in CHARTS]
        charts, refused = draw_all(evidence.measured, of_plot, preset.baseline, preset.rows)
        for name in preset.charts:
            if name in OWN:
                try:
                    charts[name] = OWN[name](evidence.measured)
                except NoResults as error:
                    refused[name] = str(error)
    if evidence.timelines:
        caption = "Each stream a row, each operator a bar: red where it is bound by arithmetic, blue by memory."
        charts["timeline"] = Chart("timeline", preset.title, caption, draw_timelines(evidence.timelines))
    try:
        charts["claims"] = claims.draw(
            found, preset.name.partition("/")[0], f"{preset.title}; {evidence.place}", stands(preset, evidence)
        )
    except NoResults as error:
        refused["claims"] = str(error)
    return charts, refused
