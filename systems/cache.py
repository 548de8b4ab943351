"""The folder of compiled artefacts: engines, tuned modules, ONNX files, which stay from run to run within a bound."""

import hashlib
import inspect
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TypeAlias

from filelock import FileLock, Timeout

from .notice import Caution, Notice

DEFAULT_GIB = 8.0
MANIFEST = "manifest.json"
PRIVATE = 0o700

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


@dataclass(frozen=True)
class Artefact:
    """What `Cache.artefact` holds for its caller.

    Args:
        folder: In which its files lie.
        is_new: It was made now, not found.
        seconds: That making it took, whenever that was.
        notes: That its maker left.
    """

    folder: Path
    is_new: bool
    seconds: float
    notes: Mapping[str, JSON]


@dataclass(frozen=True)
class Entry:
    """One entry as a listing shows it.

    Args:
        used_ns: When it was last used, in nanoseconds since the epoch.
    """

    folder: Path
    kind: str
    label: str
    bytes: int
    used_ns: int


@dataclass(frozen=True)
class Manifest:
    """The file MANIFEST of an artefact: what it was made of, and what is in it.

    Args:
        ingredients: Under the key "of".
        digests: SHA-256 of each file by its path, under the key "files".
    """

    kind: str
    label: str
    ingredients: dict[str, JSON]
    seconds: float
    notes: dict[str, JSON]
    digests: dict[str, str]

    @classmethod
    def from_json(cls, document: object) -> "Manifest":
        """Raises KeyError or TypeError for a document that is no manifest of an artefact."""
        if not isinstance(document, dict) or not isinstance(document["files"], dict):
            raise TypeError("this is no manifest of an artefact")
        values = (document[key] for key in ("kind", "label", "of", "seconds", "notes", "files"))
        return cls(*values)

    def to_json(self) -> dict[str, JSON]:
        return {
            "kind": self.kind,
            "label": self.label,
            "of": self.ingredients,
            "seconds": self.seconds,
            "notes": self.notes,
            "files": {**self.digests},
        }


@dataclass
class Cache:
    """Artefacts by their ingredients, in a private folder, from which the least recently used are dropped first.

    Each entry has a lock: of two processes that want the same artefact one makes it while the other waits, and none is
    dropped while a process reads it.

    A TVM library and a TensorRT engine are code, and loading one runs it. So every file is checked against the SHA-256 that
    was written beside it, which detects damage. The folder is its owner's alone, so that nobody else places code there.
    Nothing here is ever unpickled.

    Args:
        folder: From the environment variable OPWEAVE_CACHE, else ~/.cache/opweave; the artefacts lie in its `artefacts`.
        bound: Bytes that the artefacts may occupy together, by default OPWEAVE_CACHE_GIB (8 GiB).
    """

    folder: Path = field(default_factory=lambda: default_folder())
    bound: int = field(default_factory=lambda: default_bound())

    def __post_init__(self) -> None:
        self.root = self.folder / "artefacts"
        self._scratch: TemporaryDirectory[str] | None = None

    @contextmanager
    def artefact(
        self,
        kind: str,
        label: str,
        ingredients: Mapping[str, JSON],
        make: Callable[[Path], Mapping[str, JSON] | None],
    ) -> Iterator[Artefact]:
        """Hold the artefact of this kind and these ingredients, made now if the cache lacks it.

        An artefact is there whole or not at all.

        Args:
            label: What a listing calls it.
            ingredients: All that decides its content.
            make: Writes files into the folder it is called with, and may return notes to store with them.

        Raises:
            BadOption: The folder is not safe.
            Exception: Whatever `make` raises.
        """
        with self._locked(kind, ingredients) as (folder, partial):
            manifest = _verified(folder, ingredients)
            is_new = manifest is None
            if manifest is None:
                manifest = self._make(folder, partial, kind, label, ingredients, make)
            _touch(folder / MANIFEST)
            yield Artefact(folder, is_new, manifest.seconds, manifest.notes)
        if is_new:
            self._trim(folder)

    @contextmanager
    def workspace(self, kind: str, label: str, ingredients: Mapping[str, JSON]) -> Iterator[Path]:
        """Hold a folder that grows from run to run, like a tuning log; its files are the caller's, unchecked."""
        with self._locked(kind, ingredients) as (folder, _):
            folder.mkdir(mode=PRIVATE, exist_ok=True)
            _write(folder / MANIFEST, {"kind": kind, "label": label, "of": {**ingredients}, "files": None})
            try:
                yield folder
            finally:
                _touch(folder / MANIFEST)
        self._trim(folder)

    def entries(self) -> list[Entry]:
        """All entries, the most recently used first."""
        entries = []
        for manifest in self.root.glob(f"entries/*/{MANIFEST}"):
            try:
                document, used_ns = json.loads(manifest.read_text(encoding="utf-8")), manifest.stat().st_mtime_ns
                entry = Entry(manifest.parent, document["kind"], document["label"], _size(manifest.parent), used_ns)
            except (OSError, ValueError, KeyError, TypeError):
                continue  # another process drops it just now, or it is damaged, and who wants it makes it anew
            entries.append(entry)
        return sorted(entries, key=lambda entry: -entry.used_ns)

    def measurements(self) -> list[Path]:
        """The files of measured costs, which lie beside the artefacts."""
        return [file for file in sorted(self.folder.glob("*.json")) if _is_measurements(file)]

    def empty(self) -> tuple[int, int]:
        """Drop every artefact that no process holds, and the measured costs; returns their number and their bytes."""
        count = size = 0
        folders = sorted(self.root.glob("entries/*")) + sorted(self.root.glob("partial/*"))
        for folder in folders:
            num_bytes = _size(folder)
            if self._drop(folder):
                count, size = count + (folder.parent.name == "entries"), size + num_bytes
        for file in self.measurements():
            count, size = count + 1, size + file.stat().st_size
            file.unlink(missing_ok=True)
        return count, size

    @contextmanager
    def _locked(self, kind: str, ingredients: Mapping[str, JSON]) -> Iterator[tuple[Path, Path]]:
        """The folder of an entry, and the one in which it is made. Within, no other process touches either."""
        digest = hashlib.sha256(json.dumps([kind, ingredients], sort_keys=True).encode()).hexdigest()
        name = f"{kind}-{digest[:24]}"
        root = self._prepared_root()
        with FileLock(root / "locks" / f"{name}.lock"):
            yield root / "entries" / name, root / "partial" / name

    def _prepared_root(self) -> Path:
        """The folder, created and private; a temporary one for this process if it cannot be written."""
        if self._scratch is not None:
            return Path(self._scratch.name)
        try:
            for folder in (self.root, *(self.root / part for part in ("entries", "locks", "partial"))):
                folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            with TemporaryDirectory(dir=self.root / "partial"):
                pass
        except OSError as error:
            warnings.warn(not_kept(self.folder, error), category=Caution, stacklevel=2)
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
        ingredients: Mapping[str, JSON],
        make: Callable[[Path], Mapping[str, JSON] | None],
    ) -> Manifest:
        for remains in (folder, partial):  # a killed process left it, or it is damaged
            shutil.rmtree(remains, ignore_errors=True)
        partial.mkdir(mode=PRIVATE)
        try:
            begin = time.perf_counter()
            notes = make(partial) or {}
            seconds = time.perf_counter() - begin
            digests = {str(f.relative_to(partial)): _digest(f) for f in sorted(partial.rglob("*")) if f.is_file()}
            manifest = Manifest(kind, label, {**ingredients}, seconds, {**notes}, digests)
            _write(partial / MANIFEST, manifest.to_json())
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return manifest

    def _trim(self, newest: Path) -> None:
        """Drop entries until the bound holds: first what exceeds it alone, then the least recently used.

        `newest`, which was used just now, stays anyway. If it exceeds the bound alone, it takes no other's place: to drop
        all others would not make room for it.
        """
        others = [entry for entry in self.entries() if entry.folder != newest]
        others.sort(key=lambda entry: (entry.bytes <= self.bound, entry.used_ns))
        own = _size(newest)
        total = sum(entry.bytes for entry in others) + (own if own <= self.bound else 0)
        for entry in others:
            if total <= self.bound:
                break
            if self._drop(entry.folder):
                total -= entry.bytes

    def _drop(self, folder: Path) -> bool:
        """Remove an entry unless a process holds it; returns whether it is gone."""
        try:
            with FileLock(self.root / "locks" / f"{folder.name}.lock", timeout=0):
                if folder.exists():
                    trash = Path(mkdtemp(dir=self.root / "partial", prefix="dropped-"))
                    folder.rename(trash / folder.name)  # in one step, so that nobody sees half of it
                    shutil.rmtree(trash, ignore_errors=True)
        except Timeout:
            return False
        return True


def not_kept(folder: Path, error: OSError) -> str:
    """What is lost where the cache cannot be written, and what to do. Whatever cannot be kept says the same, once."""
    return (
        f"{folder} cannot be written ({error.strerror or error}): what is measured or compiled is lost at this process's "
        "end, and the next does it again; set OPWEAVE_CACHE to a folder that can be written"
    )


def code_of(*modules: str) -> str:
    """A digest of the source of these imported modules, an ingredient of what they make: nothing of older code is used."""
    return hashlib.sha256("\0".join(inspect.getsource(sys.modules[name]) for name in modules).encode()).hexdigest()


def code_in(*packages: str) -> str:
    """As `code_of`, of all modules of these packages, which need not be imported."""
    folders = [Path(folder) for name in packages for folder in import_module(name).__path__]
    sources = [file.read_text(encoding="utf-8") for folder in folders for file in sorted(folder.glob("*.py"))]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def default_folder() -> Path:
    """The folder of all that stays between runs: OPWEAVE_CACHE, else ~/.cache/opweave."""
    folder = os.environ.get("OPWEAVE_CACHE")
    return Path(folder).expanduser().absolute() if folder else Path.home() / ".cache" / "opweave"


def default_bound() -> int:
    """OPWEAVE_CACHE_GIB in bytes.

    Raises:
        BadOption: It is no number of GiB.
    """
    text = os.environ.get("OPWEAVE_CACHE_GIB")
    try:
        gib = DEFAULT_GIB if text is None else float(text)
        if not 0 <= gib < float("inf"):
            raise ValueError
    except ValueError:
        from systems.base import BadOption

        raise BadOption(f"OPWEAVE_CACHE_GIB={text} is not a number of GiB") from None
    return int(gib * 2**30)


def _verified(folder: Path, ingredients: Mapping[str, JSON]) -> Manifest | None:
    """The manifest of an artefact whose every file is as it was written, or None."""
    try:
        manifest = Manifest.from_json(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
        if manifest.ingredients != json.loads(json.dumps(ingredients)):
            return None
        if any(_digest(folder / name) != digest for name, digest in manifest.digests.items()):
            warnings.warn(f"{folder} is damaged and is made anew", category=Notice, stacklevel=2)
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _write(file: Path, document: Mapping[str, JSON]) -> None:
    """Write it whole or not at all."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(document), encoding="utf-8")
    os.replace(partial, file)


def _touch(file: Path) -> None:
    now = time.time_ns()  # the file system's own clock ticks in milliseconds only
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
