"""Files of data: read within limits, compressed or not, and written whole or not at all."""

import gzip
import json
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from .soundness import plain_document

PARTIAL = ".partial"  # a file that is being written; no reader looks at it
COMPRESSED = ".gz"
MOST_BYTES = 2**30  # of a file's content, which is read whole
CHUNK_BYTES = 2**16
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)  # what reading compressed data raises


@contextmanager
def content(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed where its name ends in .gz.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no regular file, or larger than MOST_BYTES. A reader has to count what is decompressed.
        EOFError, zlib.error, BadGzipFile: while reading, where compressed data are damaged.
    """

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # a FIFO would wait for its writer

    with open(path, "rb", opener=opened) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("it is no regular file")
        if state.st_size > MOST_BYTES:
            raise ValueError(too_large())
        if path.suffix == COMPRESSED:
            with gzip.open(file) as decompressed:
                yield cast("BinaryIO", decompressed)
        else:
            yield file


def too_large() -> str:
    return f"it is larger than {MOST_BYTES / 2**30:.0f} GiB"


def parsed(text: bytes) -> Any:
    """JSON in UTF-8, as plain_document has it. Raises ValueError where it is none."""
    try:
        return plain_document(json.loads(text.decode()))
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None


def read_json(path: Path) -> Any:
    """What a JSON file holds, as plain_document has it. Raises OSError; ValueError where it is no file, or no such JSON."""
    whole = bytearray()
    try:
        with content(path) as file:
            while chunk := file.read(CHUNK_BYTES):
                whole += chunk
                if len(whole) > MOST_BYTES:
                    raise ValueError(too_large())
    except DAMAGED as error:
        raise ValueError(f"its compressed data are damaged: {error}") from None
    return parsed(bytes(whole))


def stored(path: Path) -> Path:
    """The file itself, or what stands for it compressed where there is only that."""
    compressed = path.with_name(path.name + COMPRESSED)
    return compressed if compressed.exists() and not path.exists() else path


def write_json(path: Path, document: object) -> Path:
    """Write `document` to `path` whole or not at all. Raises OSError."""
    return write_whole(path, f"{json.dumps(document, indent=1)}\n".encode())


def write_whole(path: Path, data: bytes) -> Path:
    """Write to a file beside `path`, then give it its name. Raises OSError."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=PARTIAL)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return path
