"""How every chart looks: a colour, a marker and a hatch of each system, type that is legible in print, files."""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Polygon
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from results.cell import Choice

from .names import written

PAGE, COLUMN = 7.2, 3.35  # inches: the text of a two-column paper or a screen, and one of its columns
_width = ContextVar("width", default=PAGE)
FONT, SMALL, TINY = 8, 7, 6  # points
DOTS = 200  # an inch, in a PNG
ENTRY = 0.5  # inches of an entry of a legend beside its words
ROW, ROWS = 0.16, 3  # inches of a legend's line, and lines that every figure has room for
FORMATS = ("png", "svg")
POINTS = 72  # in an inch
_COORDINATE = re.compile(r"(\d\.\d\d)\d+")  # hundredths of a point are seen by nobody
_PATCH = r'<g id="patch_\d+">\n<path d="[^"]*" clip-path="{}" style="{}"/>\n</g>\n'
_DECIMALS = re.compile(r"\d+\.\d{3,}")
_NAME = re.compile(r"\b([a-z])[0-9a-f]{10}\b")  # of a path, a mark or a hatch that others refer to
_PATCHES = re.compile(
    _PATCH.format(r'(?P<clip>[^"]*)', r'(?P<style>[^"]*)') + "(?:" + _PATCH.format("(?P=clip)", "(?P=style)") + ")+"
)
CLAUSES = re.compile(r"[,;] ")  # between the parts of a setting
# Where a text may be broken: between what a claim is about and its two sides, between words, within a label.
SIDES, WORDS, PARTS = map(re.compile, (r"(?<=: )|(?=\bover )", r"(?<= )", r"(?<=[=,/@_])"))


@dataclass(frozen=True)
class Look:
    """How a system looks. The variants of one share a hue and differ in their hatch; all differ in their marker."""

    colour: Any  # what matplotlib takes for one
    marker: Any
    hatch: str = ""


# Told apart under each kind of colour blindness (tests/test_style.py simulates them); variants of one system share its hue.
# In the order in which charts show systems.
_HUES = ("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc")  # of seaborn's palette "colorblind"
LOOKS = {
    "eager": Look(_HUES[0], "o"),
    "torchscript": Look(_HUES[1], "s", "\\\\\\"),
    "torch_compile": Look(_HUES[2], "^", "---"),
    "torch_compile_channels_last": Look(_HUES[2], (3, 1, 90), "--//"),
    "torch_compile_best": Look(_HUES[2], (5, 1, 72), "/////"),
    "onnxruntime": Look("#b9b9b9", "v"),
    "onnxruntime_parallel": Look("#b9b9b9", (5, 1, 36), "/////"),
    "onnxruntime_cuda_graph": Look("#b9b9b9", (3, 1, 60), "||//"),
    "tvm": Look("#3cdc54", "<", "xx"),
    "tvm_cuda_graph": Look("#3cdc54", (4, 1, 22), "++"),
    "tvm_tuned": Look("#3cdc54", (3, 1, 270), "/////"),
    "tvm_tuned_cuda_graph": Look("#3cdc54", (6, 1, 0), "xxxxx"),
    "xla": Look("#1a5d7a", (8, 1, 11), "xx--"),
    "tensorrt": Look("#ece133", ">"),
    "cuda_graph": Look(_HUES[3], "D", "|||"),
    "sequential": Look("#000000", "d"),
    "greedy": Look("#000000", "h", "+++++"),
    "nimble_single_stream": Look(_HUES[4], (4, 1, 45), "/////"),
    "nimble": Look(_HUES[4], "P"),
    "nimble_paper": Look(_HUES[4], (5, 1, 54), "|||||"),
    "nimble_released": Look(_HUES[4], (6, 2, 15), "-----"),
    "nimble_fused": Look(_HUES[4], "*", "xxx"),
    "ios_merge": Look("#6c2400", (3, 1, 0), "/////"),
    "ios_parallel": Look("#6c2400", (3, 1, 180), "\\\\\\\\\\"),
    "ios": Look("#6c2400", "p"),
    "ios_fused": Look("#6c2400", (5, 1, 0), "xxxxx"),
    "opara": Look("#3b0f8f", "X", "++"),
    "opara_paper": Look("#3b0f8f", (9, 1, 0), "///"),
    "opara_shared_memory": Look("#3b0f8f", (3, 2, 45), "xx"),
    "opara_fused": Look("#3b0f8f", (4, 1, 0), "++//"),
    "weave": Look("#9900ff", (8, 1, 0), "\\\\"),
    "weave_or_peers": Look("#9900ff", (10, 1, 18), "\\\\//"),
    "request_level": Look("#8c6d00", (7, 1, 13), "//||"),
    "request_level_padded": Look("#8c6d00", (4, 2, 0), "+++++"),
    "request_level_ragged": Look("#8c6d00", (4, 2, 45), "-----"),
    "request_level_early": Look("#8c6d00", (5, 2, 0), "\\\\\\\\\\"),
    "request_level_microbatches": Look("#8c6d00", (7, 2, 20), "++\\\\"),
    "orca": Look("#8c6d00", (7, 0, 0), "|||||"),
    "orca_paged": Look("#8c6d00", (5, 0, 36), "xx||"),
    "orca_chunked": Look("#8c6d00", (3, 2, 0), "--||//"),
    "orca_prefixes": Look("#8c6d00", (3, 2, 180), "--\\\\"),
    "orca_preempting": Look("#8c6d00", (6, 2, 0), "||--"),
    "orca_asynchronous": Look("#8c6d00", (8, 2, 0), "xx++"),
    "transformers_continuous_batching": Look(_HUES[0], (6, 1, 30), "-----"),
    "transformers_generate": Look(_HUES[0], (8, 1, 22), "+++++"),
    "vllm": Look(_HUES[2], (7, 1, 7), "-----"),
    "nano_vllm": Look(_HUES[2], (9, 1, 10), "+++++"),
    "endpoint": Look("#000000", (6, 1, 15), "-----"),
    "checkout": Look("#000000", (9, 1, 25), "++//"),
    "pipeline": Look("#000000", (5, 1, 18), "xxxxx"),
    "windtunnel": Look("#3b0f8f", (7, 1, 0), "/////"),
    "windtunnel_cold": Look("#3b0f8f", (3, 0, 30), "xxxxx"),
    "gbdt2nn": Look(_HUES[1], (4, 0, 20), "//"),
    "lightgbm": Look("#3cdc54", (9, 1, 20), "++++"),
    "tabm": Look("#6c2400", (7, 2, 0), "//--"),
    "ft_transformer": Look("#ece133", (9, 2, 0), "/////"),
    "translation": Look("#3b0f8f", (9, 1, 13), "|||||"),
    "hummingbird": Look("#9900ff", (9, 2, 10), "||\\\\"),
    "deepgbm": Look("#8c6d00", (9, 2, 20), "xxxx"),
}
# Of the systems of a chart that differ in little, in turn.
COLOURS = (*_HUES, "#000000", "#6c2400")
# Of a system's labels with options, in turn.
HATCHES = ("xxxxx", "\\\\\\\\\\", "+++++", "//--", "|||||", "-----")
_SHAPES = (  # unlike each other, and unlike what LOOKS has, at the size of a marker
    ((-1, -1), (1, -1), (-1, 1), (1, 1)),  # an hourglass
    ((-1, -1), (0, 0.2), (1, -1), (1, -0.2), (0, 1), (-1, -0.2)),  # a roof
    ((-1, -1), (1, 1), (1, -1), (-1, 1)),  # a bow tie
    ((-1, -1), (1, -1), (1, -0.2), (-0.2, -0.2), (-0.2, 1), (-1, 1)),  # an L
    ((-0.5, -1), (0.5, -1), (0.5, 1), (-0.5, 1)),  # a bar that stands
    ((-1, -0.5), (1, -0.5), (1, 0.5), (-1, 0.5)),  # a bar that lies
)
MARKERS = tuple(Polygon(corners).get_path() for corners in _SHAPES)
OTHER = Look("#707a8a", (6, 0, 30))  # a system that is not there
FILE = "schedule"  # an option that is a path
PAPERS = {"nimble": "D", "ios": "s", "opara": "^", "windtunnel": "v"}  # the mark of a published value
INK, FAINT = "0.2", "0.45"
# Light lines under dark words. They are seaborn's, which takes a second to import.
PLAIN: dict[str, Any] = {
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color", "axes.edgecolor"), ".15"),
    "axes.axisbelow": True,
    # Matplotlib has the first everywhere, so that a layout is the same on each machine; the others are no wider.
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Bitstream Vera Sans", "Liberation Sans", "Arial", "sans-serif"],
    "lines.solid_capstyle": "round",
    "patch.edgecolor": "w",
    "patch.force_edgecolor": True,
    "grid.color": ".8",
    "text.parse_math": False,  # a dollar sign in a label is no formula
    "svg.hashsalt": "opweave",
}
GRID: dict[str, Any] = PLAIN | {"axes.grid": True, "axes.edgecolor": ".8", "xtick.bottom": False, "ytick.left": False}


def look(system: Choice, among: Sequence[Choice] = ()) -> Look:
    """The colour, marker and hatch of a system.

    Args:
        system: with changed options it has its choice's hue, and a hatch of its own among its choice's variants. One that
            stands for its choice alone looks as that does.
        among: the systems that looks tell apart; where all have one hue, all but the last have others, of COLOURS.
    """
    usual = LOOKS.get(system.choice, OTHER)
    keys = list(dict.fromkeys(other.key for other in among))
    if system.key in keys[:-1] and {LOOKS.get(other.choice, OTHER).colour for other in among} == {usual.colour}:
        others = [colour for colour in COLOURS if colour != usual.colour]
        usual = replace(usual, colour=others[keys.index(system.key) % len(others)])
    variants = list(dict.fromkeys(other.key for other in among if other.choice == system.choice))
    if not system.changed or variants == [system.key]:
        return usual
    changed = [other for other in variants if other.changed]
    number = changed.index(system.key) if system.key in changed else 0
    return Look(usual.colour, MARKERS[number % len(MARKERS)], HATCHES[number % len(HATCHES)])


def order(systems: Iterable[Choice]) -> list[Choice]:
    """In the order of LOOKS, the variants of a system after it, systems without a look last."""
    known = list(LOOKS)

    def place(system: Choice) -> tuple[int, str]:
        return known.index(system.choice) if system.choice in known else len(known), system.label

    return sorted(set(systems), key=place)


def stem(path: str) -> str:
    """The name of a schedule file, without its folder and its ending."""
    return Path(path).name.removesuffix(".json").removesuffix(".schedule")


def label(system: Choice) -> str:
    """A system's label as people write it."""
    return written(short(system))


def short(system: Choice) -> str:
    """A label that holds the name alone of a schedule file: "ios (schedule=inception_v3@ios@b32)"."""
    names = tuple((key, stem(str(value)) if key == FILE else value) for key, value in system.values)
    return replace(system, values=names).label


def width() -> float:
    """Inches of a figure: PAGE, or COLUMN within `column`."""
    return _width.get()


def column() -> AbstractContextManager[None]:
    """Figures as wide as a column of a two-column paper."""
    return _wide(COLUMN)


def page() -> AbstractContextManager[None]:
    """Figures as wide as a page, within `column` too."""
    return _wide(PAGE)


@contextmanager
def _wide(inches_wide: float) -> Iterator[None]:
    token = _width.set(inches_wide)
    try:
        yield
    finally:
        _width.reset(token)


@contextmanager
def house() -> Iterator[None]:
    """The settings that every chart is drawn and saved under."""
    settings: Any = GRID | {
        "svg.fonttype": "none",  # text: small files, which can be searched
        "font.size": FONT,
        "axes.titlesize": FONT,
        "axes.labelsize": FONT,
        "legend.fontsize": SMALL,
        "xtick.labelsize": SMALL,
        "ytick.labelsize": SMALL,
        "hatch.linewidth": 0.6,
        "figure.dpi": 100,
        "figure.max_open_warning": 0,  # a report draws all of its charts before it writes them
    }
    with plt.rc_context(settings):
        yield


def log_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Ticks of a logarithmic axis from `low` to `high`: the densest of 1-2-5, 1-3, 1 a decade with at most `most`.

    At least two, whatever the range: a range within one step is ticked at round steps of its own width.
    """
    for steps in ((1, 2, 5), (1, 3), (1,)):
        decades = range(int(np.floor(np.log10(low))) - 1, int(np.ceil(np.log10(high))) + 1)
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        inside = [tick for tick in ticks if low <= tick * 1.0001 and tick <= high * 1.0001]
        if len(inside) <= most:
            break
    if len(inside) < 2:
        step = 10.0 ** np.floor(np.log10(high - low)) if high > low else low / 10
        while (high - low) / step < 2:
            step /= 2
        inside = [float(t) for t in np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step]
    while len(inside) > most:
        inside = inside[::2]
    return inside


def plain(value: float, _: object = None) -> str:
    """0.05, 0.5, 12, 1,234: a tick's number without an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def set_log(axes: Axes, which: str, low: float, high: float, most: int = 8) -> None:
    """Make the axis `which` ("x" or "y") logarithmic from `low` to `high`, with ticks that say their numbers."""
    getattr(axes, f"set_{which}scale")("log")
    getattr(axes, f"set_{which}lim")(low, high)
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(FixedLocator(log_ticks(low, high, most)))
    axis.set_major_formatter(FuncFormatter(plain))
    axis.set_minor_locator(NullLocator())


def note(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **more: Any) -> None:
    """A few small words beside a point. at: in the axes' data, offset: in points, more: as matplotlib's annotate has it."""
    plain_note: dict[str, Any] = {"fontsize": TINY, "color": FAINT, "va": "center", "annotation_clip": False}
    plain_note["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.85}
    axes.annotate(text, at, offset, textcoords="offset points", **(plain_note | more))


def inches(text: str, points: float) -> float:
    """The width of a line of text, in the font that charts have now."""
    return _inches(text, FontProperties(size=points))


@cache
def _inches(text: str, font: FontProperties) -> float:
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width) / POINTS


def broken(text: str, most: float, points: float, breaks: Sequence[re.Pattern[str]] = (WORDS, PARTS)) -> list[str]:
    """The lines of a text, none longer than `most` inches unless there is no break in it.

    breaks: the best first; at the later ones only what the earlier leave too long is broken.
    """
    return [line.strip() for line in _broken(text, most, points, breaks)]


def _broken(text: str, most: float, points: float, breaks: Sequence[re.Pattern[str]]) -> list[str]:
    if not breaks or inches(text.strip(), points) <= most:
        return [text]
    lines: list[str] = []
    for piece in filter(None, breaks[0].split(text)):
        if lines and inches((lines[-1] + piece).strip(), points) <= most:
            lines[-1] += piece
        else:
            lines += _broken(piece, most, points, breaks[1:])
    return lines


def above(figure: Figure, handles: Sequence[Artist], title: str) -> None:
    """The chart's title and under it the legend, over the panels, where neither covers any of them; a figure grows by what
    a legend of many lines takes.
    """
    lines = _legend(figure, handles, loc="outside upper center", title=written(title), title_fontsize=FONT)
    figure.set_figheight(figure.get_figheight() + ROW * max(0, lines - ROWS))


def below(figure: Figure, handles: Sequence[Artist]) -> None:
    """A second legend under the panels, by whose lines the figure grows."""
    figure.set_figheight(figure.get_figheight() + ROW * _legend(figure, handles, loc="outside lower center"))


def _legend(figure: Figure, handles: Sequence[Artist], **more: Any) -> int:
    """A legend of as few lines as its entries need; how many these are. more: as matplotlib's legend has it."""
    widths = [ENTRY + inches(str(handle.get_label()), SMALL) for handle in handles]
    for lines in range(1, len(handles) + 1):
        columns = -(-len(handles) // lines)
        # matplotlib fills one column after another, the first ones with one entry more.
        if sum(max(part) for part in np.array_split(widths, columns)) < width():
            break
    figure.legend(handles=handles, ncols=columns, frameon=False, columnspacing=1.4, handletextpad=0.5, **more)
    return lines


def head(figure: Figure, title: str) -> None:
    """Put a title over a chart's setting, each in as many lines as it needs; what both say stands in the title alone."""
    legend = next(iter(figure.legends), None)  # one below has no title
    setting = legend.get_title().get_text() if legend is not None else figure.get_suptitle()
    title = written(title)
    parts = [part for part in CLAUSES.split(written(setting)) if not re.search(rf"(?<!\w){re.escape(part)}(?!\w)", title)]
    texts = title, ", ".join(parts)
    lines = [line for text in filter(None, texts) for line in broken(text, figure.get_figwidth() - 0.2, FONT, (WORDS,))]
    figure.set_figheight(figure.get_figheight() + ROW * (len(lines) - bool(setting)))
    if legend is not None:
        legend.set_title("\n".join(lines))
        legend.get_title().set_multialignment("center")
    else:
        figure.suptitle("\n".join(lines), fontsize=FONT)


def foot(figure: Figure, text: str) -> None:
    """A note under a figure, which grows by its lines."""
    if not text:
        return
    lines = broken(text, 0.92 * figure.get_figwidth(), TINY, (WORDS,))
    figure.set_figheight(figure.get_figheight() + 0.115 * len(lines) + 0.06)
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=TINY, color=INK)


def svg(figure: Figure) -> str:
    """The figure as SVG, the same each time, without spaces that carry nothing."""
    out = io.StringIO()
    with house():
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = re.sub(r"^ +| +$|(?<=\n)\n", "", out.getvalue(), flags=re.M)
    text = re.sub(r' d="[^"]*"', lambda match: _COORDINATE.sub(r"\1", match[0]).replace("\n", ""), text)
    text = re.sub(r' (?:x|y|transform)="[^"]*"', lambda match: _DECIMALS.sub(lambda n: f"{float(n[0]):.2f}", match[0]), text)
    return with_one_path(with_short_names(text))


def with_one_path(text: str) -> str:
    """An SVG, its lines without indentation, in which patches that look the same are one path: a timeline has thousands."""
    return _PATCHES.sub(_as_one, text)


def with_short_names(text: str) -> str:
    """An SVG whose paths, marks and hatches are named in their order: matplotlib's vary with a layout's last digits."""
    names: dict[str, str] = {}
    return _NAME.sub(lambda match: names.setdefault(match[0], f"{match[1]}{len(names)}"), text)


def _as_one(patches: re.Match[str]) -> str:
    """One path of several that look the same."""
    paths = "".join(re.findall(r' d="([^"]*)"', patches[0]))
    return f'<path d="{paths}" clip-path="{patches["clip"]}" style="{patches["style"]}"/>\n'


def save(figure: Figure, path: Path) -> None:
    """Write `figure` in the format that the suffix names; the same figure is the same file. Raises OSError, ValueError."""
    options: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix == ".svg" else {"dpi": DOTS}
    with house():
        figure.savefig(path, **options)
