"""The folder of compiled artefacts: engines, tuned modules, ONNX files, kept from one run to the next within a bound."""

import hashlib
import inspect
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from filelock import FileLock, Timeout

from .notice import Notice

DEFAULT_GIB = 8.0
MANIFEST = "manifest.json"
PRIVATE = 0o700


@dataclass(frozen=True)
class Artefact:
    """What `Cache.artefact` holds for its caller: files in `folder`, and the notes that their maker left."""

    folder: Path
    made: bool  # now, rather than found
    seconds: float  # that making it took, whenever that was
    notes: dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One entry as a listing shows it. `used`: nanoseconds since the epoch."""

    folder: Path
    kind: str
    label: str
    bytes: int
    used: int


@dataclass
class Cache:
    """Artefacts by what they were made of (a JSON-able `of`), in a private folder, the least recently used dropped first.

    folder: where the environment variable OPWEAVE_CACHE says, else ~/.cache/opweave; the artefacts lie in its `artefacts`.
    bound: bytes that they may occupy together, by default OPWEAVE_CACHE_GIB (8 GiB). Each entry has a lock: of two processes
    that want the same artefact one makes it and the other waits, and none is dropped while it is being read.

    A TVM library and a TensorRT engine are code, and loading one runs it. So every file is checked against the SHA-256 that
    was written beside it, which finds damage, and the folder is its owner's alone, so that nobody else places code there.
    Nothing is ever unpickled here.
    """

    folder: Path = field(default_factory=lambda: default_folder())
    bound: int = field(default_factory=lambda: default_bound())

    def __post_init__(self) -> None:
        self.root = self.folder / "artefacts"
        self._scratch: TemporaryDirectory[str] | None = None

    @contextmanager
    def artefact(
        self, kind: str, label: str, of: dict[str, Any], make: Callable[[Path], dict[str, Any] | None]
    ) -> Iterator[Artefact]:
        """Hold the artefact of this `kind` that was made of `of`, made now if it is not there.

        make: writes files into the folder it is given, and may return notes to keep with them. An artefact is there whole or
        not at all. label: what a listing calls it. Raises what `make` raises, and BadOption for a folder that is not safe.
        """
        with self._locked(kind, of) as (folder, partial):
            manifest = _verified(folder, of)
            if made := manifest is None:
                manifest = self._make(folder, partial, kind, label, of, make)
            _touch(folder / MANIFEST)
            yield Artefact(folder, made, manifest["seconds"], manifest["notes"])
        if made:
            self._trim(folder)

    @contextmanager
    def workspace(self, kind: str, label: str, of: dict[str, Any]) -> Iterator[Path]:
        """Hold a folder that grows from run to run, like a tuning log; its files are the caller's, unchecked."""
        with self._locked(kind, of) as (folder, _):
            folder.mkdir(mode=PRIVATE, exist_ok=True)
            _write(folder / MANIFEST, {"kind": kind, "label": label, "of": of, "files": None})
            try:
                yield folder
            finally:
                _touch(folder / MANIFEST)
        self._trim(folder)

    def entries(self) -> list[Entry]:
        """What is there, the most recently used first."""
        found = []
        for manifest in self.root.glob(f"entries/*/{MANIFEST}"):
            try:
                document, used = json.loads(manifest.read_text(encoding="utf-8")), manifest.stat().st_mtime_ns
                entry = Entry(manifest.parent, document["kind"], document["label"], _size(manifest.parent), used)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # another process drops it just now, or it is damaged, and then whoever wants it makes it anew
            found.append(entry)
        return sorted(found, key=lambda entry: -entry.used)

    def measurements(self) -> list[Path]:
        """The files beside the artefacts in which measured costs are kept."""
        return [file for file in sorted(self.folder.glob("*.json")) if _is_measurements(file)]

    def empty(self) -> tuple[int, int]:
        """Drop every artefact that no process holds, and the measured costs; returns how many there were, and the bytes."""
        count = size = 0
        folders = sorted(self.root.glob("entries/*")) + sorted(self.root.glob("partial/*"))
        for folder in folders:
            held = _size(folder)
            if self._drop(folder):
                count, size = count + (folder.parent.name == "entries"), size + held
        for file in self.measurements():
            count, size = count + 1, size + file.stat().st_size
            file.unlink(missing_ok=True)
        return count, size

    @contextmanager
    def _locked(self, kind: str, of: dict[str, Any]) -> Iterator[tuple[Path, Path]]:
        """The folder of an entry, and the one in which it is made, both this process's alone meanwhile."""
        digest = hashlib.sha256(json.dumps([kind, of], sort_keys=True).encode()).hexdigest()
        name = f"{kind}-{digest[:24]}"
        root = self._prepared_root()
        with FileLock(root / "locks" / f"{name}.lock"):
            yield root / "entries" / name, root / "partial" / name

    def _prepared_root(self) -> Path:
        """The folder, made and private; a temporary one for this process where it cannot be written."""
        if self._scratch is not None:
            return Path(self._scratch.name)
        try:
            for folder in (self.root, *(self.root / part for part in ("entries", "locks", "partial"))):
                folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            with TemporaryDirectory(dir=self.root / "partial"):
                pass
        except OSError as error:
            warnings.warn(f"{self.root} cannot be written, so nothing is kept: {error}", category=Notice, stacklevel=2)
            self._scratch = TemporaryDirectory(prefix="opweave-")
            self.root = Path(self._scratch.name)
            return self._prepared_root_of(self.root)
        status = self.root.stat()
        if hasattr(os, "getuid") and status.st_uid != os.getuid():
            from systems.base import BadOption  # which needs torch, and a listing of the cache does not

            raise BadOption(f"{self.root} belongs to another user, who could place code there: set OPWEAVE_CACHE")
        if status.st_mode & 0o077:
            self.root.chmod(PRIVATE)
        return self.root

    def _prepared_root_of(self, root: Path) -> Path:
        for part in ("entries", "locks", "partial"):
            (root / part).mkdir(mode=PRIVATE, exist_ok=True)
        return root

    def _make(
        self,
        folder: Path,
        partial: Path,
        kind: str,
        label: str,
        of: dict[str, Any],
        make: Callable[[Path], dict[str, Any] | None],
    ) -> dict[str, Any]:
        for left in (folder, partial):  # of a process that was killed, or damaged since
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(mode=PRIVATE)
        try:
            begin = time.perf_counter()
            notes = make(partial) or {}
            manifest = {
                "kind": kind,
                "label": label,
                "of": of,
                "seconds": time.perf_counter() - begin,
                "notes": notes,
                "files": {str(f.relative_to(partial)): _digest(f) for f in sorted(partial.rglob("*")) if f.is_file()},
            }
            _write(partial / MANIFEST, manifest)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return manifest

    def _trim(self, keep: Path) -> None:
        """Drop the least recently used until the bound holds; `keep`, which was used just now, stays in any case."""
        entries = self.entries()
        total = sum(entry.bytes for entry in entries)
        for entry in reversed(entries):
            if total <= self.bound:
                break
            if entry.folder != keep and self._drop(entry.folder):
                total -= entry.bytes

    def _drop(self, folder: Path) -> bool:
        """Remove an entry unless a process holds it."""
        try:
            with FileLock(self.root / "locks" / f"{folder.name}.lock", timeout=0):
                if folder.exists():
                    trash = Path(mkdtemp(dir=self.root / "partial", prefix="dropped-"))
                    folder.rename(trash / folder.name)  # at once, so that nobody finds half of it
                    shutil.rmtree(trash, ignore_errors=True)
        except Timeout:
            return False
        return True


def code_of(*modules: str) -> str:
    """A digest of the source of these modules, which are imported: for the `of` of what they make, so that nothing made by
    older code is taken for theirs.
    """
    return hashlib.sha256("\0".join(inspect.getsource(sys.modules[name]) for name in modules).encode()).hexdigest()


def default_folder() -> Path:
    """Where all that is kept between runs lies: OPWEAVE_CACHE, else ~/.cache/opweave."""
    folder = os.environ.get("OPWEAVE_CACHE")
    return Path(folder).expanduser().absolute() if folder else Path.home() / ".cache" / "opweave"


def default_bound() -> int:
    """OPWEAVE_CACHE_GIB in bytes. Raises BadOption where it is no number of GiB."""
    text = os.environ.get("OPWEAVE_CACHE_GIB")
    try:
        gib = DEFAULT_GIB if text is None else float(text)
        if not 0 <= gib < float("inf"):
            raise ValueError
    except ValueError:
        from systems.base import BadOption

        raise BadOption(f"OPWEAVE_CACHE_GIB={text} is not a number of GiB") from None
    return int(gib * 2**30)


def _verified(folder: Path, of: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of an artefact whose every file is as it was written, or None."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["of"] != json.loads(json.dumps(of)):
            return None
        if any(_digest(folder / name) != digest for name, digest in manifest["files"].items()):
            warnings.warn(f"{folder} is damaged and is made anew", category=Notice, stacklevel=2)
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _write(file: Path, document: dict[str, Any]) -> None:
    """Whole or not at all."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(document), encoding="utf-8")
    os.replace(partial, file)


def _touch(file: Path) -> None:
    now = time.time_ns()  # the file system's own clock ticks in milliseconds
    os.utime(file, ns=(now, now))


def _size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _is_measurements(file: Path) -> bool:
    """Is it one of our files of measured costs? OPWEAVE_CACHE may name a folder that holds other things too."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and set(document) == {"of", "measured"}
