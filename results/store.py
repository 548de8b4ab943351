"""A folder of records. Files are written whole or not at all, and only JSON is ever read back."""

import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .document import NotARecord, from_json, to_json
from .record import Record

PARTIAL = ".partial"  # a file that is being written; no reader looks at it
STALE_SECONDS = 3600.0


@dataclass
class Contents:
    """records: by id. reasons_by_file: why a file was not taken for a record."""

    records: dict[str, Record] = field(default_factory=dict)
    reasons_by_file: dict[Path, str] = field(default_factory=dict)


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
                if time.time() - partial.stat().st_mtime > STALE_SECONDS:
                    partial.unlink()

    def read(self) -> Contents:
        """Every record in the folder and those below it, and every JSON file that is no record, with the reason."""
        contents = Contents()
        for file in sorted(self.folder.rglob("*.json")):
            try:
                record = read_record(file)
            except NotARecord as error:
                contents.reasons_by_file[file] = str(error)
            else:
                contents.records[record.id] = record
        return contents

    def find(self, identifier: str) -> Record | None:
        """The record of this id, or None where no file holds one that can be read."""
        for file in self.folder.glob(f"*-{identifier}.json"):
            with suppress(NotARecord):
                return read_record(file)
        return None

    def write(self, record: Record) -> Path:
        """Write `record` under its name, in place of an older one of the same id. Raises OSError."""
        return write_json(self.folder / record.file_name, to_json(record))


def read_record(file: Path) -> Record:
    """The record that a file holds. Raises NotARecord, also where the file cannot be read."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotARecord(f"not readable as JSON ({error})") from error
    return from_json(document)


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
