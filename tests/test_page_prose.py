"""The length of sentences in the pages, up to a full stop, a colon or a semicolon."""

import re
from collections.abc import Iterator

import pytest
from conftest import ROOT
from sentences import pages, sections

MOST = 25  # words


def clauses(text: str) -> Iterator[str]:
    """Of a section, without blocks of commands, tables and pictures. Code is one word, and a link's target none."""
    lines = re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
    written = "\n".join("" if line.startswith(("|", "![")) else line for line in lines)
    for paragraph in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", written, flags=re.MULTILINE):
        words = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", " ".join(paragraph.split())))
        yield from re.split(r"(?<=[.!?:;])\s+", words)


def too_long(text: str) -> list[str]:
    return [clause for clause in clauses(text) if sum(bool(re.search(r"\w", word)) for word in clause.split()) > MOST]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_sentence_has_25_words_at_most(page: object) -> None:
    assert [clause for _, text in sections(page) for clause in too_long(text)] == []  # type: ignore[arg-type]


def test_a_longer_one_is_noticed() -> None:
    short, long = " ".join(["word"] * MOST) + ".", " ".join(["word"] * (MOST + 1)) + "."
    assert too_long(f"{short} {short}\n\n- {short}\n  {short}\n\n| {long} |\n\n```sh\n{long}\n```\n") == []
    assert too_long(f"{short} {long}") == [long] and too_long(f"- {short[:-1]}\n  word") != []
    assert too_long(" ".join(["word"] * (MOST - 1)) + " `as code here` [a](b/c.md)") != []
