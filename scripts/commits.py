"""The commit whose code a committed record is of, where its tree was no clean checkout: results/reference/commits.csv.

python scripts/commits.py

git calls a tree modified for a file beside the code too, and a tree without git names no commit. Each record has a digest of
its code. This looks for a commit of the history with the same digest, the record's own first, and writes a row a digest.
Digests have two forms:
- of every Python file of models, systems and runners, byte for byte (until 2026-11-22);
- of the syntax trees that the cell may run (runners/machine/code.py). It takes the Python of the record, as python3.12.

Exit status 1 where a record's code is no commit's; it stays a modified one.
"""

import csv
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

if not __package__:  # run as a file: the rooms are beside its folder
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import conf
from results.environment import Environment
from results.files import write_whole
from results.pack import SUFFIX, documents_of
from scripts.arguments import Parser

ROOT = conf.FOLDER.parent
REFERENCE = ROOT / "results" / "reference"
FILE = REFERENCE / "commits.csv"
COLUMNS = ("code", "commit")
ROOMS = ("models", "systems", "runners")  # whose files the first form digests
CODE = "runners/machine/code.py"  # which a commit has that makes digests of the second form
LETTERS = 12  # of a digest
MOST_COMMITS = 60  # before a record that names none, of which one may have its code
ROOTS = """
import json, sys
from runners.roots import roots
from results.document import from_json
document = json.load(sys.stdin)
if "trace" in document["cell"]["runner"]["options"]:
    document["cell"]["runner"]["options"]["trace"] = None  # a file that nobody else may have, and no module
print(json.dumps(roots(from_json(document).cell)))
"""
DIGEST = """
import json, sys
from pathlib import Path
from runners.machine.code import Sources
print(Sources(Path.cwd()).digest(json.load(sys.stdin)))
"""


@cache
def commits_by_code() -> Mapping[str, str]:
    """The commit of each digest that `FILE` has; an installed package has no such file, and none of its records."""
    if not FILE.exists():
        return {}
    with FILE.open(encoding="utf-8", newline="") as rows:
        return {row["code"]: row["commit"] for row in csv.DictReader(rows)}


def code_state(environment: Environment) -> tuple[str | None, bool | None]:
    """The commit of the code that a record is of, and whether files differ from it; None where neither is known."""
    if environment.modified is not False and (commit := commits_by_code().get(environment.code)):
        return commit, False
    return environment.commit, environment.modified


class History:
    """The commits of a repository.

    Args:
        root: its folder.
    """

    def __init__(self, root: Path):
        self.root = root
        self.commits = self._git("log", "--reverse", "--topo-order", "--format=%H").split()
        self._contents: dict[str, bytes] = {}
        command = ["git", "-C", str(root), "cat-file", "--batch"]
        self._blobs = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def whole_digest(self, commit: str) -> str:
        """Of every Python file of ROOMS, in the order of their paths."""
        lines = [line.split("\t") for line in self._git("ls-tree", "-r", commit, *ROOMS).splitlines()]
        blobs = {PurePosixPath(path): about.split()[2] for about, path in lines if path.endswith(".py")}
        digest = sha256()
        for room in ROOMS:
            for path in sorted(path for path in blobs if path.parts[0] == room):
                digest.update(str(path).encode() + self._content(blobs[path]))
        return digest.hexdigest()[:LETTERS]

    @cached_property
    def by_whole_digest(self) -> dict[str, str]:
        """The first commit of each digest of the first form, among commits that make no digest of the second."""
        commits = [commit for commit in self.commits if not self.has(commit, CODE)]
        return {self.whole_digest(commit): commit for commit in reversed(commits)}

    def closure_digest(self, commit: str, document: Any, python: str) -> str | None:
        """Of what a record's cell may run, as the commit's own code says; None where the commit does not read the record."""
        with tempfile.TemporaryDirectory() as folder:
            files = subprocess.run(["git", "-C", str(self.root), "archive", commit], capture_output=True, check=True).stdout
            with tarfile.open(fileobj=io.BytesIO(files)) as archive:
                archive.extractall(folder, filter="data")
            roots = _run([sys.executable, "-c", ROOTS], folder, json.dumps(document))
            return None if roots is None else _run([python, "-c", DIGEST], folder, roots)

    def has(self, commit: str, path: str) -> bool:
        return bool(self._git("ls-tree", commit, path))

    def before(self, when: str) -> list[str]:
        """The commits made before a moment, the newest first."""
        return self._git("log", f"--before={when}", "--format=%H").split()

    def _content(self, blob: str) -> bytes:
        if blob not in self._contents:
            into, out = self._blobs.stdin, self._blobs.stdout
            assert into is not None and out is not None
            into.write(f"{blob}\n".encode())
            into.flush()
            size = int(out.readline().split()[2])
            self._contents[blob] = out.read(size)
            out.read(1)  # the end of its line
        return self._contents[blob]

    def close(self) -> None:
        self._blobs.communicate()

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _run(command: list[str], folder: str, given: str) -> str | None:
    """What a program prints; None where it fails."""
    done = subprocess.run(command, cwd=folder, input=given, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def python_of(version: str) -> str | None:
    """The Python of such a version, as 3.12.3; None where none of 3.12 runs."""
    name = f"python{'.'.join(version.split('.')[:2])}"
    if shutil.which(name) is not None and _run([name, "-c", "print(1)"], ".", "") is not None:
        return name
    print(f"{name} does not run here: digests of code that it made are not compared", file=sys.stderr)
    return None


def wanted() -> Iterator[Any]:
    """The document of a committed record of each code that was measured in no clean checkout."""
    seen: set[str] = set()
    for pack in sorted(REFERENCE.glob(f"h*/*{SUFFIX}")):
        for document in documents_of(pack):
            assert isinstance(document, dict), pack
            about = document["environment"]
            if about.get("modified") is not False and about["code"] not in seen:
                seen.add(about["code"])
                yield document


def found(history: History, documents: Iterable[Any]) -> Iterator[tuple[str, str | None]]:
    """The code of each record, and the commit that has it; None where none has."""
    whole = history.by_whole_digest
    for document in documents:
        about = document["environment"]
        code, own = about["code"], about.get("commit")
        if own is not None and not history.has(own, CODE) and history.whole_digest(own) == code:
            yield code, own
        elif code in whole:
            yield code, whole[code]
        else:
            python = python_of(about["python"])
            near = [own] if own is not None else history.before(document["when"])[:MOST_COMMITS]
            commits = [commit for commit in near if history.has(commit, CODE)] if python is not None else []
            yield code, next((c for c in commits if history.closure_digest(c, document, python or "") == code), None)


def main() -> None:
    Parser(__doc__).parse_args()
    history = History(ROOT)
    rows = dict(found(history, wanted()))
    history.close()
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([COLUMNS, *sorted((code, commit) for code, commit in rows.items() if commit is not None)])
    write_whole(FILE, out.getvalue().encode())
    missing = [code for code, commit in rows.items() if commit is None]
    print(f"{FILE}: {len(rows) - len(missing)} of {len(rows)} codes that no clean checkout had are a commit's")
    if missing:
        sys.exit(f"opweave: no commit has the code {', '.join(missing)}")


if __name__ == "__main__":
    main()
