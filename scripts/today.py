"""A page of three paragraphs: where streams help, where fusion does, and where nothing is left.

python scripts/today.py [--results FOLDER ...] [--output FOLDER]

It is made of the records of `python run.py experiment=reference/today results=FOLDER` alone, or of any others that were
measured in turn with cuda_graph, with a chart a batch. --output gets README.md and the charts; the page is printed too.
Exit status 2 where the folders hold no such record.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if not __package__:  # run as a file: the rooms are beside its folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.interrupts import tell_interrupts

if __name__ == "__main__":
    tell_interrupts()

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt

from results.cell import Choice, named
from results.record import Limits, Record
from results.selection import NoResults, Row, Selection, by_setting, latency_of, read
from results.words import counted
from scripts.arguments import Parser, path_argument
from scripts.charts import speedup
from scripts.charts.style import short

RESULTS = Path(__file__).resolve().parent.parent / "results" / "reference" / "h200" / "today.jsonl.gz"
ONE_STREAM = named("system", "cuda_graph")
STREAMS = tuple(named("system", name) for name in ("nimble", "opara", "ios"))  # the model's own kernels, on more streams
WEAVE = named("system", "weave")  # which does both
NEITHER = (WEAVE, *(named("system", name) for name in ("eager", "torchscript", "sequential", "nimble_single_stream")))
GAIN = 1.05  # over one stream, below which a way does not help
SECTIONS = ("Where streams help", "Where fusion helps", "Where nothing is left")


@dataclass(frozen=True)
class Standing:
    """How one model stands at one batch.

    Args:
        streams, fusion, both: The largest ratio over one stream, and its system; None where nothing was measured in turn.
        limits: Of the model's own operators; None where no record has them.
        latency_ms: Of one stream.
    """

    row: Row
    streams: tuple[float, Choice] | None
    fusion: tuple[float, Choice] | None
    both: tuple[float, Choice] | None
    limits: Limits | None
    latency_ms: float | None

    @property
    def name(self) -> str:
        return f"{self.row[0]} b{self.row[1]}"

    @property
    def section(self) -> str:
        """One of SECTIONS: by the way that gains more alone, if anything gains at all."""
        gains = [way[0] if way is not None else 1.0 for way in (self.streams, self.fusion, self.both)]
        if max(gains) <= GAIN:
            return SECTIONS[2]
        return SECTIONS[0] if gains[0] > gains[1] else SECTIONS[1]

    @property
    def reason(self) -> str:
        """The width and the limits."""
        limits = self.limits
        if limits is None or not limits.critical_path_ms or not limits.busy_ms:
            return "no limits"
        said = f"width {limits.width}, critical path {limits.critical_path_ms / limits.busy_ms:.0%} of the kernels' time"
        largest = next(iter(limits.bounds.items()), None)
        if largest is not None and self.latency_ms is not None:
            said += f", one stream {self.latency_ms / largest[1]:.1f} times the {largest[0]}"
        return said

    @property
    def text(self) -> str:
        ways = [f"{way[0]:.2f}x ({short(way[1])})" for way in (self.streams, self.fusion, self.both) if way is not None]
        return f"{self.name}: {', '.join(ways)}; {self.reason}"


def standings(measured: Selection) -> list[Standing]:
    """Of every model and batch that was measured in turn with one stream, the largest gains first."""
    fusing = [s for s in measured.systems if s not in (ONE_STREAM, *STREAMS, *NEITHER)]

    def best(row: Row, systems: Sequence[Choice]) -> tuple[float, Choice] | None:
        ratios = [(ratio.ratio, s) for s in systems if (ratio := measured.over(row, s, ONE_STREAM)) is not None]
        return max(ratios, key=lambda pair: pair[0], default=None)

    rows = []
    for row in measured.rows:
        ways = best(row, STREAMS), best(row, fusing), best(row, [WEAVE])
        if any(ways):
            latency = measured.part(row, ONE_STREAM, latency_of)
            limits = measured.part(row, ONE_STREAM, _limits)
            rows.append(Standing(row, *ways, limits, latency.host.median if latency is not None else None))
    return sorted(rows, key=lambda row: -max(way[0] for way in (row.streams, row.fusion, row.both) if way is not None))


def _limits(record: Record) -> Limits | None:
    return record.limits


def page(measured: Selection, rows: Sequence[Standing], charts: Sequence[str]) -> str:
    """Markdown. Raises NoResults for no rows."""
    if not rows:
        raise NoResults(f"nothing was measured in turn with {short(ONE_STREAM)}")
    lines = ["# Streams, fusion, and what is left", "", f"{measured.setting.label}. Made by `python scripts/today.py`."]
    lines += [f"\n![speedup over {short(ONE_STREAM)}]({chart})" for chart in charts]
    meaning = (
        "Schedulers, which put the model's own kernels on more streams, gain more over one stream than compilers",
        "Compilers, which make fewer and other kernels, gain more over one stream than schedulers",
        f"No system gains more than {GAIN - 1:.0%} over one stream",
    )
    for section, words in zip(SECTIONS, meaning, strict=True):
        own = [row for row in rows if row.section == section]
        said = "\n".join(f"- {row.text}" for row in own)
        number = f"{len(own)} of {counted(len(rows), 'model')}, each batch counted"
        lines += ["", f"## {section}", "", f"{words}: {number}.", *(["", said] if own else [])]
    return "\n".join(lines) + "\n"


def drawings(measured: Selection) -> dict[str, Callable[[], object]]:
    """What draws each batch's chart, by the name of its file."""
    return {f"speedup-b{b}.svg": partial(_draw, measured.only(batches=[b])) for b in measured.batches}


def _draw(measured: Selection) -> object:
    return speedup.draw(measured, ONE_STREAM).figure


def write(folder: Path, text: str, figures: Mapping[str, Callable[[], object]]) -> None:
    """Draw the charts to a folder, and write the page beside them. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in figures.items():
        figure = draw()
        figure.savefig(folder / name, metadata={"Date": None})  # type: ignore[attr-defined]
        plt.close(figure)  # type: ignore[arg-type]
    (folder / "README.md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--results", nargs="+", type=path_argument, default=[RESULTS], metavar="FOLDER")
    parser.add_argument("--output", type=path_argument, metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        records = read(arguments.results)
    except NoResults:
        records = []
    settings = by_setting(record for record in records if record.cell.runner.name == "bench")
    if not settings:
        folders = ", ".join(map(str, arguments.results))
        parser.error(f"{folders}: no records: python run.py experiment=reference/today results=FOLDER measures them")
    if len(settings) > 1:
        parser.error(f"records of {counted(len(settings), 'setting')}: {', '.join(s.label for s in settings)}")
    (measured,) = settings.values()
    figures = drawings(measured)
    try:
        text = page(measured, standings(measured), list(figures) if arguments.output else [])
    except NoResults as error:
        parser.error(str(error))
    if arguments.output is not None:
        parser.check_folder(arguments.output)
        try:
            write(arguments.output, text, figures)
        except OSError as error:
            parser.error(f"{error.filename or arguments.output} cannot be written: {error.strerror or error}")
    print(text, end="")


if __name__ == "__main__":
    main()
