"""The published values: reading them, and selecting those that an exhibit reproduces."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path

from conf import nearest

from ..document import part_from_json
from .value import SOURCES, Value

FOLDER = Path(__file__).parent
COLUMNS = [field.name for field in fields(Value)]
Criterion = str | int | float | Sequence[str | int | float]


class NoSuchValue(ValueError):
    """No published value meets a request; the message is one line that names what exists."""


@cache
def everything() -> tuple[Value, ...]:
    """Every value of every paper, in the order of the files. Raises ValueError for a file of another form."""
    values: list[Value] = []
    for file in sorted(FOLDER.glob("*.csv")):
        with file.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            if reader.fieldnames != COLUMNS:
                raise ValueError(f"{file}: its columns are {reader.fieldnames}, not {COLUMNS}")
            for row in reader:
                if row["paper"] != file.stem or None in row or None in row.values():
                    raise ValueError(f"{file}, line {reader.line_num}: not a row of these columns and this paper")
                try:
                    number = float(row["value"])
                except ValueError:
                    raise ValueError(f"{file}, line {reader.line_num}: {row['value']!r} is not a number") from None
                if row["source"] not in SOURCES or not row["place"]:
                    known = ", ".join(SOURCES)
                    raise ValueError(f"{file}, line {reader.line_num}: a source is one of {known}, with its place")
                values.append(part_from_json(row | {"value": number}, Value))
    return tuple(values)


def papers() -> list[str]:
    return list(dict.fromkeys(value.paper for value in everything()))


def exhibits(paper: str) -> list[str]:
    """The exhibits of a paper that have values, in its file's order. Raises NoSuchValue."""
    if paper not in papers():
        raise NoSuchValue(f"no paper is named {paper!r}: {nearest(paper, papers())}")
    return list(dict.fromkeys(value.exhibit for value in everything() if value.paper == paper))


def exhibit(source: str) -> list[Value]:
    """The values of "paper/exhibit", as a preset names them. Raises NoSuchValue."""
    paper, slash, name = source.partition("/")
    names = exhibits(paper)
    if not slash or name not in names:
        raise NoSuchValue(f"{paper} has no values of an exhibit {name!r}: {nearest(name, names)}")
    return [value for value in everything() if value.name == source]


def select(source: str, /, **criteria: Criterion) -> list[Value]:
    """The values of "paper/exhibit" that meet all criteria; never none.

    Args:
        source: paper and exhibit.
        criteria: the values that a column may have: metric="speedup", model=["resnet50", "inception_v3"].

    Raises:
        NoSuchValue: a column does not exist, or no value meets a criterion.
    """
    values = exhibit(source)
    for column, wanted in criteria.items():
        if column not in COLUMNS:
            raise NoSuchValue(f"published values have no column {column!r}: {nearest(column, COLUMNS)}")
        accepted = _texts(wanted)
        texts = {str(getattr(value, column)) for value in values}
        for text in accepted:
            if text not in texts:
                raise NoSuchValue(f"{source} has no value with {column}={text}: {nearest(text, texts)}")
        values = [value for value in values if str(getattr(value, column)) in accepted]
    if not values:
        raise NoSuchValue(f"{source} has no value with {', '.join(f'{k}={v}' for k, v in criteria.items())}")
    return values


def reproduced(preset: Iterable[Mapping[str, Criterion]]) -> list[Value]:
    """The rows that a preset names: a list of {"exhibit": "nimble/figure7", and columns as `select` takes them}.

    Raises NoSuchValue.
    """
    values: dict[Value, None] = {}
    for rows in preset:
        if not isinstance(rows.get("exhibit"), str):
            raise NoSuchValue(f"published rows are named by their exhibit, like nimble/figure7, and not by {dict(rows)}")
        values |= dict.fromkeys(select(str(rows["exhibit"]), **{k: v for k, v in rows.items() if k != "exhibit"}))
    return list(values)


def _texts(wanted: Criterion) -> list[str]:
    return [str(wanted)] if isinstance(wanted, str | int | float) else [str(one) for one in wanted]
