"""Draws charts from results, each as PNG and SVG.

python scripts/plot.py [CHART ...] [--results FOLDER ...] [--output FOLDER]

Charts: speedup, throughput (over batch sizes), latency (its scatter), memory, sm_efficiency (counted and estimated values in
charts of their own), search (and preparation), limits (distance to the critical path), accuracy (AUC), gain (AUC over the
pipeline's), serving (latency over throughput), batch_course (requests and K/V slots over time, a chart for each record), and
each quantity of a further measurement by its name, MEASUREMENT.NAME. All that the results allow are drawn if none is named,
but for the courses of several records. Each machine, version of torch and precision has a set of charts of its own. A system
with incorrect output has no speed in any chart.

    python scripts/plot.py --results results/reference/h200/zoo.jsonl.gz --output charts
    python scripts/plot.py speedup --baseline cuda_graph --batches 1 --published nimble/figure7

Exit status 1 where a chart that was named cannot be drawn, 2 for a bad request.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

if not __package__:  # run as a file: the rooms are beside its folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.interrupts import tell_interrupts

if __name__ == "__main__":
    tell_interrupts()

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt

from conf import choices, nearest
from results.cell import Choice
from results.published.value import Value
from results.published.values import NoSuchValue, exhibit
from results.selection import NoResults, Selection, by_setting, read
from results.setting import Setting
from scripts.arguments import Parser, folder_of, path_argument
from scripts.charts import (
    accuracy,
    batch_course,
    latency,
    limits,
    memory,
    quantity,
    search,
    serving,
    sm_efficiency,
    speedup,
    style,
    throughput,
)
from scripts.charts.chart import Chart

RUNS = Path("results") / "runs"
Drawing: TypeAlias = Callable[[], Chart]
Drawings: TypeAlias = Callable[[Selection, Choice, Sequence[Value]], list[Drawing]]


def one(draw: Callable[[Selection], Chart]) -> Drawings:
    """A name with one chart, which needs the records alone."""
    return lambda measured, *_: [partial(draw, measured)]


def by_source(measured: Selection, *_: object) -> list[Drawing]:
    """SM efficiency, a chart for each source."""
    return [partial(sm_efficiency.draw, measured, source) for source in sm_efficiency.SOURCES]


def by_page(measured: Selection, *_: object) -> list[Drawing]:
    """Latencies, a chart for each page of models."""
    pages = latency.pages(measured)
    if len(pages) == 1:
        return [partial(latency.draw, measured)]
    return [partial(latency.draw, page, number) for number, page in enumerate(pages, start=1)]


def by_record(measured: Selection, *_: object) -> list[Drawing]:
    """The course of batches, a chart for each record."""
    return [partial(batch_course.draw, measured, number) for number in range(max(1, len(batch_course.records(measured))))]


# The charts by name, in the order of a report.
DRAW: dict[str, Drawings] = {
    "speedup": lambda measured, baseline, published: [partial(speedup.draw, measured, baseline, published)],
    "throughput": one(throughput.draw),
    "latency": by_page,
    "memory": one(memory.draw),
    "sm_efficiency": by_source,
    "search": one(search.draw),
    "limits": one(limits.draw),
    "accuracy": one(accuracy.draw),
    "gain": one(accuracy.draw_gain),
    "serving": one(serving.draw),
    batch_course.NAME: by_record,
}
CHARTS = tuple(DRAW)
OF_TABLES = ("accuracy", "gain")  # of what learns, which has no speed
OF_REQUESTS = ("serving", batch_course.NAME)  # of what serves
MEDIAN, TAILS = "_p50", ("_p90", "_p99")  # in the names of quantities


def usual(measured: Selection) -> list[str]:
    """The charts that are drawn where none is named."""
    learned = {record.accuracy is not None for record in measured.records}
    is_served = any(record.serving is not None or "capacity" in record.measured for record in measured.records)
    names = [name for name in CHARTS if (name in OF_TABLES) in learned and (is_served or name not in OF_REQUESTS)]
    if len(batch_course.records(measured)) > 1:  # a page for each of many is for whoever names it
        names.remove(batch_course.NAME)
    quantities = measured.quantities()
    medians = {name for name in quantities if MEDIAN in name}
    tails = {name.replace(MEDIAN, tail) for name in medians for tail in TAILS}  # a report's tables have them
    return [*names, *(name for name in quantities if name not in tails and _is_compared(measured, name))]


def _is_compared(measured: Selection, name: str) -> bool:
    """Do several cells have a quantity, or is there one cell alone? A single bar among many cells says nothing."""
    return _num_bars(measured, name) > 1 or len({record.cell for record in measured.records}) == 1


def _num_bars(measured: Selection, name: str) -> int:
    """Cells that have a quantity."""
    measurement, _, key = name.partition(".")
    return len(
        {
            record.cell
            for record in measured.records
            if (part := record.described.get(measurement)) is not None and any(q.name == key for q in part.quantities)
        }
    )


def drawings(name: str, measured: Selection, baseline: Choice, published: Sequence[Value]) -> list[Drawing]:
    """The functions that draw the charts of a name, which is a key of DRAW or the name of a quantity."""
    draw = DRAW.get(name) or one(partial(quantity.draw, name=name))
    return draw(measured, baseline, published)


def per_batch(name: str, measured: Selection) -> list[tuple[str, Selection]]:
    """The measured, by a suffix for the name of the file. A chart shows one batch, unless it is about several, or of the
    speedups of one model, whose batches stand beside each other. A batch of which one cell has a quantity is left out where
    another has several.
    """
    if name == "throughput" or len(measured.batches) == 1 or (name == "speedup" and len(measured.models) == 1):
        return [("", measured)]
    parts = [(f"-b{batch}", measured.only(batches=[batch])) for batch in measured.batches]
    if name in DRAW or "." not in name:
        return parts
    return [(suffix, part) for suffix, part in parts if _num_bars(part, name) > 1] or parts


def draw_all(
    measured: Selection,
    names: Sequence[str],
    baseline: Choice,
    published: Sequence[Value],
    others: Mapping[str, Drawings] | None = None,
) -> tuple[dict[str, Chart], dict[str, str]]:
    """Every chart of some names.

    Args:
        measured: the records.
        names: of CHARTS, or of quantities.
        baseline: what speedups are over.
        published: speedups to mark.
        others: how charts of these names are drawn in the place of the usual way.

    Returns:
        The charts by the name of their file, and by name why others cannot be drawn.
    """
    charts: dict[str, Chart] = {}
    refused: dict[str, str] = {}
    for name in names:
        drawn, reason = 0, ""
        for suffix, part in per_batch(name, measured):
            draw = (others or {}).get(name) or partial(drawings, name)
            for drawing in draw(part, baseline, published):
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
    names, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    return [name.strip() for name in names]


def add_selection(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what to show. plot and report share them."""
    parser.add_argument(
        "--results",
        nargs="+",
        type=path_argument,
        default=[RUNS],
        metavar="FOLDER",
        help="records, or a file *.jsonl.gz of them; results/runs",
    )
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


def selected(arguments: argparse.Namespace) -> tuple[dict[Setting, Selection], list[Value]]:
    """The records and published values that the arguments of add_selection name. Raises NoResults and NoSuchValue."""
    published = [value for source in arguments.published for value in exhibit(source)]
    chosen, reason = {}, None
    for setting, measured in by_setting(read(arguments.results), style.order).items():
        try:
            chosen[setting] = measured.only(
                arguments.models, arguments.systems, arguments.batches, always=[arguments.baseline]
            )
        except NoResults as error:  # one machine may lack what another has
            reason = error
    if not chosen:
        assert reason is not None
        raise reason
    labels = {system.label for measured in chosen.values() for system in measured.among}
    if (name := arguments.baseline) not in labels and name not in choices("system"):
        raise NoResults(f"no system is named {name!r}: {nearest(name, labels)}")
    return chosen, published


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("charts", nargs="*", metavar="CHART", help=", ".join(CHARTS))
    add_selection(parser)
    parser.add_argument(
        "--output",
        type=path_argument,
        metavar="FOLDER",
        help="charts/ in the first folder of results, or beside a file of them, if left out",
    )
    parser.add_argument("--formats", type=names_of, default=list(style.FORMATS), metavar="png,svg", help="pdf too")
    arguments = parser.parse_args()
    for name in arguments.charts:
        if name not in CHARTS and "." not in name:  # a quantity's name has a dot
            parser.error(f"no chart is named {name}: there is {', '.join(CHARTS)}, and any MEASUREMENT.NAME")
    for name in map(str, arguments.results):
        if name in CHARTS and not Path(name).exists():
            parser.error(f"--results {name}: {name} is a chart, and charts go before --results")
    for suffix in arguments.formats:
        if suffix not in (*style.FORMATS, "pdf"):
            parser.error(f"--formats {suffix} is none of png, svg, pdf")
    try:
        settings, published = selected(arguments)
    except (NoResults, NoSuchValue) as error:
        parser.error(str(error))
    quantities = {name for measured in settings.values() for name in measured.quantities()}
    for name in arguments.charts:
        if name not in CHARTS and name not in quantities:
            parser.error(f"no record holds a quantity {name}: {nearest(name, quantities)}")
    folder: Path = arguments.output or folder_of(arguments.results[0]) / "charts"
    parser.check_folder(folder)
    missing = False
    for setting, measured in settings.items():
        place = f"-{setting.slug}" if len(settings) > 1 else ""
        names = arguments.charts or usual(measured)
        charts, refused = draw_all(measured, names, measured.system(arguments.baseline), published)
        for name, chart in charts.items():
            style.head(chart.figure, chart.title)
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
