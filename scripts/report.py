"""One page of everything that was measured: HTML that needs no network, and Markdown.

python scripts/report.py [--results FOLDER ...] [--output REPORT.html] [--markdown REPORT.md] [--schedules SCHEDULE.json ...]

The page opens with the fastest system of each model and its distance from the bound. It holds the environment, a table of
every cell that sorts by its columns, every chart of scripts/plot.py, each schedule drawn as a graph with a colour for each
stream, timelines, and how the papers' claims stand where there are verdicts. Schedules and timelines come from

    python run.py runner=schedule model=googlenet system=nimble output=googlenet.json
    python run.py -m runner=timeline model=googlenet system=nimble,opara output=googlenet.trace.json

Without --timelines it shows those of results/exhibits and results/reference/exhibits that are of models on the page.

Exit status 2 for a bad request.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a file: the rooms are beside its folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.interrupts import tell_interrupts

if __name__ == "__main__":
    tell_interrupts()

import matplotlib

matplotlib.use("svg")

import jinja2
from rich.console import Console
from rich.progress import Progress

from results.published.value import Value
from results.published.values import NoSuchValue
from results.schedule_file import NoSchedule
from results.selection import NoResults, Selection
from results.setting import Setting
from results.timeline import Timeline
from results.verdict import Verdict, read_verdicts
from scripts.arguments import Parser, folder_of, path_argument
from scripts.charts.chart import Chart
from scripts.page import content, timelines
from scripts.page.answer import Answer, answer
from scripts.page.pictures import inlined, with_all_shared
from scripts.page.schedule_graph import ScheduleGraph
from scripts.plot import add_selection, draw_all, selected, usual
from scripts.table import DASH, Entry, Made, Table, escaped, made, table
from scripts.timeline import draw as draw_timelines

PAGE = Path(__file__).resolve().parent / "page"
VERDICTS = Path("results") / "exhibits" / "verdicts.json"  # of scripts/reproduce.py


@dataclass(frozen=True)
class Figure:
    """A chart as an SVG element, and the file that a Markdown page shows it from."""

    name: str
    title: str
    caption: str
    svg: str
    file: str


@dataclass(frozen=True)
class Section:
    """All that was measured in one setting.

    Args:
        title: the setting's label.
        answer: the fastest system of each model; None where no two systems compare.
        environment: names and values.
        cells: tables of a row for each cell, by what was measured.
        gains: what decisions gained in the whole.
        remarks: reasons and warnings.
        figures: the charts.
        refused: why a chart is not there, by its name.
    """

    title: str
    answer: Answer | None
    environment: Sequence[tuple[str, str]]
    cells: dict[str, Table]
    gains: Table
    remarks: Table
    figures: Sequence[Figure]
    refused: dict[str, str]


@dataclass(frozen=True)
class Drawn:
    """A schedule, or the timelines of a model, as an SVG element, and the file that a Markdown page shows it from."""

    title: str
    summary: str
    svg: str
    file: str
    gains: Sequence[str] = ()  # of the search that chose it, in words


@dataclass(frozen=True)
class Report:
    title: str
    verdicts: Table | None
    sections: Sequence[Section]
    schedules: Sequence[Drawn]
    timelines: Sequence[Drawn]

    @property
    def answered(self) -> list[Section]:
        """The sections that have an answer."""
        return [section for section in self.sections if section.answer is not None]

    def html(self) -> str:
        """The page: its style, its script and its pictures are in it."""
        loader = jinja2.FileSystemLoader(PAGE)
        environment = jinja2.Environment(
            loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
        )
        parts = {"style": "page.css", "script": "page.js"}
        texts = {name: (PAGE / file).read_text(encoding="utf-8") for name, file in parts.items()}
        safe = {name: jinja2.filters.Markup(text) for name, text in texts.items()}
        return with_all_shared(environment.get_template("page.html.j2").render(report=self, **safe))

    def markdown(self) -> str:
        """The page for Markdown, whose pictures are files of their own (write_pictures)."""
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(PAGE), trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
        )
        environment.filters["escaped"] = escaped
        text = environment.get_template("page.md.j2").render(report=self)
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"

    def write_pictures(self, folder: Path) -> None:
        """Write each picture to where the Markdown page in `folder` looks for it. Raises OSError."""
        pictures: list[Figure | Drawn] = [figure for section in self.sections for figure in section.figures]
        for picture in (*pictures, *self.schedules, *self.timelines):
            path = folder / picture.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(picture.svg, encoding="utf-8")


def make(
    settings: dict[Setting, Selection],
    baseline: str,
    published: Sequence[Value],
    schedules: Sequence[ScheduleGraph],
    seen: Sequence[Timeline],
    verdicts: Sequence[Verdict],
    pictures: str,
    title: str = "Opweave: what was measured",
) -> Report:
    """The report of all records.

    Args:
        settings: the records by setting.
        baseline: the label of the system that speedups are over.
        published: speedups to mark.
        schedules: to draw.
        seen: timelines to draw.
        verdicts: of exhibits.
        pictures: the folder that a Markdown page names its pictures in.
        title: of the page.

    Raises:
        NoSchedule: a schedule has a cycle.
    """
    sections: list[Section] = []
    names = {setting: usual(measured) for setting, measured in settings.items()}
    number, console = 0, Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("drawing", total=sum(map(len, names.values())))
        for setting, measured in settings.items():
            over = measured.system(baseline)
            figures, refused = list[Figure](), dict[str, str]()
            for drawn_name in names[setting]:
                charts, without = draw_all(measured, [drawn_name], over, published)
                refused |= without
                for name, chart in charts.items():
                    number += 1
                    suffix = name.removeprefix(f"{chart.name}-b")
                    heading = chart.title + (f", batch {suffix}" if suffix != name else "")
                    file = f"{pictures}/{name}{f'-{setting.slug}' if len(settings) > 1 else ''}.svg"
                    figures.append(Figure(name, heading, chart.caption, inlined(chart, number), file))
                progress.advance(task)
            cells, gains, remarks = content.cells(measured, over), content.gains(measured), content.remarks(measured)
            environment = content.environment(measured)
            own_answer = answer(measured, over)
            sections.append(Section(setting.label, own_answer, environment, cells, gains, remarks, figures, refused))
    drawn = [
        Drawn(graph.title, graph.summary, graph.to_svg(), f"{pictures}/schedule-{position}.svg", graph.gains)
        for position, graph in enumerate(schedules, start=1)
    ]
    lines = []
    for position, (about, group) in enumerate(timelines.by_model(seen).items(), start=1):
        chart = Chart("timeline", f"Timelines of {about}", "", draw_timelines(timelines.joined(group)))
        svg = inlined(chart, number + position)
        lines.append(Drawn(about, timelines.summary(group), svg, f"{pictures}/timeline-{position}.svg"))
    return Report(title, verdict_table(verdicts), sections, drawn, lines)


def verdict_table(verdicts: Sequence[Verdict]) -> Table | None:
    """A row for each verdict, how it stands before why; None for none."""
    if not verdicts:
        return None

    def column(name: str) -> Made[Verdict]:
        words = name not in ("exhibit", "verdict")
        return made(name, lambda verdict: Entry(getattr(verdict, name) or DASH), number=False, words=words)

    figures: Made[Verdict] = made("figures", lambda verdict: Entry(verdict.extent), number=False)
    answer, *behind = "verdict", "claim", "published", "measured", "place", "reason", "command"
    return table([column("exhibit"), column(answer), figures, *map(column, behind)], verdicts)


def _verdicts(file: Path | None, parser: Parser) -> list[Verdict]:
    """Of a file that was asked for, or of that in its usual place, which an older form leaves out with a warning."""
    try:
        return read_verdicts(file or VERDICTS) if file or VERDICTS.exists() else []
    except (OSError, ValueError) as error:
        if file:
            parser.unreadable(file, error)
        print(f"warning: {VERDICTS} is left out: {str(error).partition(':')[0]}", file=sys.stderr)
        return []


def main() -> None:
    parser = Parser(__doc__)
    add_selection(parser)
    parser.add_argument(
        "--output", type=path_argument, metavar="REPORT.html", help="report.html in the first folder of results"
    )
    parser.add_argument(
        "--markdown", type=path_argument, metavar="REPORT.md", help="its pictures go to REPORT_files beside it"
    )
    parser.add_argument("--schedules", nargs="+", type=path_argument, default=[], metavar="SCHEDULE.json")
    parser.add_argument("--timelines", nargs="+", type=path_argument, metavar="TRACE.json")
    parser.add_argument("--verdicts", type=path_argument, metavar="VERDICTS.json", help=f"{VERDICTS} if it is there")
    parser.add_argument("--title", default="Opweave: what was measured")
    arguments = parser.parse_args()
    for results in arguments.results:
        parser.check_results(results)
    output: Path = arguments.output or folder_of(arguments.results[0]) / "report.html"
    for written in filter(None, (output, arguments.markdown)):
        parser.check_file(written)
    if arguments.markdown and output.resolve() == arguments.markdown.resolve():
        parser.error(f"--output and --markdown are both {output}: give each a file of its own")
    try:
        settings, published = selected(arguments)
        schedules = [ScheduleGraph.read(schedule) for schedule in arguments.schedules]
        traces = arguments.timelines
        seen = timelines.beside(settings) if traces is None else timelines.asked_for(traces, parser)
        verdicts = _verdicts(arguments.verdicts, parser)
        pictures = f"{arguments.markdown.stem}_files" if arguments.markdown else "pictures"
        report = make(settings, arguments.baseline, published, schedules, seen, verdicts, pictures, arguments.title)
    except (NoResults, NoSuchValue, NoSchedule) as error:
        parser.error(str(error))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(report.html(), encoding="utf-8")
        print(output)
        if arguments.markdown:
            arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
            report.write_pictures(arguments.markdown.parent)
            arguments.markdown.write_text(report.markdown(), encoding="utf-8")
            print(arguments.markdown)
    except OSError as error:
        parser.error(f"{error.filename or output} cannot be written: {error.strerror or error}")


if __name__ == "__main__":
    main()
