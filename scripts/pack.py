"""Packs the records of a sweep into one compressed file, and back.

python scripts/pack.py FOLDER FILE.jsonl.gz
python scripts/pack.py FILE.jsonl.gz FOLDER

A sweep writes a JSON file a cell, so that an interruption costs one cell; once it has ended, its records are packed. All
that reads records reads FOLDER and FILE.jsonl.gz alike (results/README.md). Each record's document is a line, unchanged, in
the order of their files' names; the same records give the same bytes. FOLDER stays as it is.

The way back writes a JSON file a record into FOLDER, which is empty or not there: a sweep over it goes on where that of the
packed records ended.

Exit status 2, with nothing written, where a record is damaged, two have one id, or something would be written over.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if not __package__:  # run as a file: the rooms are beside its folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf.text import counted
from scripts.interrupts import tell_interrupts

if __name__ == "__main__":
    tell_interrupts()

from results.document import Foreign, NotARecord
from results.files import read_json, write_json, write_whole
from results.pack import SUFFIX, documents_of, is_pack, packed, sound_record
from results.record import Record
from results.store import has_other_rounds, name_by_rounds
from results.words import printable
from scripts.arguments import Parser, path_argument


def sizes(num_bytes: int) -> str:
    return f"{num_bytes / 1e3:,.0f} kB"


def documents_in(folder: Path, parser: Parser) -> Iterator[tuple[str, Path, object]]:
    """The name that a record's file has, its file, and its document; one that is damaged ends the program."""
    for file in sorted(folder.rglob("*.json")):
        try:
            document = read_json(file)
            record = sound_record(document)
            is_beside = record.comparison is not None and file.name == name_by_rounds(record)
            yield file.name if is_beside else record.file_name, file, document
        except Foreign as error:
            print(f"left out {printable(str(file))}: {error}", file=sys.stderr)
        except NotARecord as error:
            parser.error(f"{printable(str(file))} is no record: {error}")
        except (OSError, ValueError) as error:
            parser.error(f"{printable(str(file))} cannot be read: {error}")


def pack(folder: Path, target: Path, parser: Parser) -> None:
    if inner := next(folder.rglob(f"*{SUFFIX}"), None):
        parser.error(f"{inner} is packed already: unpack it beside the others, or pack a folder without it")
    records: dict[str, tuple[Path, object]] = {}
    for name, file, document in documents_in(folder, parser):
        if name in records:
            parser.error(f"{records[name][0]} and {file} are of one id: keep the one that counts")
        records[name] = file, document
    if not records:
        parser.error(f"no record in {folder}")
    data = packed(document for _, (_, document) in sorted(records.items()))
    if target.exists() and target.read_bytes() != data:
        parser.error(f"{target} is there and holds something else: remove it, or name another file")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, data)
    before = sum(file.stat().st_size for file, _ in records.values())
    print(f"{target}: {counted(len(records), 'record')}, {sizes(len(data))}, which take {sizes(before)} in {folder}")


def unpack(source: Path, folder: Path, parser: Parser) -> None:
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty: name a new folder")
    try:
        documents = documents_of(source)
        names = names_of([sound_record(document) for document in documents])
    except (OSError, ValueError) as error:
        parser.unreadable(source, error)
    if len(set(names)) < len(names):
        parser.error(f"{source} has two records of one id: {max(names, key=names.count)}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in zip(names, documents, strict=True):
        write_json(folder / name, document)
    print(f"{folder}: {counted(len(documents), 'record')} of {source}")


def names_of(records: Sequence[Record]) -> list[str]:
    """A file's name for each record: of one id the last has the id's own, and those of other rounds have names by these."""
    last = {record.file_name: record for record in records}
    return [
        name_by_rounds(record) if has_other_rounds(record, last[record.file_name]) else record.file_name
        for record in records
    ]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("source", type=path_argument, metavar="FOLDER | FILE.jsonl.gz")
    parser.add_argument("target", type=path_argument, metavar="FILE.jsonl.gz | FOLDER")
    arguments = parser.parse_args()
    source: Path = arguments.source
    target: Path = arguments.target
    parser.check_results(source)
    if source.is_dir() != is_pack(target):
        parser.error(f"{source} and {target}: one is a folder, and the other a file *{SUFFIX}")
    (parser.check_file if source.is_dir() else parser.check_folder)(target)
    try:
        (pack if source.is_dir() else unpack)(source, target, parser)
    except OSError as error:
        parser.error(f"{error.filename or target}: {error.strerror or error}")


if __name__ == "__main__":
    main()
