"""Files of clicks that a user has: Avazu's train.csv, Criteo's train.txt, and MovieLens-100K's ratings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from .dataset import BadData, Dataset
from .flights import CHUNK_ROWS, read_columns

AVAZU_LABEL, AVAZU_HOUR = "click", "hour"
CRITEO_NUMERIC = tuple(f"i{i}" for i in range(1, 14))
CRITEO_CATEGORICAL = tuple(f"c{i}" for i in range(1, 27))
LEAST_RATING = 4  # that counts as liked
SHARES = (0.9, 0.95)  # the chapter's, of Avazu and Criteo


def avazu(path: str | None) -> Dataset:
    """Avazu's click-through data: 40.4 million rows of 23 categorical columns, `hour` among them as its hour of the day.

    Raises:
        BadData: no path, no file, or not that table.
    """
    file = _file(path, "avazu", "Avazu's train.csv or train.gz")
    header = list(read_columns(file, None, nrows=0).columns)  # type: ignore[arg-type]
    columns = [name for name in header if name not in ("id", AVAZU_LABEL)]
    if AVAZU_LABEL not in header or AVAZU_HOUR not in header or len(columns) < 2:
        raise BadData(f"{file} is not Avazu's table: it lacks a column {AVAZU_LABEL} or {AVAZU_HOUR}")
    pieces, labels, hours = [], [], []
    for piece in read_columns(file, [AVAZU_LABEL, *columns], CHUNK_ROWS, dtype=dict.fromkeys(columns, str)):
        hour = piece[AVAZU_HOUR].astype(np.int64)  # YYMMDDHH
        hours.append(hour.to_numpy())
        labels.append(piece[AVAZU_LABEL].to_numpy(dtype=np.int64))
        pieces.append(piece[columns].assign(**{AVAZU_HOUR: hour % 100}))
    frame = pd.concat(_as_categories(pieces, [c for c in columns if c != AVAZU_HOUR]), ignore_index=True)
    return Dataset("avazu", frame, np.concatenate(labels), (), tuple(columns), np.concatenate(hours), SHARES)


def criteo(path: str | None) -> Dataset:
    """Criteo's display advertising data: 45.8 million rows of 13 numbers and 26 hashed words, in the order of time.

    Raises:
        BadData: no path, no file, or not that table.
    """
    file = _file(path, "criteo", "Criteo's train.txt")
    names = ["label", *CRITEO_NUMERIC, *CRITEO_CATEGORICAL]
    with_types = dict.fromkeys(CRITEO_NUMERIC, np.float32) | dict.fromkeys(CRITEO_CATEGORICAL, str)
    pieces, labels = [], []
    reader = read_columns(file, None, CHUNK_ROWS, sep="\t", header=None, names=names, dtype=with_types)  # type: ignore[arg-type]
    try:
        for piece in reader:
            labels.append(piece["label"].to_numpy(dtype=np.int64))
            pieces.append(piece.drop(columns="label"))
    except (ValueError, pd.errors.ParserError) as error:
        raise BadData(f"{file} is not Criteo's table: {' '.join(str(error).split())}") from error
    label = np.concatenate(labels)
    if not np.isin(label, (0, 1)).all():
        raise BadData(f"{file} is not Criteo's table: its first column is not 0 or 1")
    frame = pd.concat(_as_categories(pieces, list(CRITEO_CATEGORICAL)), ignore_index=True)
    frame[list(CRITEO_NUMERIC)] = frame[list(CRITEO_NUMERIC)].astype(np.float64)
    return Dataset("criteo", frame, label, CRITEO_NUMERIC, CRITEO_CATEGORICAL, np.arange(len(label)), SHARES)


def movielens(path: str | None) -> Dataset:
    """MovieLens-100K: whether a user gives a film 4 stars or more. Its licence forbids passing it on; `path` is yours.

    Args:
        path: the folder with u.data, u.user and u.item, or with RecBole's ml-100k.inter, ml-100k.user and ml-100k.item.

    Raises:
        BadData: no path, or not those files.
    """
    if not path:
        raise BadData("model.dataset=movielens needs model.path=FOLDER with MovieLens-100K's u.data, u.user and u.item")
    folder = Path(path).expanduser()
    options: dict[str, Any] = {"header": None, "encoding": "latin-1"}
    if (folder / "ml-100k.inter").is_file():
        options["skiprows"] = 1
        files = [folder / f"ml-100k.{kind}" for kind in ("inter", "user", "item")]
        separator, item_columns = "\t", {0: "item", 2: "year", 3: "genres"}
    else:
        files = [folder / name for name in ("u.data", "u.user", "u.item")]
        separator, item_columns = "|", {0: "item", 2: "released"}
    ratings = _read(files[0], "\t", {0: "user", 1: "item", 2: "rating", 3: "time"}, options)
    users = _read(files[1], separator, {0: "user", 1: "age", 2: "sex", 3: "occupation", 4: "zip"}, options)
    items = _read(files[2], separator, item_columns, options)
    joined = ratings.merge(users, on="user").merge(items, on="item").sort_values("time", kind="stable")
    facts = [name for name in ("year", "genres", "released") if name in joined]
    categorical = ("user", "item", "sex", "occupation", "zip", *facts)
    rows = joined[["age", *categorical]].reset_index(drop=True)
    for name in ("sex", "occupation", "zip", *facts):
        rows[name] = rows[name].astype(str).astype(object)
    rows["age"] = rows["age"].astype(np.float64)
    label = (joined["rating"].to_numpy() >= LEAST_RATING).astype(np.int64)
    return Dataset("movielens", rows, label, ("age",), categorical, joined["time"].to_numpy(dtype=np.int64))


def _read(file: Path, separator: str, names: dict[int, str], options: dict[str, Any]) -> pd.DataFrame:
    frame: pd.DataFrame = read_columns(file, list(names), sep=separator, **options)  # type: ignore[arg-type]
    return frame.rename(columns=names)


def _file(path: str | None, name: str, what: str) -> Path:
    if not path:
        raise BadData(f"model.dataset={name} needs model.path=FILE with {what}")
    return Path(path).expanduser()


def _as_categories(pieces: list[pd.DataFrame], columns: list[str]) -> list[pd.DataFrame]:
    """The pieces with each word held once, so that tens of millions of rows fit into memory."""
    for name in columns:
        columns_of_pieces = [piece[name].astype("category") for piece in pieces]
        known = pd.api.types.union_categoricals(columns_of_pieces).categories
        for piece, values in zip(pieces, columns_of_pieces, strict=True):
            piece[name] = values.cat.set_categories(known)
    return pieces
