"""A folder of records. Files are written whole or not at all, and only JSON is ever read back."""

import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .amended import amended
from .record import file_name, problem

PARTIAL = ".partial"  # a file that is being written; no reader looks at it
STALE_SECONDS = 3600.0


@dataclass
class Contents:
    """records by id; skipped: file -> why it was not taken for a record."""

    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[Path, str] = field(default_factory=dict)


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
        for left in self.folder.glob(f"*{PARTIAL}"):  # of a process that was killed while it wrote
            with suppress(FileNotFoundError):  # one of a process that lives, which has just given it its name
                if time.time() - left.stat().st_mtime > STALE_SECONDS:
                    left.unlink()

    def read(self) -> Contents:
        """Every record, without what is known by now to be wrong in it, and every file that is none, with the reason."""
        contents = Contents()
        for file in sorted(self.folder.rglob("*.json")):
            try:
                document = json.loads(file.read_text(encoding="utf-8"))
                reason = problem(document)
            except (OSError, ValueError) as error:
                reason = f"not readable as JSON ({error})"
            if reason is None:
                contents.records[document["id"]] = amended(document)
            else:
                contents.skipped[file] = reason
        return contents

    def find(self, identifier: str) -> dict[str, Any] | None:
        """The record of this id, or None where there is none that can be read."""
        for file in self.folder.glob(f"*-{identifier}.json"):
            try:
                document = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            if problem(document) is None:
                return document
        return None

    def write(self, record: dict[str, Any]) -> Path:
        """Write `record` under its name, in place of an older one of the same id. Raises OSError."""
        return write_json(self.folder / file_name(record), record)


def write_json(path: Path, document: Any) -> Path:
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
