"""What makes a report's page small: shared paths, hatches and styles, joined lines, and paths of few characters."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.page.pictures import (
    SHARED,
    joined_lines,
    short_path,
    with_shared_definitions,
    with_shared_paths,
    with_shared_styles,
    without_plain_groups,
    without_quotes,
)


def test_charts_share_the_paths_that_they_have_in_common() -> None:
    path = "M 0 0 " * 40
    page = f'{SHARED}</defs></svg><path id="a" d="{path}" style="fill: red"/><path d="{path}"/><path d="M 1 1"/>'
    shared = with_shared_paths(page)
    assert shared.count(path) == 1 and f'<path id="path-1" d="{path}"/></defs></svg>' in shared
    assert shared.endswith('<use id="a" href="#path-1" style="fill: red"/><use href="#path-1"/><path d="M 1 1"/>')
    assert with_shared_paths(shared) == shared


def test_charts_share_the_hatches_that_they_repeat() -> None:
    """Each refers to its own by the name that its definition has on the page."""
    charts = [
        f'<svg role="img"><g style="fill: url(#c{n}-a)"/><g style="fill: url(#c{n}-b)"/><g style="fill: url(#c{n}-m)"/>'
        f'<defs><pattern id="c{n}-a" x="0"><p/></pattern><pattern id="c{n}-b" x="{n}"><p/></pattern></defs></svg>'
        for n in range(2)
    ]
    shared = with_shared_definitions(f"{SHARED}</defs></svg>{''.join(charts)}")
    hatches = {'x="0"><p/>': "d1", 'x="1"><p/>': "d2"}
    definitions = "".join(f'<pattern id="{name}" {rest}</pattern>' for rest, name in hatches.items())
    pictures = [
        f'<svg role="img"><g style="fill: url(#d1)"/><g style="fill: url(#d{b})"/><g style="fill: url(#c{n}-m)"/></svg>'
        for n, b in enumerate((1, 2))
    ]
    assert shared == f"{SHARED}{definitions}</defs></svg>{''.join(pictures)}"
    assert with_shared_definitions(shared) == shared


def test_charts_share_the_styles_that_they_repeat() -> None:
    chart = '<svg role="img"><g style="fill: red"/><g style="fill: blue"/><g style="fill: red"/></svg>'
    page = f'<style>\np {{}}\n</style><p style="fill: red"/>{chart}<svg class="schedule"><g style="fill: red"/></svg>'
    shared = with_shared_styles(page)
    assert shared == (
        '<style>\np {}\n.s1 {fill: red}\n</style><p style="fill: red"/>'
        '<svg role="img"><g class="s1"/><g style="fill: blue"/><g class="s1"/></svg>'
        '<svg class="schedule"><g style="fill: red"/></svg>'
    )
    assert with_shared_styles(shared) == shared


@pytest.mark.parametrize(
    ("styles", "is_shared"),
    [
        (("fill: red",) * 2, True),
        (("fill: red", "fill: blue"), False),
        (("opacity: 0.5",) * 2, False),
        (("fill: red", ""), False),
    ],
)
def test_marks_of_one_opaque_style_have_it_from_their_group(styles: tuple[str, str], is_shared: bool) -> None:
    """A group of half opaque marks would be another picture: where they overlap they are darker."""
    uses = [
        f'<use href="#m" x="{n}"{f" style={chr(34)}{style}{chr(34)}" if style else ""}/>' for n, style in enumerate(styles)
    ]
    group = f'<g clip-path="url(#p)">{"".join(uses)}</g>'
    shared = with_shared_styles(f'<style>\n</style><svg role="img">{group * 2}</svg>')
    whole = '<g class="s1 k1"><use href="#m" x="0"/><use href="#m" x="1"/></g>'
    assert (whole * 2 in shared) is is_shared
    assert is_shared or '<g clip-path="url(#p)"><use href="#m" x="0" class="s1"/>' in shared


WRITTEN = st.text("ab1.#=<>'/ -()", max_size=6).map(lambda text: text.replace("<", "&lt;").replace(">", "&gt;"))


@given(st.lists(st.tuples(st.lists(WRITTEN, max_size=3), st.booleans(), WRITTEN), max_size=4))
def test_attributes_without_quotes_are_the_same(elements: list[tuple[list[str], bool, str]]) -> None:
    """As a parser of HTML reads them, with the words between them."""

    def read(svg: str) -> list[Any]:
        tags_and_words: list[Any] = []
        parser = HTMLParser()
        parser.handle_starttag = lambda tag, attributes: tags_and_words.append((tag, attributes))  # type: ignore[method-assign]
        parser.handle_startendtag = lambda tag, attributes: tags_and_words.append((tag, attributes, "/"))  # type: ignore[method-assign]
        parser.handle_data = tags_and_words.append  # type: ignore[method-assign]
        parser.feed(svg)
        parser.close()
        return tags_and_words

    svg = "".join(
        f'<g{"".join(f" a{n}={chr(34)}{value}{chr(34)}" for n, value in enumerate(values))}{"/" * ends}>x="{words}" '
        for values, ends, words in elements
    )
    assert read(without_quotes(svg)) == read(svg)


def test_most_attributes_need_no_quotes() -> None:
    svg = '<g class="s1"><use href="#c4-m1" x="252.8" y="21"/><path d="M0 1" class="s2 k3"/></g>'
    assert without_quotes(svg) == '<g class=s1><use href=#c4-m1 x=252.8 y="21"/><path d="M0 1" class="s2 k3"/></g>'


COORDINATES = st.integers(-3, 3).map(lambda tenths: tenths / 10)
MOVES = st.tuples(st.sampled_from("ML"), COORDINATES, COORDINATES)
CURVES = st.tuples(st.just("C"), *[COORDINATES] * 6)


def points(path: str) -> list[tuple[str, float, float]]:
    """What a path of M, L, H, V, C and z draws: each command's kind, and where it leads."""
    at, out = (0.0, 0.0), []
    for command, text in re.findall(r"([MLHVCz])([^MLHVCz]*)", path):
        numbers = [float(number) for number in text.split()]
        x, y = at if command == "z" else {"H": (*numbers, at[1]), "V": (at[0], *numbers)}.get(command, numbers[-2:])
        at = x, y
        out.append(("L" if command in "HV" else command, x, y))
    return out


def test_lines_of_one_style_that_follow_each_other_are_one_path() -> None:
    """A fill, an opacity, another class or what closes a path keeps them apart."""
    one, other = '<path d="M0 0L1 1L2 0" class="a k1"/>', '<path d="M5 5H9" class="a k1"/>'
    assert (
        joined_lines(f"<g>{one}{other}</g>{one}", {"a"}, {"a"}) == f'<g><path d="M0 0L1 1L2 0M5 5H9" class="a k1"/></g>{one}'
    )
    assert joined_lines(other * 3, {"a"}, ()) == f'<path d="{"M5 5H9" * 3}" class="a k1"/>'
    word = '<text class="t" x="1" y="2">1</text>'
    assert joined_lines(f"{other}{word}{other}{word}", {"a"}, ()) == f'<path d="M5 5H9M5 5H9" class="a k1"/>{word * 2}'
    assert joined_lines(f"{one}{word}{one}", {"a"}, ()) == f"{one}{word}{one}"
    closed = '<path d="M0 0L1 1L2 0z" class="a k1"/>'
    for apart, opaque in (
        (one * 2, {"a"}),
        (other * 2, ()),
        (other + other.replace("k1", "k2"), {"a"}),
        (closed * 2, {"a"}),
    ):
        assert joined_lines(apart, opaque, {"a"} if apart == closed * 2 else ()) == apart


@given(st.lists(st.one_of(MOVES, CURVES, st.just(("z",)))))
def test_a_short_path_leads_where_the_path_leads(commands: list[tuple[str, ...]]) -> None:
    path = " ".join(f"{command} {' '.join(f'{number:.6f}' for number in numbers)}" for command, *numbers in commands)
    assert points(short_path(path)) == points(path) and len(short_path(path)) <= len(path)
    assert short_path("12.3456") == "12.3"


def test_only_groups_that_say_nothing_go() -> None:
    picture = '<g><g class="a"><g><path/></g></g><g clip-path="url(#b)"/></g><g><g><text>1</text></g></g>'
    assert without_plain_groups(picture) == '<g class="a"><path/></g><g clip-path="url(#b)"/><text>1</text>'
