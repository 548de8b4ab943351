"""What is wrong with a request, in one line, and the checks of single values. Every room of the runners may ask here."""

import math
import os
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from conf import not_one_of
from results.words import one_line

MOST_LETTERS = 2000  # of a refusal: it may name every choice there is


class BadRequest(Exception):
    """The request cannot be carried out as it stands; the message is one line."""

    def __init__(self, message: str):
        super().__init__(one_line(message, MOST_LETTERS))


def at_least(key: str, value: object, least: int) -> None:
    """Raise BadRequest unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadRequest(f"{key}={value} is not an integer of at least {least}")


def positive_integer(key: str, value: object) -> None:
    """Raise BadRequest unless `value` is an integer above zero."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadRequest(f"{key}={value} is not a positive integer")


def is_positive(value: object) -> bool:
    """Is it a number, and a finite one above zero?"""
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < math.inf


def not_negative(key: str, value: float) -> None:
    """Raise BadRequest unless `value` is a finite number of at least 0."""
    if not 0 <= value < math.inf:
        raise BadRequest(f"{key}={value} is not a number of at least 0")


def one_of(key: str, value: object, valid: Iterable[str]) -> None:
    """Raise BadRequest unless `value` is one of the names, with the nearest of them where one is near."""
    if wrong := not_one_of(key, value, valid):
        raise BadRequest(wrong)


def existing_part(key: str, path: Path) -> Path:
    """The longest part of an absolute path that is there. Raises BadRequest where the system takes no such path."""
    try:
        return next(part for part in (path, *path.parents) if part.exists())
    except (OSError, ValueError) as error:
        raise BadRequest(f"{key}={path} is no path: {getattr(error, 'strerror', None) or error}") from error


@cache  # a sweep asks once a cell
def check_writable(folder: Path, key: str) -> None:
    """Raise BadRequest unless a file can be made in `folder`, which is there or could be made."""
    existing = existing_part(key, folder)
    if not existing.is_dir():
        raise BadRequest(f"{key}={folder} cannot be written: {existing} is not a folder")
    try:
        with tempfile.TemporaryFile(dir=existing):  # permissions do not say it all: root passes them on a read-only disk
            pass
    except OSError as error:
        raise BadRequest(f"{key}={folder} cannot be written: {error.strerror or error} ({existing})") from error


def not_writable(key: str, path: Path, error: OSError) -> BadRequest:
    """What to raise where writing has failed after all."""
    return BadRequest(f"{key}={path} cannot be written: {error.strerror or error}")


def check_cache() -> None:
    """Raise BadRequest where OPWEAVE_CACHE can be no folder. One that cannot be written keeps nothing: that may be meant."""
    folder = Path(os.environ.get("OPWEAVE_CACHE", "")).expanduser()
    existing = existing_part("OPWEAVE_CACHE", folder.absolute())
    if not existing.is_dir():
        raise BadRequest(f"OPWEAVE_CACHE={folder} can be no folder: {existing} is a file")
