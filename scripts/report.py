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

import io
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
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
import matplotlib.pyplot as plt

from results.published.value import Value
from results.published.values import NoSuchValue
from results.schedule_file import NoSchedule
from results.selection import NoResults, Selection
from results.setting import Setting
from results.timeline import Timeline
from results.verdict import Verdict, read_verdicts
from scripts.arguments import Parser, folder_of, path_argument
from scripts.charts import style
from scripts.charts.chart import Chart
from scripts.page import content, timelines
from scripts.page.answer import Answer, answer
from scripts.page.schedule_graph import ScheduleGraph
from scripts.plot import add_selection, draw_all, selected, usual
from scripts.table import DASH, Entry, Made, Table, escaped, made, table
from scripts.timeline import draw as draw_timelines

PAGE = Path(__file__).resolve().parent / "page"
FONTS = "Arial, DejaVu Sans, sans-serif"  # of a chart's words
CHART = re.compile(r'<svg role="img".*?</svg>', re.DOTALL)  # as `inlined` makes it, whose elements have no class
LONG_PATH = 100  # characters, from which on charts share a path
SHARED = '<svg class="shared" width="0" height="0" aria-hidden="true"><defs>'  # of page.html.j2
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
        inlined = {name: (PAGE / file).read_text(encoding="utf-8") for name, file in parts.items()}
        safe = {name: jinja2.filters.Markup(text) for name, text in inlined.items()}
        page = environment.get_template("page.html.j2").render(report=self, **safe)
        return with_shared_paths(with_shared_styles(with_shared_definitions(page)))

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


def inlined(chart: Chart, number: int) -> str:
    """A chart as an SVG element whose ids are the page's own, its paths to a tenth of a point.

    number: of the chart on the page.
    """
    out = io.StringIO()
    with style.house(), plt.rc_context({"svg.fonttype": "none"}):  # words that a reader can search, and fewer bytes
        chart.figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    plt.close(chart.figure)
    svg = style.with_one_path(re.sub(r"^ +", "", out.getvalue(), flags=re.M))
    svg = svg[svg.index("<svg") :].strip()  # without the declarations of a file
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*|(?<=>)\n\s*(?=<)", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)  # the page's style sheet has it
    svg = re.sub(r' (?:xmlns:xlink|version)="[^"]*"', "", svg).replace("xlink:href=", "href=")
    svg = re.sub(r'(?<= d=")[^"]*|(?<= [xy]=")[^"]*|(?<="translate\()[^)]*', lambda path: short_path(path[0]), svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)  # a text that stands upright
    svg = re.sub(r" font-family: [^;\"]*;", "", svg)  # the whole picture's
    svg = without_plain_groups(re.sub(r'(?<=<g) id="[^"]*"', "", svg))  # which nothing refers to
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\1c{number}-", style.with_short_names(svg))
    return svg.replace("<svg ", f'<svg role="img" aria-label="{chart.title}" font-family="{FONTS}" ', 1)


def short_path(path: str) -> str:
    """A path of absolute commands, or numbers, to a tenth of a point; a line along an axis names its one new coordinate."""
    path = re.sub(r"\.0(?!\d)", "", re.sub(r"(?<=\d\.\d)\d+", "", path))
    x = y = ""

    def short(match: re.Match[str]) -> str:
        nonlocal x, y
        command, numbers = match[1], match[2].split()
        before, (x, y) = (x, y), numbers[-2:] if len(numbers) > 1 else ("", "")
        if command == "L" and y == before[1]:
            return f"H{x}"
        if command == "L" and x == before[0]:
            return f"V{y}"
        return command + " ".join(numbers)

    return re.sub(r"([A-Za-z])([^A-Za-z]*)", short, path)


def without_plain_groups(svg: str) -> str:
    """The picture without the tags of groups that have no attribute, which change nothing."""
    is_kept: list[bool] = []

    def tag(match: re.Match[str]) -> str:
        if match[0] != "</g>":
            is_kept.append(match[0] != "<g>")
            return match[0] if is_kept[-1] else ""
        return match[0] if is_kept.pop() else ""

    return re.sub(r"<g>|<g [^>]*(?<!/)>|</g>", tag, svg)


def with_shared_definitions(html: str) -> str:
    """The page with each hatch, and each area that clips, in one place that its charts refer to."""
    definition = re.compile(r'<(pattern|clipPath) id="([^"]*)"(.*?)</\1>', re.DOTALL)
    names: dict[tuple[str, str], str] = {}  # by what is defined

    def shared(chart: re.Match[str]) -> str:
        own = {
            name: names.setdefault((kind, rest), f"d{len(names) + 1}") for kind, name, rest in definition.findall(chart[0])
        }
        svg = definition.sub("", chart[0]).replace("<defs></defs>", "")
        return re.sub(r"(?<=url\(#)[^)]*", lambda match: own.get(match[0], match[0]), svg)

    page = CHART.sub(shared, html)
    return with_more_shared(page, (f'<{kind} id="{name}"{rest}</{kind}>' for (kind, rest), name in names.items()))


def with_more_shared(html: str, definitions: Iterable[str]) -> str:
    """The page with more in the place that its charts refer to."""
    return html.replace(SHARED, SHARED + "".join(definitions), 1)


def with_shared_styles(html: str) -> str:
    """The page with each style that its charts repeat as a class, which its style sheet defines; what clips them, too.

    Marks of one style in a group have it from the group.
    """
    in_tag = re.compile(r' style="([^"]*)"')
    charts = CHART.findall(html)
    counts = Counter(style for chart in charts for style in in_tag.findall(chart))
    names = {style: f"s{number}" for number, style in enumerate((s for s, count in counts.items() if count > 1), start=1)}

    areas: dict[str, str] = {}  # names by what clips an element
    opaque = {name for style, name in names.items() if "opacity" not in style}  # what a group passes on to each mark alone
    marks = re.compile(r'<g( clip-path="[^"]*")>((?:<use [^>]*/>)+)</g>')

    def grouped(match: re.Match[str]) -> str:
        classes = re.findall(r' class="([^"]*)"', match[2])
        if len(set(classes)) > 1 or len(classes) < match[2].count("<use ") or not opaque.issuperset(classes):
            return match[0]
        own = f' class="{classes[0]}"'
        return f"<g{match[1]}{own}>{match[2].replace(own, '')}</g>"

    def clipped(match: re.Match[str]) -> str:
        return f' class="{match[2]} {areas.setdefault(match[1], f"k{len(areas) + 1}")}"'

    def classed(chart: re.Match[str]) -> str:
        svg = in_tag.sub(lambda match: f' class="{names[match[1]]}"' if match[1] in names else match[0], chart[0])
        return joined_lines(
            re.sub(r' clip-path="([^"]*)" class="([^"]*)"', clipped, marks.sub(grouped, svg)), opaque, unfilled
        )

    unfilled = {name for style, name in names.items() if "fill: none" in style}
    page = CHART.sub(classed, html)
    rules = "".join(f".{name} {{{style}}}\n" for style, name in names.items())
    rules += "".join(f".{name} {{clip-path: {area}}}\n" for area, name in areas.items())
    return page.replace("</style>", f"{rules}</style>", 1)


def joined_lines(svg: str, opaque: Collection[str], unfilled: Collection[str]) -> str:
    """The picture with lines of one style, one after another, as one path: it does not show where one ends.

    Args:
        svg: the picture.
        opaque: classes of strokes that may lie over each other.
        unfilled: classes without a fill; of others only lines of one segment are joined, which hold no area.
    """
    line = re.compile(r'<path d="([^"z]+)" class="([^" ]*)[^"]*"/>')
    several = re.compile(r'<path d="[^"z]+"( class="[^"]*")/>(?:<path d="[^"z]+"\1/>)+')
    segment = re.compile(r"M[^A-Z]*[LHV][^A-Z]*")

    def joined(match: re.Match[str]) -> str:
        paths, names = zip(*line.findall(match[0]), strict=True)
        if names[0] not in opaque or not (names[0] in unfilled or all(map(segment.fullmatch, paths))):
            return match[0]
        return f'<path d="{"".join(paths)}"{match[1]}/>'

    return several.sub(joined, svg)


def with_shared_paths(html: str) -> str:
    """The page with each long path that several charts draw, as a hatch or a mark, in one place that they refer to."""
    long_path = re.compile(rf'<path((?: id="[^"]*")?) d="([^"]{{{LONG_PATH},}})"([^>]*?)/>')
    counts = Counter(match[2] for match in long_path.finditer(html))
    numbers = {path: number for number, path in enumerate((p for p, count in counts.items() if count > 1), start=1)}

    def reference(match: re.Match[str]) -> str:
        number = numbers.get(match[2])
        return match[0] if number is None else f'<use{match[1]} href="#path-{number}"{match[3]}/>'

    paths = (f'<path id="path-{number}" d="{path}"/>' for path, number in numbers.items())
    return with_more_shared(long_path.sub(reference, html), paths)


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
    number = 0
    for setting, measured in settings.items():
        over = measured.system(baseline)
        charts, refused = draw_all(measured, usual(measured), over, published)
        figures = []
        for name, chart in charts.items():
            number += 1
            suffix = name.removeprefix(f"{chart.name}-b")
            heading = chart.title + (f", batch {suffix}" if suffix != name else "")
            file = f"{pictures}/{name}{f'-{setting.slug}' if len(settings) > 1 else ''}.svg"
            figures.append(Figure(name, heading, chart.caption, inlined(chart, number), file))
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
