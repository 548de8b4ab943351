"""Lines of text that other programs wrote."""

import pytest

from conf.text import LONGEST, first_line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("\n  \n two words \nmore", "two words"),
        (ValueError("\nwrong\nbadly"), "wrong"),
        (KeyError(), "KeyError"),
        (ValueError(" \n"), "ValueError"),
        ("x" * 1000, "x" * LONGEST),
    ],
)
def test_the_first_line_that_is_not_blank(text: object, line: str) -> None:
    assert first_line(text) == line
