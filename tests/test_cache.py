"""The folder of compiled artefacts, with real files and real processes."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from conftest import ROOT, Run
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st

from systems.base import BadOption
from systems.cache import MANIFEST, Cache, code_in, code_of, default_bound, default_folder

OF = {"model": "abc", "batch": 1}


def hello(folder: Path) -> dict[str, int]:
    (folder / "sub").mkdir()
    (folder / "sub" / "hello").write_text("hello")
    return {"words": 1}


def never(folder: Path) -> None:
    raise AssertionError("it was there")


def test_an_artefact_is_made_once_and_held_with_its_notes(tmp_path: Path) -> None:
    with Cache(tmp_path).artefact("test", "a", OF, hello) as made:
        assert made.is_new and (made.folder / "sub" / "hello").read_text() == "hello"
    with Cache(tmp_path).artefact("test", "a", OF, never) as artefact:
        assert not artefact.is_new and artefact.notes == {"words": 1} and artefact.seconds == made.seconds
        assert (artefact.folder / "sub" / "hello").read_text() == "hello"
    with Cache(tmp_path).artefact("test", "a", OF | {"batch": 2}, hello) as other:
        assert other.is_new and other.folder != made.folder
    assert [(e.kind, e.label) for e in Cache(tmp_path).entries()] == [("test", "a")] * 2


@pytest.mark.parametrize("damage", ["changed", "missing", "manifest"])
def test_what_is_damaged_is_made_anew(tmp_path: Path, damage: str) -> None:
    with Cache(tmp_path).artefact("test", "a", OF, hello) as made:
        file = made.folder / "sub" / "hello"
    if damage == "changed":
        file.write_text("hellO")
    elif damage == "missing":
        file.unlink()
    else:
        (made.folder / MANIFEST).write_text('{"of": ')
    expectation = pytest.warns(UserWarning, match="damaged") if damage == "changed" else nullcontext()
    with expectation, Cache(tmp_path).artefact("test", "a", OF, hello) as again:
        assert again.is_new and (again.folder / "sub" / "hello").read_text() == "hello"


def test_what_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError), Cache(tmp_path).artefact("test", "a", OF, fails):
        pass
    assert not list((tmp_path / "artefacts" / "entries").iterdir())
    assert not list((tmp_path / "artefacts" / "partial").iterdir())


@examples(25)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), max_size=15), st.integers(0, 100))
def test_the_least_recently_used_are_dropped(tmp_path_factory: pytest.TempPathFactory, uses: list, kilobytes: int) -> None:
    """Against a list of what was used, in order, and the sizes on disk; what exceeds the bound alone goes first."""
    cache = Cache(tmp_path_factory.mktemp("cache"), kilobytes * 1000)
    expected: list[tuple[int, int]] = []  # key and size, the most recently used first
    for key, size in uses:
        was = dict(expected).get(key)
        with cache.artefact(
            "test", str(key), {"key": key}, lambda f, s=size: (f / "x").write_bytes(bytes(s * 1000)) and None
        ) as a:
            assert a.is_new == (was is None)
            now = was or sum(f.stat().st_size for f in a.folder.iterdir())
        expected = [(key, now), *((k, s) for k, s in expected if k != key)]
        if was is None:
            room = cache.bound - (now if now <= cache.bound else 0)
            while sum(s for _, s in expected[1:]) > room:
                expected.remove(next((of for of in expected[1:] if of[1] > cache.bound), expected[-1]))
        assert [e.label for e in cache.entries()] == [str(k) for k, _ in expected]


def test_a_workspace_grows_and_counts(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 10_000)
    for size in (1000, 2000):
        with cache.workspace("log", "a", OF) as folder, (folder / "log").open("ab") as log:
            log.write(bytes(size))
    assert (folder / "log").stat().st_size == 3000
    assert cache.entries()[0].bytes > 3000
    with cache.artefact("test", "b", OF, lambda f: (f / "x").write_bytes(bytes(9000)) and None):
        pass
    assert [e.label for e in cache.entries()] == ["b"]


PROCESS = """
import sys, time
from pathlib import Path
from systems.cache import Cache
root, made, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
def make(folder):
    with made.open("a") as file:
        file.write("made\\n")
    (folder / "x").write_text("x")
    time.sleep(seconds)
with Cache(root).artefact("test", "a", {}, make) as artefact:
    print((artefact.folder / "x").read_text())
"""


def process(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", PROCESS, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_of_two_processes_one_makes_it(tmp_path: Path) -> None:
    made = tmp_path / "made"
    both = [process(str(tmp_path), str(made), "0.5") for _ in range(2)]
    assert [p.communicate(timeout=60)[0] for p in both] == ["x\n", "x\n"]
    assert made.read_text() == "made\n"


def test_a_process_that_is_killed_leaves_no_half_artefact(tmp_path: Path) -> None:
    made = tmp_path / "made"
    killed = process(str(tmp_path), str(made), "600")
    wait_for(made)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert not Cache(tmp_path).entries()
    assert process(str(tmp_path), str(made), "0").communicate(timeout=60)[0] == "x\n"
    assert not list((tmp_path / "artefacts" / "partial").iterdir())


def test_what_a_process_holds_is_not_dropped(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    made = tmp_path / "made"
    holder = process(str(tmp_path), str(made), "600")
    with cache.artefact("test", "b", OF, hello):
        wait_for(made)
        assert Cache(tmp_path).empty() == (0, 0)
        assert [e.label for e in cache.entries()] == ["b"]
    holder.kill()
    holder.communicate(timeout=60)
    count, size = cache.empty()
    assert count == 1 and size > 5
    assert not cache.entries() and not list((tmp_path / "artefacts" / "partial").iterdir())


def test_only_our_own_measurements_are_dropped_with_it(tmp_path: Path) -> None:
    (tmp_path / "opara-cpu-0.json").write_text(json.dumps({"of": {}, "measured": {}}))
    (tmp_path / "mine.json").write_text(json.dumps({"precious": 1}))
    (tmp_path / "broken.json").write_text("{")
    assert [f.name for f in Cache(tmp_path).measurements()] == ["opara-cpu-0.json"]
    assert Cache(tmp_path).empty()[0] == 1
    assert sorted(f.name for f in tmp_path.glob("*.json")) == ["broken.json", "mine.json"]


def test_the_folder_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "artefacts"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    with Cache(tmp_path).artefact("test", "a", OF, hello):
        pass
    assert root.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: root.stat().st_uid + 1)
    with pytest.raises(BadOption, match="another user"), Cache(tmp_path).artefact("test", "a", OF, hello):
        pass


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file")
    with pytest.warns(UserWarning, match=r"file cannot be written \(.*\): .* set OPWEAVE_CACHE to a folder"):  # noqa: SIM117
        with cache.artefact("test", "a", OF, hello) as artefact:
            assert (artefact.folder / "sub" / "hello").read_text() == "hello"


def test_code_counts_as_it_stands_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "made_by_this.py").write_text("x = 1\n")
    importlib.import_module("made_by_this")
    first, both = code_of("made_by_this"), code_of("made_by_this", __name__)
    assert first == code_of("made_by_this") != both
    (tmp_path / "made_by_this.py").write_text("x = 1 + 1\n")
    assert first != code_of("made_by_this")


def test_the_code_of_a_package_is_of_all_its_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "of_this"
    folder.mkdir()
    for name in ("__init__", "used", "unused"):
        (folder / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    first = code_in("of_this")
    assert first == code_in("of_this") != code_in("of_this", "systems.kernels")
    (folder / "unused.py").write_text("x = 1")
    assert first != code_in("of_this")


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWEAVE_CACHE", str(tmp_path))
    monkeypatch.setenv("OPWEAVE_CACHE_GIB", "0.5")
    assert (default_folder(), default_bound()) == (tmp_path, 2**29)
    for wrong in ("much", "-1", "nan", "inf"):
        monkeypatch.setenv("OPWEAVE_CACHE_GIB", wrong)
        with pytest.raises(BadOption, match="OPWEAVE_CACHE_GIB"):
            Cache()


def test_the_command(run_here: Run, tmp_path: Path) -> None:
    with Cache(tmp_path / "kept").artefact("onnx", "ResNet float32[1, 3, 8, 8]", OF, hello):
        pass
    shown = run_here("runner=cache", OPWEAVE_CACHE=str(tmp_path / "kept"))
    assert shown.returncode == 0 and "ONNX file" in shown.stdout and "ResNet float32[1, 3, 8, 8]" in shown.stdout
    emptied = run_here("runner=cache", "runner.empty=true", OPWEAVE_CACHE=str(tmp_path / "kept"))
    assert emptied.returncode == 0 and "dropped 1" in emptied.stdout
    assert not Cache(tmp_path / "kept").entries()
    wrong = run_here("runner=cache", OPWEAVE_CACHE=str(tmp_path / "kept"), OPWEAVE_CACHE_GIB="x")
    assert wrong.returncode == 2 and "OPWEAVE_CACHE_GIB=x" in wrong.stderr


def test_what_cannot_be_dropped_is_one_line(run_here: Run, tmp_path: Path) -> None:
    """A folder where the entry's lock would be: nobody can take it, not even root."""
    with Cache(tmp_path / "kept").artefact("onnx", "ResNet", OF, hello) as artefact:
        (tmp_path / "kept" / "artefacts" / "locks" / f"{artefact.folder.name}.lock").unlink()
    (tmp_path / "kept" / "artefacts" / "locks" / f"{artefact.folder.name}.lock").mkdir()
    done = run_here("runner=cache", "runner.empty=true", OPWEAVE_CACHE=str(tmp_path / "kept"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"opweave: OPWEAVE_CACHE={tmp_path / 'kept'} cannot be written: ")
    assert Cache(tmp_path / "kept").entries()


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
