"""Lines of text that other programs wrote."""

import os
import runpy
from pathlib import Path

import pytest

from conf.text import LONGEST, first_line, named_line, place_of
from systems import load
from systems.base import BadOption


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


def test_an_error_of_ones_own_code_has_its_place(tmp_path: Path) -> None:
    (tmp_path / "own_model.py").write_text("import json\ndef wrong():\n\n    return json.loads('{')\n")
    space = runpy.run_path(str(tmp_path / "own_model.py"))
    try:
        try:
            space["wrong"]()
        except ValueError as error:
            raise RuntimeError("of it") from error
    except RuntimeError as error:
        error.__traceback__ = None  # of this file, which is one's own too
        assert place_of(error) == f" ({os.path.relpath(tmp_path / 'own_model.py')}:4)"
    assert place_of(ValueError("raised nowhere")) == ""
    with pytest.raises(BadOption) as caught:
        load("weave", budget_s=-1)
    caught.value.__traceback__ = caught.value.__traceback__ and caught.value.__traceback__.tb_next
    assert place_of(caught.value) == ""
