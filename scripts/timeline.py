"""Draws timelines, one above the other on a common time axis: streams as rows, operators as bars.

python scripts/timeline.py TRACE.json [TRACE.json ...] [--output PICTURE.png PICTURE.svg] [--window BEGIN END]

Traces come from `python run.py -m runner=timeline model=... system=nimble,opara output=TRACE.json`; one may hold several
systems. Without --output the pictures are TRACE.png and TRACE.svg beside the first trace. Compute-intensive operators are
red and memory-intensive ones blue, as in Opara's figures 6 and 7. --window draws from BEGIN to END milliseconds only.
"""

import sys
from collections.abc import Sequence
from math import ceil, inf
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the rooms are beside its folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf.text import counted
from scripts.interrupts import tell_interrupts

if __name__ == "__main__":
    tell_interrupts()

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from results.files import COMPRESSED, read_json
from results.timeline import COMPUTE, KINDS, MEMORY, UNKNOWN, Bar, Timeline, from_trace, shared_of
from scripts.arguments import Parser, path_argument
from scripts.charts.names import written
from scripts.charts.style import FONT, SMALL, TINY, WORDS, above, broken, foot, house, width

ROW, TALLEST = 0.16, 4.8  # inches of a stream, at most, and of the streams of all panels together
COLOURS = dict(zip((COMPUTE, MEMORY, UNKNOWN), ("#a01c30", "#9cc4e8", "#c9c9c9"), strict=True))
EDGES = dict(zip(COLOURS, ("#5c0f1b", "#4a7fae", "#7a7a7a"), strict=True))  # darker, so that the shortest bars are seen
NAME, LETTER = 6, 0.052  # points of height and inches of width; a name is written into a bar that has room for it
LINE = 9  # points of height of a stream's number
INSTANT = 1.0  # milliseconds of the axis where every bar begins and ends at 0


def shown_of(timeline: Timeline, begin: float, end: float) -> list[Bar]:
    """The bars that have a part between two moments; one without a duration is there where it is between them."""

    def is_shown(bar: Bar) -> bool:
        return begin < bar.end and bar.start < end if bar.duration else begin <= bar.start <= end

    return [bar for bar in timeline.bars if is_shown(bar)]


def draw(timelines: Sequence[Timeline], window: tuple[float, float] | None = None, remark: str = "") -> Figure:
    """A panel for each timeline.

    Args:
        timelines: from top to bottom.
        window: the milliseconds to draw; all of the longest timeline if None.
        remark: a note under them.
    """
    begin, end = window or (0.0, max(bar.end for timeline in timelines for bar in timeline.bars) or INSTANT)
    rows = [sorted({bar.stream for bar in shown_of(t, begin, end)}) for t in timelines]
    row = min(ROW, TALLEST / sum(map(len, rows)))
    heights = [row * len(streams) + 0.3 for streams in rows]
    with house():
        figure, panels = plt.subplots(
            *(len(timelines), 1),
            figsize=(width(), sum(heights) + 0.5 * len(timelines) + 0.8),
            gridspec_kw={"height_ratios": heights},
            sharex=True,
            squeeze=False,
            layout="constrained",
        )
        shared = shared_of(timelines)
        sources = {timeline.source for timeline in timelines}
        for axes, timeline, streams in zip(panels[:, 0], timelines, rows, strict=True):
            shown = shown_of(timeline, begin, end)
            for kind in KINDS:
                bars = [bar for bar in shown if bar.kind == kind]
                axes.barh(
                    [streams.index(bar.stream) for bar in bars],
                    [bar.duration for bar in bars],
                    left=[bar.start for bar in bars],
                    height=0.85,
                    color=COLOURS[kind],
                    edgecolor=EDGES[kind],
                    linewidth=0.25,
                    label=kind,
                )
            for bar in shown:
                left, right = max(bar.start, begin), min(bar.end, end)
                if 72 * row >= NAME and (right - left) / (end - begin) * (width() - 0.6) > LETTER * (len(bar.name) + 1):
                    place = (left + right) / 2, streams.index(bar.stream)
                    colour = "white" if bar.kind == COMPUTE else "black"
                    axes.annotate(bar.name, place, ha="center", va="center", color=colour, fontsize=NAME)
            whole = max((bar.end for bar in timeline.bars), default=0.0)
            own = [part for part in timeline.about if part not in shared]
            words = "; ".join(filter(None, ["" if len(sources) == 1 else timeline.source, _streams(timeline)]))
            about = f"{', '.join([*own, timeline.cell.system.label])}: {whole:.3f} ms{f' ({words})' if words else ''}"
            title = broken(written(about), width() - 0.6, SMALL, (WORDS,))
            axes.set_title("\n".join(title), loc="left", fontsize=SMALL, pad=3)
            axes.grid(False, axis="y")
            step = ceil(LINE / (72 * row))
            axes.set_yticks(range(0, len(streams), step), [str(s) for s in streams[::step]], fontsize=TINY)
            axes.set(ylabel="stream", ylim=(len(streams) - 0.4, -0.6), xlim=(begin, end))
            if window is None:
                axes.axvline(whole, color="0.4", linewidth=0.8, linestyle=":")
            axes.spines[["top", "right"]].set_visible(False)
        panels[-1, 0].set_xlabel("milliseconds")
        seen = [kind for kind in KINDS if any(bar.kind == kind for t in timelines for bar in t.bars)]
        patches = [Patch(color=COLOURS[kind], label=kind) for kind in seen]
        title_words = ", ".join([*shared, *(sources if len(sources) == 1 else [])])
        if seen != [UNKNOWN]:
            above(figure, patches, title_words)
        else:
            figure.suptitle(written(title_words), fontsize=FONT)
        foot(figure, remark)
    return figure


def _streams(timeline: Timeline) -> str:
    """The streams of its schedule, and where they are others those that were seen; "" where it has none."""
    scheduled, seen = timeline.num_scheduled_streams, len(timeline.streams)
    if not scheduled:
        return ""
    return counted(scheduled, "stream") + (f" scheduled, {seen} seen" if scheduled != seen else "")


def picture_of(trace: Path, suffix: str) -> Path:
    """The picture beside a trace, which may be compressed."""
    return trace.with_name(trace.name.removesuffix(COMPRESSED)).with_suffix(suffix)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("traces", nargs="+", type=path_argument, metavar="TRACE.json")
    parser.add_argument(
        "--output", nargs="+", type=path_argument, metavar="PICTURE", help="files to write: .png, .svg, .pdf"
    )
    parser.add_argument("--window", nargs=2, type=float, metavar=("BEGIN", "END"), help="milliseconds to draw")
    arguments = parser.parse_args()
    timelines: list[Timeline] = []
    for file in arguments.traces:
        try:
            timelines += from_trace(read_json(file))
        except (OSError, ValueError) as error:
            parser.unreadable(file, error)
    window: Any = arguments.window and tuple(arguments.window)
    if not any(timeline.bars for timeline in timelines):
        parser.error("there is nothing to draw in them")
    if window and not -inf < window[0] < window[1] < inf:
        parser.error(f"--window {window[0]:g} {window[1]:g} is no span of time")
    if window and not any(shown_of(timeline, *window) for timeline in timelines):
        parser.error(f"--window {window[0]:g} {window[1]:g}: there is nothing to draw in it")
    pictures = arguments.output or [picture_of(arguments.traces[0], suffix) for suffix in (".png", ".svg")]
    for picture in pictures:
        parser.check_file(picture)
    figure = draw(timelines, window)
    for picture in pictures:
        # A fixed date makes an SVG of the same trace the same file.
        options: dict[str, Any] = {"metadata": {"Date": None}} if picture.suffix == ".svg" else {"dpi": 150}
        try:
            picture.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(picture, **options)
        except (OSError, ValueError) as error:
            parser.unreadable(picture, error)
        print(picture)


if __name__ == "__main__":
    main()
