"""Which commit the code is of, and whether it was changed since: from a manifest that fits, else from git.

`python -m runners.machine.manifest` in a checkout writes manifest.json beside the rooms: the commit, whether the tree was
modified, and the SHA-256 of every tracked file. It travels with the files to other machines and is checked there.
Files that no code reads, as a folder of wheels beside the rooms, modify nothing.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from .installation import ROOT

MANIFEST = "manifest.json"
# Where a file that the manifest does not list may change what runs.
ROOMS = ("conf", "hydra_plugins", "models", "results", "runners", "scripts", "systems")
IGNORED = ("results/runs", "results/cache", "results/exhibits")  # folders of the user's, as in .gitignore
CODE = (".py", ".yaml")


class NoCheckout(Exception):
    """A folder is no checkout of git's, or git does not read it."""


@dataclass(frozen=True)
class State:
    """What code runs.

    Attributes:
        commit: the hash of the commit; None where nothing names it.
        modified: do the files differ from that commit? None where there is none.
    """

    commit: str | None = None
    modified: bool | None = None


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    Attributes:
        commit: the hash of the commit that was checked out.
        modified: did the files differ from that commit when the manifest was written?
        files: the SHA-256 of every tracked file, by its path from the root.
    """

    commit: str
    modified: bool
    files: dict[str, str]


@cache
def code_state() -> State:
    """The state of the code that this process runs, found out once."""
    return state(ROOT)


def state(root: Path) -> State:
    """The state of the files under `root`.

    Args:
        root: the folder that holds the rooms. A manifest that all files fit tells the state, also beside a `.git`, which may
            have come without the last commits. Else git tells it where there is a `.git`, and else the manifest. Without
            either the state is unknown.
    """
    manifest = read(root)
    if manifest is not None and not any(_differences(root, manifest)):
        return State(manifest.commit, manifest.modified)
    if (root / ".git").exists():
        try:
            return State(*_git_state(root))
        except NoCheckout:
            return State()
    return State() if manifest is None else State(manifest.commit, True)


def make(root: Path) -> Manifest:
    """The manifest of a checkout. Raises NoCheckout."""
    commit, modified = _git_state(root)
    paths = [path for path in _git(root, "ls-files", "-z").split("\0") if (root / path).is_file()]
    return Manifest(commit, modified, {path: _sha256(root / path) for path in paths})


def read(root: Path) -> Manifest | None:
    """The manifest that lies in a folder; None where there is none, or where its content is no manifest."""
    try:
        document = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
        return Manifest(str(document["commit"]), bool(document["modified"]), dict(document["files"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _differences(root: Path, manifest: Manifest) -> Iterator[str]:
    """The paths of files that are not as the manifest says: changed, missing, or code that it does not list."""
    for path, digest in manifest.files.items():
        if not (root / path).is_file() or _sha256(root / path) != digest:
            yield path
    for file in [*root.glob("*.py"), *(file for room in ROOMS for file in (root / room).rglob("*"))]:
        path = file.relative_to(root).as_posix()
        if _is_code(path) and path not in manifest.files:
            yield path


def _is_code(path: str) -> bool:
    """May a file change what runs, as it lies at the root or in a room?"""
    room, _, inner = path.partition("/")
    return path.endswith(CODE) and (not inner or room in ROOMS) and not path.startswith(IGNORED)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _git_state(root: Path) -> tuple[str, bool]:
    """The commit that is checked out, and whether files differ from it, or code is untracked. Raises NoCheckout."""
    lines = _git(root, "status", "--porcelain", "--untracked-files=all").splitlines()
    return _git(root, "rev-parse", "HEAD").strip(), any(not line.startswith("?? ") or _is_code(line[3:]) for line in lines)


def _git(root: Path, *arguments: str) -> str:
    """What git prints. Raises NoCheckout."""
    try:
        run = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoCheckout(f"{root} is no checkout that git reads") from error
    return run.stdout


def main() -> None:
    """Write the manifest of the checkout that this module lies in."""
    try:
        manifest = make(ROOT)
    except NoCheckout as error:
        sys.exit(f"opweave: {error}")
    (ROOT / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")
    modified = ", modified" if manifest.modified else ""
    print(f"{ROOT / MANIFEST}: {len(manifest.files)} files of {manifest.commit[:12]}{modified}")


if __name__ == "__main__":
    main()
