"""Draws charts from results, each as PNG and SVG.

python scripts/plot.py [CHART ...] [--results FOLDER ...] [--output FOLDER]

Charts: speedup, throughput (over batch sizes), latency (its scatter), memory, sm_efficiency (counted and estimated values in
charts of their own), search (and preparation), limits (distance to the critical path); all that the results allow if none is
named. Systems that were measured on several machines, with several versions of torch or in several precisions have a set of
charts for each. A system whose output was incorrect has no speed in any chart.

    python scripts/plot.py --results results/reference/h200 --output charts
    python scripts/plot.py speedup --baseline cuda_graph --batches 1 --published nimble/figure7

Exit status 1 where a chart that was named cannot be drawn, 2 for a bad request.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("agg")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib.pyplot as plt

from results.published.value import Value
from results.published.values import NoSuchValue, exhibit
from scripts.arguments import Parser
from scripts.charts import latency, limits, memory, search, sm_efficiency, speedup, style, throughput
from scripts.charts.chart import Chart
from scripts.charts.measured import Measured, NoResults, by_setting, read
from scripts.charts.setting import Setting

RUNS = Path("results") / "runs"
CHARTS = ("speedup", "throughput", "latency", "memory", "sm_efficiency", "search", "limits")
SOURCES = tuple(sm_efficiency.SOURCES)
Drawing = Callable[[], Chart]


def drawings(name: str, measured: Measured, baseline: str, published: Sequence[Value]) -> list[Drawing]:
    """What draws the charts of a name: one, for SM efficiency one for each source, for many latencies one a page."""
    if name == "throughput":
        return [lambda: throughput.draw(measured)]
    if name == "sm_efficiency":
        return [partial(sm_efficiency.draw, measured, source) for source in SOURCES]
    if name == "latency":
        pages = latency.pages(measured)
        if len(pages) == 1:
            return [lambda: latency.draw(measured)]
        return [partial(latency.draw, page, number) for number, page in enumerate(pages, start=1)]
    if name == "speedup":
        return [lambda: speedup.draw(measured, baseline, published)]
    draw = {"memory": memory.draw, "search": search.draw, "limits": limits.draw}[name]
    return [lambda: draw(measured)]


def per_batch(name: str, measured: Measured) -> list[tuple[str, Measured]]:
    """The measured, by a suffix for the name of the file. A chart shows one batch, unless it is about several, or of the
    speedups of one model, whose batches stand beside each other.
    """
    if name == "throughput" or len(measured.batches) == 1 or (name == "speedup" and len(measured.models) == 1):
        return [("", measured)]
    return [(f"-b{batch}", measured.only(batches=[batch])) for batch in measured.batches]


def draw_all(
    measured: Measured, names: Sequence[str], baseline: str, published: Sequence[Value]
) -> tuple[dict[str, Chart], dict[str, str]]:
    """The charts by the name of their file, and why those that are not there cannot be drawn, by name."""
    charts: dict[str, Chart] = {}
    refused: dict[str, str] = {}
    for name in names:
        drawn, reason = 0, ""
        for suffix, part in per_batch(name, measured):
            for drawing in drawings(name, part, baseline, published):
                try:
                    chart = drawing()
                except NoResults as error:
                    reason = str(error)
                    continue
                charts[chart.name + suffix] = chart
                drawn += 1
        if not drawn:
            refused[name] = reason
    return charts, refused


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def names_of(text: str) -> list[str]:
    """ "nimble,nimble (multi_stream=false, fold=true)": commas part labels, but not inside parentheses."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return [name.strip() for name in found]


def add_selection(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what to show, which plot and report share."""
    parser.add_argument("--results", nargs="+", type=Path, default=[RUNS], metavar="FOLDER", help="records; results/runs")
    parser.add_argument("--baseline", default="eager", metavar="SYSTEM", help="what speedups are over; eager")
    parser.add_argument(
        *("--published", "-p"),
        nargs="+",
        default=[],
        metavar="PAPER/EXHIBIT",
        help="published speedups to mark in the chart of speedups: nimble/figure7",
    )
    parser.add_argument("--models", type=names_of, default=[], metavar="A,B", help="all if left out; so the next two")
    parser.add_argument("--systems", type=names_of, default=[], metavar="A,B")
    parser.add_argument("--batches", type=numbers, default=[], metavar="1,8")


def selected(arguments: argparse.Namespace) -> tuple[dict[Setting, Measured], list[Value]]:
    """What the arguments of add_selection ask for. Raises NoResults and NoSuchValue."""
    published = [value for source in arguments.published for value in exhibit(source)]
    chosen, reason = {}, None
    for setting, measured in by_setting(read(arguments.results)).items():
        try:
            chosen[setting] = measured.only(
                arguments.models, arguments.systems, arguments.batches, always=[arguments.baseline]
            )
        except NoResults as error:  # one machine may lack what another has
            reason = error
    if not chosen:
        assert reason is not None
        raise reason
    return chosen, published


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("charts", nargs="*", metavar="CHART", help=", ".join(CHARTS))
    add_selection(parser)
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="charts/ in the first folder of results if left out")
    parser.add_argument("--formats", type=names_of, default=list(style.FORMATS), metavar="png,svg", help="pdf too")
    arguments = parser.parse_args()
    for name in arguments.charts:
        if name not in CHARTS:
            parser.error(f"no chart is named {name}: there is {', '.join(CHARTS)}")
    for suffix in arguments.formats:
        if suffix not in (*style.FORMATS, "pdf"):
            parser.error(f"--formats {suffix} is none of png, svg, pdf")
    try:
        settings, published = selected(arguments)
    except (NoResults, NoSuchValue) as error:
        parser.error(str(error))
    folder: Path = arguments.output or arguments.results[0] / "charts"
    missing = False
    for setting, measured in settings.items():
        place = f"-{setting.slug}" if len(settings) > 1 else ""
        charts, refused = draw_all(measured, arguments.charts or CHARTS, arguments.baseline, published)
        for name, chart in charts.items():
            for suffix in arguments.formats:
                path = folder / f"{name}{place}.{suffix}"
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    style.save(chart.figure, path)
                except OSError as error:
                    parser.error(f"{path} cannot be written: {error.strerror or error}")
                print(path)
            plt.close(chart.figure)
        for name, reason in refused.items():
            print(f"{name}: not drawn for {setting.label}: {reason}", file=sys.stderr)
            missing |= bool(arguments.charts)
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
