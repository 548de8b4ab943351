"""A record of no clean checkout is of the commit whose code has the digest that the record has."""

import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from made_records import ENVIRONMENT

from scripts import commits
from scripts.commits import History, code_state, commits_by_code, found, wanted

OWN = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout.strip()


def commit(root: Path, **texts: str) -> str:
    """A commit that writes some files of ROOMS, named room_file; its hash."""
    for name, text in texts.items():
        file = root / (name.replace("_", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    git(root, "add", ".")
    git(root, *OWN, "commit", "-q", "--allow-empty", "-m", "One")
    return git(root, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def of_no_checkout() -> list[Any]:
    return list(wanted())


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    return tmp_path


def document(code: str, own: str | None) -> dict[str, object]:
    environment = {"code": code, "commit": own, "modified": True, "python": "3.11.2"}
    return {"environment": environment, "when": "2026-11-22T10:00:00+00:00"}


def digest(*parts: str) -> str:
    return sha256("".join(parts).encode()).hexdigest()[:12]


def test_a_digest_of_all_files_names_the_commit(repository: Path) -> None:
    first = commit(repository, models_a="A = 1\n", systems_b="B = 1\n", runners_c="C = 1\n")
    second = commit(repository, systems_b="B = 2\n")
    third = commit(repository)  # the same code
    old = digest("models/a.py", "A = 1\n", "systems/b.py", "B = 1\n", "runners/c.py", "C = 1\n")
    new = digest("models/a.py", "A = 1\n", "systems/b.py", "B = 2\n", "runners/c.py", "C = 1\n")
    history = History(repository)
    try:
        assert [history.whole_digest(each) for each in (first, second, third)] == [old, new, new]
        named = dict(found(history, [document(old, third), document(new, None)]))
        assert named == {old: first, new: second}
        assert dict(found(history, [document(new, third)])) == {new: third}  # its own comes first
        assert dict(found(history, [document("0" * 12, third)])) == {"0" * 12: None}
    finally:
        history.close()


@pytest.mark.slow
def test_a_digest_of_what_a_cell_runs_names_the_commit(of_no_checkout: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit's own code says what a cell of it runs, under this Python."""
    monkeypatch.setattr(commits, "python_of", lambda version: sys.executable)
    history = History(ROOT)
    try:
        named = [each for each in of_no_checkout if each["environment"].get("commit") in history.commits]
        one = next((each for each in named if history.has(each["environment"]["commit"], commits.CODE)), None)
        if one is None:
            pytest.skip("the history is cut off before the records' commits")
        record = deepcopy(one)
        own = record["environment"]["commit"]
        made = history.closure_digest(own, record, sys.executable)
        assert made is not None and len(made) == commits.LETTERS
        record["environment"]["code"] = made
        assert dict(found(history, [record])) == {made: own}
        record["environment"]["code"] = "0" * 12
        assert dict(found(history, [record])) == {"0" * 12: None}
        del record["cell"]["system"]  # the commit does not read it
        assert history.closure_digest(own, record, sys.executable) is None
    finally:
        history.close()


def test_a_record_of_a_changed_tree_is_of_a_commit_only_by_its_code() -> None:
    code, name = next(iter(commits_by_code().items()))
    changed = replace(ENVIRONMENT, code=code, commit="0" * 40, modified=True)
    assert code_state(changed) == (name, False)
    assert code_state(replace(changed, code="0" * 12)) == ("0" * 40, True)
    assert code_state(replace(changed, modified=False)) == ("0" * 40, False)
    assert code_state(replace(changed, code="0" * 12, commit=None, modified=None)) == (None, None)


def test_an_installed_package_knows_no_commits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = next(iter(commits_by_code()))
    monkeypatch.setattr(commits, "FILE", tmp_path / "commits.csv")
    commits_by_code.cache_clear()
    try:
        assert code_state(replace(ENVIRONMENT, code=code, commit="0" * 40, modified=True)) == ("0" * 40, True)
    finally:
        commits_by_code.cache_clear()


@pytest.mark.slow
def test_each_committed_record_is_of_a_commit(of_no_checkout: list[Any]) -> None:
    """Those of a clean checkout name it; each other's code has a row, and no row is of no record."""
    codes = {record["environment"]["code"] for record in of_no_checkout}
    assert codes == set(commits_by_code())
    assert all(len(each) == 40 for each in commits_by_code().values())


def test_rows_of_the_older_digest_are_what_the_history_says() -> None:
    history = History(ROOT)
    try:
        rows = {code: each for code, each in commits_by_code().items() if each in history.commits}
        older = {code: each for code, each in rows.items() if not history.has(each, commits.CODE)}
        if not older:
            pytest.skip("the history is cut off before these commits")
        assert {code: history.whole_digest(each) for code, each in older.items()} == {code: code for code in older}
    finally:
        history.close()
