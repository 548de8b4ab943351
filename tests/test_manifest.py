"""A record names the commit of the code: from git, or from a manifest where the files came without it."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from made_records import cell

from runners.machine import environment, manifest
from runners.machine.manifest import State

FILES = {
    "run.py": "print(1)\n",
    "systems/eager.py": "EAGER = 1\n",
    "conf/system/eager.yaml": "name: eager\n",
    "README.md": "A page.\n",
    ".gitignore": "manifest.json\nresults/runs/\n",
}
OWN = {"name": "someone", "email": "someone@example.org"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of one commit."""
    root = tmp_path / "checkout"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, *(part for key, value in OWN.items() for part in ("-c", f"user.{key}={value}")), "commit", "-q", "-m", "One")
    return root


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout.strip()


def written(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `python -m runners.machine.manifest` does in a checkout."""
    monkeypatch.setattr(manifest, "ROOT", checkout)
    manifest.main()


@pytest.fixture
def copy(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a clean checkout with their manifest, without its `.git`."""
    written(checkout, monkeypatch)
    return shutil.copytree(checkout, checkout.parent / "copy", ignore=shutil.ignore_patterns(".git"))


def test_git_tells_where_it_is(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    assert manifest.state(checkout) == State(commit, False)
    written(checkout, monkeypatch)  # git-ignored, so that it changes nothing
    assert manifest.state(checkout) == State(commit, False)
    (checkout / "run.py").write_text("print(2)\n")
    assert manifest.state(checkout) == State(commit, True)


def test_files_that_no_code_reads_modify_no_checkout(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    for name in (".wheels/one.whl", "notes.txt", "mine/model.py", "results/runs/launch/config.yaml"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("")
    assert manifest.state(checkout) == State(commit, False)
    (checkout / "systems" / "added.py").write_text("")
    assert manifest.state(checkout) == State(commit, True)


def test_a_manifest_that_fits_is_believed_beside_git(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy may have come with the files of a commit that its `.git` lacks."""
    older = git(checkout, "rev-parse", "HEAD")
    (checkout / "run.py").write_text("print(2)\n")
    git(checkout, *(part for key, value in OWN.items() for part in ("-c", f"user.{key}={value}")), "commit", "-qam", "Two")
    newer = git(checkout, "rev-parse", "HEAD")
    written(checkout, monkeypatch)
    git(checkout, "reset", "--quiet", "--soft", older)
    assert manifest.state(checkout) == State(newer, False)
    (checkout / "run.py").write_text("print(3)\n")
    assert manifest.state(checkout) == State(older, True)


def test_a_manifest_tells_where_there_is_no_git(checkout: Path, copy: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    assert set(manifest.read(copy).files) == set(FILES)  # type: ignore[union-attr]
    assert manifest.state(copy) == State(commit, False)


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "systems" / "eager.py").write_text("EAGER = 2\n"),
        lambda root: (root / "README.md").write_text("Another page.\n"),
        lambda root: (root / "conf" / "system" / "eager.yaml").unlink(),
        lambda root: (root / "systems" / "added.py").write_text(""),
        lambda root: (root / "conf" / "system" / "added.yaml").write_text(""),
        lambda root: (root / "added.py").write_text(""),
    ],
    ids=["changed code", "changed page", "missing", "added code", "added options", "added at the root"],
)
def test_what_differs_from_the_manifest_is_a_modified_tree(copy: Path, change: Callable[[Path], object]) -> None:
    change(copy)
    assert manifest.state(copy) == State(manifest.read(copy).commit, True)  # type: ignore[union-attr]


def test_what_no_code_reads_modifies_nothing(copy: Path) -> None:
    for name in ("results/runs/record.json", "results/runs/launch/config.yaml", "mine/model.py", "systems/notes.txt"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("")
    assert manifest.state(copy).modified is False


def test_a_manifest_of_a_modified_tree_says_so_for_good(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "run.py").write_text("print(2)\n")
    written(checkout, monkeypatch)
    copy = shutil.copytree(checkout, checkout.parent / "copy", ignore=shutil.ignore_patterns(".git"))
    assert manifest.state(copy) == State(git(checkout, "rev-parse", "HEAD"), True)


@pytest.mark.parametrize("text", [None, "", "[]", '{"commit": "a"}', '{"commit": "a", "modified": false, "files": 3}'])
def test_without_git_or_a_manifest_the_state_is_unknown(copy: Path, text: str | None) -> None:
    (copy / manifest.MANIFEST).unlink()
    if text is not None:
        (copy / manifest.MANIFEST).write_text(text)
    assert manifest.state(copy) == State(None, None)


def test_a_manifest_needs_a_checkout(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(copy.parent))
    with pytest.raises(SystemExit, match="is no checkout"):
        written(copy, monkeypatch)


def test_what_a_sweep_knows_before_a_cell_runs_names_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does the record of a cell that never ran, and no result is measured anew for it."""
    before = environment.identity(cell(), (), "0")
    monkeypatch.setattr(environment, "code_state", lambda: State("0" * 40, True))
    after = environment.identity(cell(), (), "0")
    assert (after.commit, after.modified) == ("0" * 40, True) and after.os
    assert after.identity == before.identity
