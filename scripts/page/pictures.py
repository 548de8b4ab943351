"""Charts as SVG elements that make a page small: each says little, and the page says once what several of them say."""

import io
import re
from collections import Counter
from collections.abc import Collection, Iterable

import matplotlib.pyplot as plt

from scripts.charts import style
from scripts.charts.chart import Chart

CHART = re.compile(r'<svg role="img".*?</svg>', re.DOTALL)  # as `inlined` makes it, whose elements have no class
LONG_PATH = 100  # characters, from which on charts share a path
SHARED = '<svg class="shared" width="0" height="0" aria-hidden="true"><defs>'  # of page.html.j2


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
    svg = re.sub(r' (?:xmlns(?::xlink)?|version)="[^"]*"', "", svg).replace("xlink:href=", "href=")
    svg = re.sub(r'(?<= d=")[^"]*|(?<= [xy]=")[^"]*|(?<="translate\()[^)]*', lambda path: short_path(path[0]), svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)  # a text that stands upright
    svg = re.sub(r" font-family: [^;\"]*;", "", svg)  # the page's style sheet has it
    svg = without_plain_groups(re.sub(r'(?<=<g) id="[^"]*"', "", svg))  # which nothing refers to
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\1c{number}-", style.with_short_names(svg))
    return svg.replace("<svg ", f'<svg role="img" aria-label="{chart.title}" ', 1)


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


def with_all_shared(html: str) -> str:
    """The page whose charts share what they have in common."""
    page = with_shared_paths(with_shared_styles(with_shared_definitions(html)))
    return CHART.sub(lambda chart: without_quotes(chart[0]), page)


def without_quotes(svg: str) -> str:
    """The picture without quotes where HTML needs none: around one word that no slash follows."""
    word = re.compile(r"""(?<==)"([^\s"'=<>`]+)"(?=[ >])""")
    return re.sub(r"<[^<>]*>", lambda tag: word.sub(r"\1", tag[0]), svg)


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
    words = r"(?:<text [^>]*>[^<]*</text>)*"  # of an axis stand between the lines of its grid, which go below all of them
    several = re.compile(rf'<path d="[^"z]+"( class="[^"]*")/>(?:{words}<path d="[^"z]+"\1/>)+')
    segment = re.compile(r"M[^A-Z]*[LHV][^A-Z]*")

    def joined(match: re.Match[str]) -> str:
        paths, names = zip(*line.findall(match[0]), strict=True)
        if names[0] not in opaque or not (names[0] in unfilled or all(map(segment.fullmatch, paths))):
            return match[0]
        return f'<path d="{"".join(paths)}"{match[1]}/>' + "".join(re.findall(r"<text .*?</text>", match[0]))

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
