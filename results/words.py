"""Texts of strangers in a form that a terminal and a table take."""

import re

MOST_LETTERS = 500  # of a line whose text comes from elsewhere
# A terminal's colour sequence, or a character that it would act on or cannot show.
_UNPRINTABLE = re.compile(r"(\x1b\[[0-?]*[ -/]*[@-~])|[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def printable(text: str) -> str:
    """The text without colours, its control characters and lone surrogates written as escapes."""
    if text.isprintable():  # as nearly all are, which takes a quarter of the time
        return text
    return _UNPRINTABLE.sub(lambda match: "" if match[1] else match[0].encode("unicode_escape").decode(), text)


def one_line(text: str, most: int = MOST_LETTERS) -> str:
    """A text of several lines as one, printable and cut off after `most` letters."""
    line = printable(" ".join(text[: 10 * most].split()))
    return line if len(line) <= most else line[: most - 1] + "…"
