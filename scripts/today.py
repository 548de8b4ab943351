"""A page of three paragraphs: where streams help, where fusion does, and where nothing is left.

python scripts/today.py [--results FOLDER ...] [--output FOLDER]

It is made of the records of `python run.py experiment=reference/today results=FOLDER` alone, or of any others that were
measured in turn with cuda_graph, with a chart for each precision and batch. --output gets README.md and the charts; the
page is printed too.
Exit status 2 where the folders hold no such record.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

if not __package__:  # run as a file: the rooms are beside its folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf.text import counted
from scripts.interrupts import tell_interrupts

if __name__ == "__main__":
    tell_interrupts()

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from results.selection import NoResults, Selection, read
from results.setting import Setting
from scripts.arguments import Parser, path_argument
from scripts.charts import speedup, style
from scripts.charts.style import label, short
from scripts.standing import ONE_STREAM, Standing, by_precision, sections, standings

RESULTS = Path(__file__).resolve().parent.parent / "results" / "reference" / "h200" / "today.jsonl.gz"


def page(settings: Sequence[Selection], rows: Sequence[Standing], charts: Sequence[str]) -> str:
    """Markdown. Raises NoResults for no rows."""
    if not rows:
        raise NoResults(f"nothing was measured in turn with {short(ONE_STREAM)}")
    labels = "; ".join(measured.setting.label for measured in settings)
    lines = ["# Streams, fusion, and what is left", "", f"{labels}. Made by `python scripts/today.py`."]
    lines += [f"\n![speedup over {short(ONE_STREAM)}]({chart})" for chart in charts]
    return "\n".join([*lines, "", sections(rows)]) + "\n"


def drawings(settings: Iterable[Selection]) -> dict[str, Callable[[], Figure]]:
    """What draws each precision's and batch's chart, by the name of its file."""
    return {
        f"speedup-{measured.setting.precision}-b{b}.svg": partial(drawn, measured.only(batches=[b]))
        for measured in settings
        for b in measured.batches
    }


def drawn(measured: Selection, title: str = "Streams and fusion") -> Figure:
    """Speedup over one stream of one precision and batch. Raises NoResults."""
    figure = speedup.draw(measured, ONE_STREAM).figure
    style.head(figure, f"{title}: speedup over a {label(ONE_STREAM)} of one stream")
    return figure


def write(folder: Path, text: str, figures: Mapping[str, Callable[[], Figure]]) -> None:
    """Draw the charts to a folder, and write the page beside them. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in figures.items():
        figure = draw()
        figure.savefig(folder / name, metadata={"Date": None})
        plt.close(figure)
    (folder / "README.md").write_text(text, encoding="utf-8")


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--results", nargs="+", type=path_argument, default=[RESULTS], metavar="FOLDER")
    parser.add_argument("--output", type=path_argument, metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        records = [record for record in read(arguments.results) if record.cell.runner.name == "bench"]
    except NoResults as error:
        parser.error(str(error))
    if not records:
        folders = ", ".join(map(str, arguments.results))
        parser.error(
            f"{folders}: no record of runner=bench: python run.py experiment=reference/today results=FOLDER measures them"
        )
    if arguments.output is not None:
        parser.check_folder(arguments.output)
    settings = {Setting.of(record) for record in records}
    if len({(s.place, s.torch, s.layout, s.algorithms) for s in settings}) > 1:
        parser.error(f"records of {counted(len(settings), 'setting')}: {', '.join(sorted(s.label for s in settings))}")
    selections = by_precision(records)
    figures = drawings(selections)
    try:
        text = page(selections, standings(selections), list(figures) if arguments.output else [])
    except NoResults as error:
        parser.error(str(error))
    if arguments.output is not None:
        try:
            write(arguments.output, text, figures)
        except OSError as error:
            parser.error(f"{error.filename or arguments.output} cannot be written: {error.strerror or error}")
    print(text, end="")


if __name__ == "__main__":
    main()
