"""A folder of records. Files are written whole or not at all, and only JSON is ever read back."""

import json
import os
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .document import Foreign, NotARecord, from_json, to_json
from .record import Record, identity
from .soundness import flaw, plain_document
from .words import printable

PARTIAL = ".partial"  # a file that is being written; no reader looks at it
STALE_SECONDS = 3600.0
MOST_BYTES = 2**30  # of a file that is read whole


@dataclass
class Contents:
    """What a folder holds.

    Args:
        records: by id.
        reasons_by_file: why a file was not taken for a record.
        foreign: the files among those that are of another kind, and not damaged.
    """

    records: dict[str, Record] = field(default_factory=dict)
    reasons_by_file: dict[Path, str] = field(default_factory=dict)
    foreign: set[Path] = field(default_factory=set)

    @property
    def is_damaged(self) -> bool:
        """Is there a file that may have been a record, and cannot be read?"""
        return len(self.foreign) < len(self.reasons_by_file)

    @property
    def skipped(self) -> list[str]:
        """A line for each file that was not taken for a record."""
        return [f"skipped {printable(str(file))}: {reason}" for file, reason in self.reasons_by_file.items()]


class Store:
    """The records under `folder`.

    Several processes may write at once: each file is one cell's, and takes its name only when it is complete.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)

    def make(self) -> None:
        """Create the folder and see that a file can be written there. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=PARTIAL):
            pass
        for partial in self.folder.glob(f"*{PARTIAL}"):  # of a process that was killed while it wrote
            with suppress(FileNotFoundError):  # one of a process that lives, which has just given it its name
                if partial.is_file() and time.time() - partial.stat().st_mtime > STALE_SECONDS:
                    partial.unlink()

    def read(self) -> Contents:
        """Every record in the folder and those below it, and every JSON file that is no record, with the reason."""
        contents = Contents()
        for file in sorted(self.folder.rglob("*.json")):
            try:
                record = read_record(file)
            except NotARecord as error:
                contents.reasons_by_file[file] = str(error)
                if isinstance(error, Foreign):
                    contents.foreign.add(file)
            else:
                contents.records[record.id] = record
        return contents

    def find(self, identifier: str) -> Record | None:
        """The record of this id, or None where no file can be read that holds it, with the cell that the id stands for."""
        for file in sorted(self.folder.glob(f"*-{identifier}.json")):
            with suppress(NotARecord):
                record = read_record(file)
                if record.id == identifier == identity(record.cell, record.environment):
                    return record
        return None

    def write(self, record: Record) -> Path:
        """Write `record` under its name, in place of an older one of the same id. Raises OSError."""
        return write_json(self.folder / record.file_name, to_json(record))


def read_json(path: Path) -> Any:
    """What a JSON file holds, as plain_document has it. Raises OSError; ValueError where it is no file, or no such JSON."""

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # a FIFO would wait for its writer

    with open(path, encoding="utf-8", opener=opened) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("it is no regular file")
        if state.st_size > MOST_BYTES:
            raise ValueError(f"it is larger than {MOST_BYTES / 2**30:.0f} GiB")
        try:
            return plain_document(json.load(file))
        except RecursionError:
            raise ValueError("its lists and objects are nested too deeply") from None


def read_record(file: Path) -> Record:
    """The record that a file holds. Raises NotARecord, also where the file cannot be read."""
    try:
        document = read_json(file)
    except (OSError, ValueError) as error:
        raise NotARecord(f"not readable as JSON ({error})") from error
    record = from_json(document)
    if (reason := flaw(record)) is not None:
        raise NotARecord(reason)
    return record


def write_json(path: Path, document: object) -> Path:
    """Write `document` to `path` whole or not at all: to a file beside it, then renamed. Raises OSError."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=PARTIAL)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return path
