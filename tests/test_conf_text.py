"""Lines of text that other programs wrote."""

import pytest

from conf.text import LONGEST, first_line, named_line


class Mute(Exception):
    """An error whose message cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("\n  \n two words \nmore", "two words"),
        (ValueError("\nwrong\nbadly"), "wrong"),
        (KeyError(), "KeyError"),
        (ValueError(" \n"), "ValueError"),
        (Mute(), "Mute"),
        ("x" * 1000, "x" * LONGEST),
    ],
)
def test_the_first_line_that_is_not_blank(text: object, line: str) -> None:
    assert first_line(text) == line


def test_an_error_is_named_with_its_message() -> None:
    assert [named_line(error) for error in (Mute(), KeyError(), ValueError("a\n b"))] == [
        "Mute",
        "KeyError",
        "ValueError: a b",
    ]
