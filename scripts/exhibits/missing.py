"""Why a figure is not there."""

from results.cell import Choice
from results.selection import Row, Selection


class Missing(Exception):
    """A figure is not there; the message says why, in a line."""


class Unable(Missing):
    """It is not there because a system that was asked could not run its cell."""


def lack(measured: Selection, row: Row, system: Choice) -> Missing | None:
    """Why a system has no speed; None where it has."""
    records = measured.records_of(row, system)
    if not records:
        return Missing(f"{system} was not measured")
    record = records[0]
    return None if record.is_ok else Unable(f"{system} is {record.status}: {record.reason}")
