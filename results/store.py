"""A folder of records, or one sweep's in a file. Files are written whole or not at all, and only JSON is ever read back."""

import glob
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .comparison import has_sound_rounds
from .document import Foreign, NotARecord, to_json
from .files import PARTIAL, read_json, write_json
from .pack import SUFFIX, is_pack, read_pack, sound_record
from .record import Record, identity
from .words import printable

STALE_SECONDS = 3600.0


@dataclass
class Contents:
    """What a folder holds.

    Args:
        records: the newest of each id.
        earlier: of the same ids, with the rounds of other sweeps.
        reasons_by_file: why a file was not taken for a record, or for a pack of them.
        foreign: the files among those that are of another kind, and not damaged.
        reasons_by_line: why a line of a pack was not taken for a record, by file and line.
    """

    records: dict[str, Record] = field(default_factory=dict)
    earlier: list[Record] = field(default_factory=list)
    reasons_by_file: dict[Path, str] = field(default_factory=dict)
    foreign: set[Path] = field(default_factory=set)
    reasons_by_line: dict[tuple[Path, int], str] = field(default_factory=dict)

    @property
    def all(self) -> list[Record]:
        """The records, and the earlier ones."""
        return [*self.earlier, *self.records.values()]

    @property
    def is_damaged(self) -> bool:
        """Is there a file, or a line of a pack, that may have been a record, and cannot be read?"""
        return len(self.foreign) < len(self.reasons_by_file) or bool(self.reasons_by_line)

    @property
    def skipped(self) -> list[str]:
        """A line for each file, and each line of a pack, that was not taken for a record."""
        reasons = {str(file): reason for file, reason in self.reasons_by_file.items()}
        reasons |= {f"{file}, line {number}": reason for (file, number), reason in self.reasons_by_line.items()}
        return [f"skipped {printable(place)}: {reason}" for place, reason in reasons.items()]

    def add(self, record: Record) -> None:
        """Take a record as its id's, unless a newer one is there."""
        there = self.records.get(record.id)
        if there is not None:
            older, record = (there, record) if there.when <= record.when else (record, there)
            if has_other_rounds(older, record):
                self.earlier.append(older)
        self.records[record.id] = record


class Store:
    """The records under `folder`: a JSON file each, or packed, a file a sweep. A pack may stand in the folder's place.

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
        """Every record in the folder and those below it, and what should be one and is not, with the reason."""
        contents = Contents()
        for part in self.parts():
            for record in part.all:
                contents.add(record)
            contents.reasons_by_file |= part.reasons_by_file
            contents.reasons_by_line |= part.reasons_by_line
            contents.foreign |= part.foreign
        return contents

    def parts(self) -> Iterator[Contents]:
        """What each pack holds, and then what all files of one record do: a sweep's cells are those of one part."""
        for file in [self.folder] if is_pack(self.folder) else sorted(self.folder.rglob(f"*{SUFFIX}")):
            pack = read_pack(file)
            part = Contents(reasons_by_line={(file, number): why for number, why in pack.reasons_by_line.items()})
            if pack.reason is not None:
                part.reasons_by_file[file] = pack.reason
            for record in pack.records:
                part.add(record)
            yield part
        yield self._loose()

    def _loose(self) -> Contents:
        contents = Contents()
        for file in sorted(self.folder.rglob("*.json")):
            try:
                contents.add(read_record(file))
            except NotARecord as error:
                contents.reasons_by_file[file] = str(error)
                if isinstance(error, Foreign):
                    contents.foreign.add(file)
        return contents

    def find(self, identifier: str) -> Record | None:
        """The record of this id, or None where no file can be read that holds it, with the cell that the id stands for.

        One in a file of its own comes before those in packs.
        """
        for record in self._named(identifier):
            if record.id == identifier == identity(record.cell, record.environment):
                return record
        return None

    def of_measurement(self, record: Record) -> list[Record]:
        """The same measurement's records, this one first: a record for each sweep whose rounds it took part in."""
        others = [other for other in self._named(record.id) if other.id == record.id and other.when == record.when]
        return [record, *(other for other in others if has_other_rounds(other, record))]

    def _named(self, identifier: str) -> Iterator[Record]:
        for name in (f"*-{identifier}.json", f"*-{identifier}-*.json"):
            for file in sorted(self.folder.glob(name)):
                with suppress(NotARecord):
                    yield read_record(file)
        for file in sorted(self.folder.glob(f"*{SUFFIX}")):
            yield from read_pack(file, identifier).records

    def write(self, record: Record) -> Path:
        """Write `record` under its name, in place of an older one of the same id. One of the same measurement whose rounds
        another sweep shares is kept beside it; those of an older measurement go. Raises OSError.

        What goes does so last: a process that is killed before has lost nothing.
        """
        file = self.folder / record.file_name
        obsolete = [] if record.comparison is None else [self.folder / name_by_rounds(record)]  # it has its own name now
        with suppress(NotARecord):
            there = read_record(file)
            if there.when != record.when:
                obsolete += self.folder.glob(f"{glob.escape(file.stem)}-*.json")
            elif has_other_rounds(there, record):
                write_json(self.folder / name_by_rounds(there), to_json(there))
        written = write_json(file, to_json(record))
        for kept in obsolete:
            kept.unlink(missing_ok=True)
        return written


def name_by_rounds(record: Record) -> str:
    """The name of a record's file beside one of the same measurement with other rounds."""
    assert record.comparison is not None
    return f"{Path(record.file_name).stem}-{record.comparison.group}.json"


def has_other_rounds(record: Record, other: Record) -> bool:
    """Has a record sound rounds that the other does not have?"""
    if record.comparison is None or not has_sound_rounds(record):
        return False
    return other.comparison is None or other.comparison.group != record.comparison.group


def why_no_records(path: Path) -> str | None:
    """Why a path can hold no records; None for a folder or a pack."""
    if path.is_dir() or (path.exists() and is_pack(path)):
        return None
    what = "a file" if path.exists() else "not there"
    return f"{path} is {what}: results are in a folder, or in a file *{SUFFIX}"


def read_record(file: Path) -> Record:
    """The record that a file holds. Raises NotARecord, also where the file cannot be read."""
    try:
        document = read_json(file)
    except (OSError, ValueError) as error:
        raise NotARecord(f"not readable as JSON ({error})") from error
    return sound_record(document)
