"""A sweep's records in one file: JSON lines, compressed by gzip, a record a line.

Invariant: a line is read as a file of its own would be, and one that holds no record takes none of the others with it.
"""

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from zopfli.gzip import compress

from conf.text import counted

from . import files
from .document import NotARecord, from_json
from .record import Record
from .soundness import flaw

SUFFIX = ".jsonl.gz"
MOST_LINES = 2**16
SEARCHES = 5  # of Zopfli for the shortest code; fifteen take longer, for half a percent
MOST_LINE_BYTES = 2**26
NOT_LINES = (OSError, ValueError, zlib.error)  # what reading another file raises, or a damaged one


@dataclass
class Pack:
    """What a file holds.

    Args:
        records: in the order of their lines.
        reasons_by_line: why a line was not taken for a record; the first line is 1.
        reason: why the file, or its end, could not be read; None where all of it was.
    """

    records: list[Record] = field(default_factory=list)
    reasons_by_line: dict[int, str] = field(default_factory=dict)
    reason: str | None = None


def is_pack(path: Path) -> bool:
    """Is it named as a pack, and no folder?"""
    return path.name.endswith(SUFFIX) and not path.is_dir()


def sweep_of(path: Path) -> str:
    """The name of a pack without its suffix."""
    return path.name.removesuffix(SUFFIX)


def sound_record(document: object) -> Record:
    """The record of a document. Raises NotARecord, also where readers could not rely on it."""
    record = from_json(document)
    if (reason := flaw(record)) is not None:
        raise NotARecord(reason)
    return record


def read_pack(file: Path, identifier: str = "") -> Pack:
    """Every record of a file; what cannot be read is told in the pack.

    Of a file that ends early, whole lines are taken. One with a wrong checksum gives no record: nothing says which of its
    lines are as they were written.

    Args:
        file: the pack.
        identifier: an id that lines have to name; the others are passed over.
    """
    pack, wanted, number = Pack(), identifier.encode(), 0
    try:
        for number, line in enumerate(_lines(file), start=1):
            if wanted in line:
                try:
                    pack.records.append(sound_record(_document(line)))
                except NotARecord as error:
                    pack.reasons_by_line[number] = str(error)
    except EOFError:
        pack.reason = f"it ends early, after {counted(number, 'whole line')}"
    except NOT_LINES as error:
        return Pack(reason=f"not readable as compressed lines ({error})")
    if not number:
        pack.reason = pack.reason or "it is empty"
    return pack


def documents_of(file: Path) -> list[object]:
    """The documents of all lines. Raises OSError, and ValueError where the file or one of them cannot be read."""
    try:
        return [_document(line) for line in _lines(file)]
    except EOFError:
        raise ValueError("it ends early") from None
    except zlib.error as error:
        raise ValueError(str(error)) from error


def _lines(file: Path) -> Iterator[bytes]:
    """Each line, of one that is too long no more than shows it. Raises EOFError where the file ends early, or NOT_LINES."""
    num_bytes = num_lines = 0
    is_begun = False  # is the next piece of a line that is too long?
    with files.content(file) as content:
        while piece := content.readline(MOST_LINE_BYTES + 1):
            num_bytes, num_lines = num_bytes + len(piece), num_lines + (not is_begun)
            if num_bytes > files.MOST_BYTES:
                raise ValueError(files.too_large())
            if num_lines > MOST_LINES:
                raise ValueError(f"it has more than {MOST_LINES:,} lines")
            if not is_begun:
                yield piece
            is_begun = not piece.endswith(b"\n")


def _document(line: bytes) -> object:
    """Raises NotARecord where the line is too long, or no JSON."""
    if len(line) > MOST_LINE_BYTES:
        raise NotARecord(f"it is longer than {MOST_LINE_BYTES / 2**20:g} MiB")
    try:
        document: object = files.parsed(line)
    except ValueError as error:
        raise NotARecord(f"not readable as JSON ({error})") from error
    return document


def packed(documents: Iterable[object]) -> bytes:
    """The content of a pack of documents of records, in their order; the same ones give the same bytes."""
    lines = (json.dumps(document, separators=(",", ":")) + "\n" for document in documents)
    return compress("".join(lines).encode(), numiterations=SEARCHES)
