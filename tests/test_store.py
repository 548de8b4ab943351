"""The folder that keeps records: files that are whole, whoever is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from made_records import record

from results.files import PARTIAL, write_json
from results.store import STALE_SECONDS, Store


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"schema": 1, "id": "ab', "JSON"),
        ("", "JSON"),
        ("\x80\x81", "JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"name": "package", "version": "1.0"}', "status"),
        ('{"schema": 3, "status": "ok"}', "schema is 3"),
        ('{"schema": 1, "status": "fine"}', "status is 'fine'"),
        ('{"schema": 1, "status": "ok", "config": {}}', "lacks"),
    ],
)
def test_what_is_no_record_is_named_and_left_alone(tmp_path: Path, text: str, why: str) -> None:
    store = Store(tmp_path)
    store.write(record())
    foreign = tmp_path / "foreign.json"
    foreign.write_bytes(text.encode("latin-1"))
    contents = store.read()
    assert list(contents.records) == [record().id]
    assert list(contents.reasons_by_file) == [foreign] and why in contents.reasons_by_file[foreign]
    assert foreign.read_bytes() == text.encode("latin-1")


def test_a_truncated_record_counts_as_none(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.write(record())
    path.write_text(path.read_text()[:-20])
    assert store.find(record().id) is None and path in store.read().reasons_by_file


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_json(tmp_path / "record.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": 2, "b": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["record.json"]


def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    writer = (
        "import sys; from pathlib import Path; from results.files import write_json\n"
        "n = 0\n"
        "while True:\n"
        "    write_json(Path(sys.argv[1]), {'n': n, 'samples': [n] * 50000}); n += 1\n"
    )
    path = tmp_path / "record.json"
    for delay in (0.0, 0.003, 0.011, 0.02):
        process = subprocess.Popen([sys.executable, "-c", writer, str(path)], cwd=ROOT)
        while not path.exists():
            time.sleep(0.001)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        document = json.loads(path.read_text())
        assert document["samples"] == [document["n"]] * 50000
        path.unlink()
    assert not Store(tmp_path).read().reasons_by_file  # what was left half-written is no file of the store's


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    writer = (
        "import sys; from results.store import Store; from made_records import record, throughput\n"
        "from dataclasses import replace\n"
        "store, n, part = Store(sys.argv[1]), 1, throughput(1.0)\n"
        "while True:\n"
        "    store.write(record(throughput=replace(part, runs=(n,) * 20000))); n += 1\n"
    )
    path = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    process = subprocess.Popen([sys.executable, "-c", writer, str(tmp_path)], env=os.environ | path)
    store, seen = Store(tmp_path), set()
    deadline = time.monotonic() + 60
    while len(seen) < 30 and time.monotonic() < deadline:
        contents = store.read()
        assert not contents.reasons_by_file
        for one in contents.records.values():
            assert one.throughput is not None and one.throughput.runs == one.throughput.runs[:1] * 20000
            seen.add(one.throughput.runs[0])
    process.kill()
    process.wait()
    assert len(seen) == 30


def test_what_killed_writers_left_goes_after_a_while(tmp_path: Path) -> None:
    old, fresh = tmp_path / f"a{PARTIAL}", tmp_path / f"b{PARTIAL}"
    old.write_text("{")
    fresh.write_text("{")
    os.utime(old, (0, time.time() - STALE_SECONDS - 60))
    Store(tmp_path).make()
    assert not old.exists() and fresh.exists()


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    writer = (
        "import sys; from results.store import Store; from made_records import latency, record\n"
        "store = Store(sys.argv[1]); store.make()\n"
        "for i in range(20): store.write(record(f's{i}', latency=latency(*[int(sys.argv[2])] * 1000)))\n"
    )
    path = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    writers = [
        subprocess.Popen([sys.executable, "-c", writer, str(tmp_path), str(n)], env=os.environ | path) for n in range(1, 4)
    ]
    assert [w.wait() for w in writers] == [0, 0, 0]
    contents = Store(tmp_path).read()
    assert len(contents.records) == 20 and not contents.reasons_by_file
    assert all(len(set(r.latency.host_ms)) == 1 for r in contents.records.values() if r.latency is not None)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        Store(tmp_path / "file" / "folder").make()
