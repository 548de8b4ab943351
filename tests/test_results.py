"""Records, the folder that keeps them, and what may be compared."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from results.comparison import speedup
from results.record import IDENTITY, file_name, group_key, identity, in_words, label, problem
from results.store import PARTIAL, STALE_SECONDS, Store, write_json

CONFIG: dict[str, Any] = {
    "model": {"name": "nasnet"},
    "system": {"name": "nimble", "multi_stream": True},
    "runner": {"name": "bench", "samples": 100},
    "batch": 1,
    "device": "cpu",
    "precision": "tf32",
    "layout": "contiguous",
    "seed": 0,
    "algorithms": "heuristic",
}
ENVIRONMENT = {"host": "here", "libraries": {"torch": "2.11"}}


def record(system: str = "nimble", **more: Any) -> dict[str, Any]:
    config = CONFIG | {"system": {"name": system}}
    whole = {
        "schema": 1,
        "id": identity(config, ENVIRONMENT),
        "status": "ok",
        "reason": None,
        "when": "2026-01-01",
        "warnings": [],
    }
    return whole | {"config": config, "environment": ENVIRONMENT, "comparison": None} | more


def test_identity_says_what_was_measured_and_where() -> None:
    here = identity(CONFIG, ENVIRONMENT)
    assert here == identity(json.loads(json.dumps(CONFIG)), dict(reversed(ENVIRONMENT.items()))) and len(here) == 16
    assert here == identity(CONFIG | {"timeout": 5, "force": True}, ENVIRONMENT)
    for key in IDENTITY:
        assert identity(CONFIG | {key: "another"}, ENVIRONMENT) != here
    assert identity(CONFIG, ENVIRONMENT | {"host": "there"}) != here


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "folder")
    store.make()
    path = store.write(record())
    assert path.name == file_name(record()) == f"nasnet-nimble-b1-cpu-{record()['id']}.json"
    assert store.find(record()["id"]) == record() and store.read().records == {record()["id"]: record()}
    assert store.find("0" * 16) is None


def test_a_record_older_than_a_key_is_of_cells_measured_in_the_same_way() -> None:
    older = {key: value for key, value in CONFIG.items() if key != "algorithms"}
    assert problem(record() | {"config": older}) is None
    timed = CONFIG | {"algorithms": "timed"}
    assert group_key(older) == group_key(timed) != group_key(CONFIG)
    assert in_words(older) == in_words(timed) == "tf32, contiguous, timed algorithms"
    assert in_words(CONFIG) == "tf32, contiguous"


COURSE = {"ms": [0.0, 1.0, 2.0], "warps": [10.0, 30.0]}
COUNTED = {"value": 0.3, "source": "counters", "reason": None}


@pytest.mark.parametrize(
    ("system", "found", "value", "source"),
    [
        ({"name": "nimble"}, COUNTED, None, None),
        ({"name": "ios", "capture": True}, COUNTED, None, None),
        ({"name": "ios", "capture": True}, COUNTED | {"estimated_course": COURSE}, 20.0, "estimated"),
        ({"name": "ios", "capture": False}, COUNTED, 0.3, "counters"),  # had been put over an undisturbed call
        ({"name": "eager"}, COUNTED, 0.3, "counters"),
        ({"name": "nimble"}, COUNTED | {"profiled_ms": 3.0}, 0.3, "counters"),
        ({"name": "nimble"}, COUNTED | {"source": "estimated"}, 0.3, "estimated"),
    ],
)
def test_counters_over_the_time_of_a_profiled_graph_are_not_read(
    tmp_path: Path, system: dict[str, Any], found: dict[str, Any], value: float | None, source: str | None
) -> None:
    store = Store(tmp_path)
    written = record() | {"config": CONFIG | {"system": system}, "active_warps": found, "kernels": {"count": 3}}
    file = store.write(written)
    (read,) = store.read().records.values()
    assert (read["active_warps"]["value"], read["active_warps"]["source"]) == (value, source)
    assert read["active_warps"].get("estimated_course") == found.get("estimated_course")
    assert read | {"active_warps": found} == written == json.loads(file.read_text())
    assert read == written or "profiled call" in read["active_warps"]["reason"]


LIMITS = {"critical_path_ms": 1.0, "busy_ms": 2.0, "macs": 3}


@pytest.mark.parametrize(
    ("rewriting", "limits", "critical_path_ms"),
    [
        ({"fold_batch_norm": {"folded": 3}}, LIMITS, None),
        ({"fold_batch_norm": {"folded": 3}}, LIMITS | {"rewritten": LIMITS}, 1.0),
        ({}, LIMITS, 1.0),
    ],
)
def test_limits_of_nobody_knows_which_operators_are_not_read(
    tmp_path: Path, rewriting: dict[str, Any], limits: dict[str, Any], critical_path_ms: float | None
) -> None:
    store = Store(tmp_path)
    store.write(record() | {"config": CONFIG, "schedule": {"rewriting": rewriting}, "limits": limits})
    (read,) = store.read().records.values()
    assert read["limits"]["critical_path_ms"] == critical_path_ms and read["limits"]["macs"] == 3
    assert read["limits"] == limits or "rewritten" in read["limits"]["reason"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"schema": 1, "id": "ab', "JSON"),
        ("", "JSON"),
        ("\x80\x81", "JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"name": "package", "version": "1.0"}', "schema"),
        ('{"schema": 2}', "schema is 2"),
        ('{"schema": 1, "status": "fine"}', "status is 'fine'"),
        ('{"schema": 1, "status": "ok", "config": {}}', "config"),
        (json.dumps(record() | {"id": "1", "config": CONFIG | {"model": "nasnet"}}), "name a model"),
        (json.dumps({key: value for key, value in record().items() if key != "when"} | {"id": "1"}), "its time"),
    ],
)
def test_what_is_no_record_is_named_and_left_alone(tmp_path: Path, text: str, why: str) -> None:
    store = Store(tmp_path)
    store.write(record())
    foreign = tmp_path / "foreign.json"
    foreign.write_bytes(text.encode("latin-1"))
    contents = store.read()
    assert list(contents.records) == [record()["id"]]
    assert list(contents.skipped) == [foreign] and why in contents.skipped[foreign]
    assert foreign.read_bytes() == text.encode("latin-1")


def test_a_truncated_record_counts_as_none(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.write(record())
    path.write_text(path.read_text()[:-20])
    assert store.find(record()["id"]) is None and path in store.read().skipped


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_json(tmp_path / "record.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": 2, "b": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["record.json"]


def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    writer = (
        "import sys; from pathlib import Path; from results.store import write_json\n"
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
    assert not Store(tmp_path).read().skipped  # what was left half-written is no file of the store's


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    writer = (
        "import sys; from results.store import Store; from test_results import record\n"
        "store, n = Store(sys.argv[1]), 0\n"
        "while True:\n"
        "    store.write(record(samples=[n] * 20000)); n += 1\n"
    )
    path = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    process = subprocess.Popen([sys.executable, "-c", writer, str(tmp_path)], env=os.environ | path)
    store, seen = Store(tmp_path), set()
    deadline = time.monotonic() + 60
    while len(seen) < 30 and time.monotonic() < deadline:
        contents = store.read()
        assert not contents.skipped
        for found in contents.records.values():
            assert found["samples"] == found["samples"][:1] * 20000
            seen.add(found["samples"][0])
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
        "import sys; from results.store import Store; from test_results import record\n"
        "store = Store(sys.argv[1]); store.make()\n"
        "for i in range(20): store.write(record(f's{i}', samples=[int(sys.argv[2])] * 1000))\n"
    )
    path = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    writers = [
        subprocess.Popen([sys.executable, "-c", writer, str(tmp_path), str(n)], env=os.environ | path) for n in range(3)
    ]
    assert [w.wait() for w in writers] == [0, 0, 0]
    contents = Store(tmp_path).read()
    assert len(contents.records) == 20 and not contents.skipped
    assert all(len(set(r["samples"])) == 1 for r in contents.records.values())


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        Store(tmp_path / "file" / "folder").make()


def rounds(group: str, *samples: list[float]) -> dict[str, Any]:
    return {"group": group, "cells": ["a", "b"], "rounds": list(samples)}


def test_speedup_is_the_median_over_rounds_of_ratios_within_a_round() -> None:
    eager = record("eager", comparison=rounds("g", [4.0, 4.0, 9.0], [8.0, 8.0, 8.0], [2.0, 2.0]))
    nimble = record("nimble", comparison=rounds("g", [2.0, 2.0, 2.0], [2.0, 2.0], [2.0, 1.0, 2.0]))
    measured = speedup(nimble, eager)
    assert measured is not None and measured.ratio == pytest.approx(2.0)  # of 2, 4 and 1
    assert 1.0 <= measured.low <= measured.ratio <= measured.high <= 4.0
    inverse = speedup(eager, nimble)
    assert inverse is not None and inverse.ratio == pytest.approx(0.5)


ROUND = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


def test_rounds_after_a_profiler_give_way_to_latencies_alone() -> None:
    """In the process that a profiler was in, eager took twice as long as before."""
    profiled = {"sm_efficiency": {"value": 0.5, "source": "estimated", "reason": None}}
    eager = record("eager", comparison=rounds("g", [8.0], [8.0]), latency={"host_ms": [4.0, 4.0, 9.0]}) | profiled
    nimble = record("nimble", comparison=rounds("g", [2.0], [2.0]), latency={"host_ms": [2.0, 2.0]}) | profiled
    measured = speedup(nimble, eager)
    assert measured is not None and measured.ratio == 2.0 and measured.low <= 2.0 <= measured.high and not measured.in_turn
    for r in (eager, nimble):
        r["sm_efficiency"]["when"] = "later"
    measured = speedup(nimble, eager)
    assert measured is not None and measured.ratio == 4.0 and measured.in_turn


@settings(deadline=None)
@given(st.lists(st.tuples(ROUND, ROUND), min_size=1, max_size=8), st.floats(0.01, 100))
def test_speedup_of_any_rounds(pairs: list[tuple[list[float], list[float]]], factor: float) -> None:
    slow, fast = (record(s, comparison=rounds("g", *(p[i] for p in pairs))) for i, s in enumerate(("eager", "nimble")))
    found = speedup(fast, slow)
    assert found is not None
    ratios = [median(a) / median(b) for a, b in pairs]
    assert found.ratio == pytest.approx(median(ratios))
    assert min(ratios) * 0.999 <= found.low <= found.ratio * 1.001
    assert found.ratio * 0.999 <= found.high <= max(ratios) * 1.001
    same = speedup(slow, slow)
    assert same is not None and same.ratio == same.low == same.high == 1.0
    # A machine that is slower for a round, by any factor, slows both sides and leaves the ratio.
    slower = [
        r | {"comparison": rounds("g", *([x * factor for x in s] for s in r["comparison"]["rounds"]))} for r in (slow, fast)
    ]
    again = speedup(slower[1], slower[0])
    assert again is not None and again.ratio == pytest.approx(found.ratio)


@pytest.mark.parametrize(
    "other",
    [
        record("eager"),
        record("eager", comparison=rounds("another", [4.0])),
        record("eager", comparison=rounds("g", [4.0], [4.0])),
        record("eager", status="incorrect", comparison=rounds("g", [4.0])),
    ],
    ids=["alone", "another sweep", "other rounds", "incorrect"],
)
def test_no_speedup_without_shared_rounds(other: dict[str, Any]) -> None:
    mine = record(comparison=rounds("g", [2.0]))
    assert speedup(mine, other) is None and speedup(other, mine) is None


def test_labels_are_what_a_person_would_write() -> None:
    assert label({"name": "eager"}) == "eager"
    assert label({"name": "nimble", "multi_stream": False}) == "nimble_single_stream"
    assert label({"name": "ios", "strategy": "greedy"}) == "greedy" and label({"name": "ios", "r": 1}) == "ios (r=1)"
    assert label({"name": "nimble", "multi_stream": True}) == "nimble"
    fused = {"fold_batch_norm", "merge_linears", "select_kernels", "select_layouts", "fuse_convolution", "fuse_elementwise"}
    every = {"name": "nimble", "multi_stream": True, **dict.fromkeys(fused, True)}
    assert label(every) == "nimble_fused" and label(every | {"multi_stream": False}) == "nimble_fused (multi_stream=false)"
    assert label({"name": "eager", "gone": False}) == "eager" and label({"name": "eager", "gone": 0.5}) == "eager (gone=0.5)"
    assert label({"name": "of_an_older_version", "option": 3}) == "of_an_older_version (option=3)"


def test_a_budget_is_told_only_where_it_is_spent() -> None:
    """A default that has changed does not give another name to records in which it had no effect."""
    assert label({"name": "tvm", "trials": 0, "budget_s": 1234.0}) == "tvm"
    assert label({"name": "tvm", "trials": 2000, "budget_s": 1234.0}) == "tvm_tuned (budget_s=1234.0)"
    assert label({"name": "torch_compile", "best": False, "budget_s": 1234.0}) == "torch_compile"
    assert "budget_s=1234.0" in label({"name": "torch_compile", "best": True, "budget_s": 1234.0})


def test_a_record_has_no_problem() -> None:
    assert problem(record()) is None
