"""Tables as data: columns that say how an entry is made, and rows of entries; one function writes Markdown."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

# What Markdown would take for its own. A star with a blank on both sides is not, nor is an underscore within a word, nor a
# bracket without a target behind it.
_MARKUP = re.compile(r"[\\`|<>&~]|\*(?=\S)|(?<=\S)\*|\[(?=[^\]]*\][(\[:])|(?<![^\W_])_|_(?![^\W_])|^[#+-](?=\s|$)")
DASH = "–"  # an entry that says nothing
Source = TypeVar("Source")


class Lacking(Exception):
    """A record lacks what an entry shows."""


@dataclass(frozen=True)
class Entry:
    """One entry of a table.

    Args:
        text: what stands in it.
        value: what it sorts by; its text if None.
        title: more of it, shown on pointing at it.
        page: that it leads to, in Markdown.
    """

    text: str
    value: float | None = None
    title: str = ""
    page: str = ""

    @property
    def markdown(self) -> str:
        return f"[{escaped(self.text)}]({self.page})" if self.page else escaped(self.text)

    @property
    def missing(self) -> bool:
        return self.text == DASH


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        heading: its name.
        meaning: what that means, in a few words.
        number: whether it is aligned as numbers are.
        words: whether it is text of several words, which may wrap.
    """

    heading: str
    meaning: str = ""
    number: bool = True
    words: bool = False


@dataclass(frozen=True)
class Table:
    columns: Sequence[Column]
    rows: Sequence[Sequence[Entry]]

    @property
    def explained(self) -> list[Column]:
        """The columns whose heading has a meaning beside it."""
        return [column for column in self.columns if column.meaning]

    def without_empty_columns(self) -> "Table":
        """The table with those columns alone that say something."""
        full = [i for i in range(len(self.columns)) if any(not row[i].missing for row in self.rows)]
        return Table([self.columns[i] for i in full], [[row[i] for i in full] for row in self.rows])

    def markdown(self) -> str:
        """The table in GitHub's Markdown."""
        rule = "|" + "".join("---:|" if column.number else "---|" for column in self.columns)
        rows = ([entry.markdown for entry in row] for row in self.rows)
        head, *body = (f"| {' | '.join(cells)} |" for cells in ([escaped(c.heading) for c in self.columns], *rows))
        return "\n".join([head, rule, *body])


@dataclass(frozen=True)
class Made(Generic[Source]):
    """A column, and how its entry is made from what a row is about."""

    column: Column
    entry: Callable[[Source], Entry]


def made(
    heading: str, entry: Callable[[Source], str | Entry], meaning: str = "", *, number: bool = True, words: bool = False
) -> Made[Source]:
    """A column with its entries; `entry` may give the text alone, and raise Lacking for a dash."""

    def whole(source: Source) -> Entry:
        try:
            made_entry = entry(source)
        except Lacking:
            return Entry(DASH)
        return Entry(made_entry) if isinstance(made_entry, str) else made_entry

    return Made(Column(heading, meaning, number, words), whole)


def table(columns: Sequence[Made[Source]], sources: Iterable[Source]) -> Table:
    """A row for each source."""
    rows = [[column.entry(source) for column in columns] for source in sources]
    return Table([column.column for column in columns], rows)


def escaped(text: str) -> str:
    """A text in one line of Markdown that shows as it stands: no markup, no HTML, no column of a table."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))
