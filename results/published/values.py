"""The published values: reading them, and selecting those that an exhibit reproduces."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from .value import Value

FOLDER = Path(__file__).parent
COLUMNS = [field.name for field in fields(Value)]
Criterion = str | int | float | Sequence[str | int | float]


class NoSuchValue(ValueError):
    """No published value is as asked for; the message is one line that names what there is."""


@cache
def everything() -> tuple[Value, ...]:
    """Every value of every paper, in the order of the files. Raises ValueError for a file that is not as it should be."""
    found: list[Value] = []
    for file in sorted(FOLDER.glob("*.csv")):
        with file.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            if reader.fieldnames != COLUMNS:
                raise ValueError(f"{file}: its columns are {reader.fieldnames}, not {COLUMNS}")
            for row in reader:
                if row["paper"] != file.stem or None in row or None in row.values():
                    raise ValueError(f"{file}, line {reader.line_num}: not a row of these columns and this paper")
                try:
                    columns: dict[str, Any] = {**row, "value": float(row["value"])}
                except ValueError:
                    raise ValueError(f"{file}, line {reader.line_num}: {row['value']!r} is not a number") from None
                found.append(Value(**columns))
    return tuple(found)


def papers() -> list[str]:
    return list(dict.fromkeys(value.paper for value in everything()))


def exhibits(paper: str) -> list[str]:
    """The exhibits of a paper that have values, in its file's order. Raises NoSuchValue."""
    if paper not in papers():
        raise NoSuchValue(f"no paper is named {paper!r}: {_near(paper, papers())}")
    return list(dict.fromkeys(value.exhibit for value in everything() if value.paper == paper))


def exhibit(source: str) -> list[Value]:
    """The values of "paper/exhibit", as a preset names them. Raises NoSuchValue."""
    paper, slash, name = source.partition("/")
    there = exhibits(paper)
    if not slash or name not in there:
        raise NoSuchValue(f"{paper} has no values of an exhibit {name!r}: {_near(name, there)}")
    return [value for value in everything() if value.source == source]


def select(source: str, **criteria: Criterion) -> list[Value]:
    """The values of "paper/exhibit" whose columns are as given: metric="speedup", model=["resnet50", "inception_v3"].

    Never empty. Raises NoSuchValue where a column does not exist, or where a criterion leaves nothing.
    """
    left = exhibit(source)
    for column, wanted in criteria.items():
        if column not in COLUMNS:
            raise NoSuchValue(f"published values have no column {column!r}: {_near(column, COLUMNS)}")
        accepted = _texts(wanted)
        there = list(dict.fromkeys(str(getattr(value, column)) for value in left))
        for one in accepted:
            if one not in there:
                raise NoSuchValue(f"{source} has no value with {column}={one}: {_near(one, there)}")
        left = [value for value in left if str(getattr(value, column)) in accepted]
    if not left:
        raise NoSuchValue(f"{source} has no value with {', '.join(f'{k}={v}' for k, v in criteria.items())}")
    return left


def reproduced(preset: Iterable[Mapping[str, Criterion]]) -> list[Value]:
    """The rows that a preset names: a list of {"exhibit": "nimble/figure7", and columns as `select` takes them}.

    Raises NoSuchValue.
    """
    found: dict[Value, None] = {}
    for rows in preset:
        if not isinstance(rows.get("exhibit"), str):
            raise NoSuchValue(f"published rows are named by their exhibit, like nimble/figure7, and not by {dict(rows)}")
        found |= dict.fromkeys(select(str(rows["exhibit"]), **{k: v for k, v in rows.items() if k != "exhibit"}))
    return list(found)


def _texts(wanted: Criterion) -> list[str]:
    return [str(wanted)] if isinstance(wanted, str | int | float) else [str(one) for one in wanted]


def _near(name: str, there: Sequence[str]) -> str:
    close = get_close_matches(name, there, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"there is {', '.join(there)}"
