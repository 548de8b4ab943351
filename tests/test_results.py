"""Records, the folder that keeps them, and what may be compared."""

import copy
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_records import CONDITIONS, ENVIRONMENT, arbitrary_records, cell, chosen, latency, record, rounds

from results.cell import Choice, Conditions, choose, named
from results.comparison import speedup
from results.document import NotARecord, cell_from_json, cell_to_json, from_json, to_json
from results.environment import Environment
from results.files import PARTIAL, write_json
from results.older import cell_of_schedule_file, cell_of_title
from results.pack import documents_of
from results.record import identity
from results.statistics import FEW, median_interval
from results.store import STALE_SECONDS, Store
from results.warning import SENTENCES, Warning

REFERENCE = ROOT / "results" / "reference"


def test_identity_says_what_was_measured_and_where() -> None:
    here = identity(cell(), ENVIRONMENT)
    assert len(here) == 16 and here == identity(cell_from_json(json.loads(json.dumps(cell_to_json(cell())))), ENVIRONMENT)
    for field, value in {
        "batch": 8,
        "device": "cuda",
        "precision": "fp16",
        "layout": "x",
        "seed": 1,
        "algorithms": "y",
    }.items():
        assert identity(cell(**{field: value}), ENVIRONMENT) != here, field
    for other in (
        cell("eager"),
        cell(model="vgg16"),
        cell(runner="latency"),
        replace(cell(), system=choose("system", "nimble", multi_stream=False)),
    ):
        assert identity(other, ENVIRONMENT) != here
    own = ("host", "cpu", "cores", "python", "libraries", "code", "gpu", "driver", "settings", "sources")
    for field in fields(Environment):
        changed = replace(ENVIRONMENT, **{field.name: {"a": "b"} if field.name in ("libraries", "settings") else 7})
        assert (identity(cell(), changed) != here) == (field.name in own), field.name


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arbitrary_records)
def test_any_record_comes_back_from_its_document(one: Any) -> None:
    document = json.loads(json.dumps(to_json(one)))
    assert from_json(document) == one and to_json(from_json(document)) == document


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    store, one = Store(tmp_path / "deep" / "folder"), record("nimble_fused")
    store.make()
    path = store.write(one)
    assert path.name == one.file_name == f"nasnet-nimble_fused-b1-cpu-{one.id}.json"
    assert store.find(one.id) == one and store.read().records == {one.id: one}
    assert store.find("0" * 16) is None


# Records of schema 1


@cache
def older(system: str = "nimble", sweep: str = "overview") -> dict[str, Any]:
    """A committed document of schema 1: the first of a system in a sweep."""
    documents: list[Any] = documents_of(REFERENCE / "h200" / f"{sweep}.jsonl.gz")
    document: dict[str, Any] = next(d for d in documents if d["config"]["system"]["name"] == system)
    return document


def of_schema_1(system: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """That document with another system, and other parts in the place of what a profiler measured."""
    document = copy.deepcopy(older())
    for part in ("sm_efficiency", "active_warps", "limits", "schedule"):
        document.pop(part, None)
    if system is not None:
        document["config"]["system"] = system
    return document | more


def test_every_committed_record_is_read() -> None:
    parts = list(Store(REFERENCE).parts())
    lines = [line for pack in REFERENCE.rglob("*.jsonl.gz") for line in gzip.decompress(pack.read_bytes()).splitlines()]
    assert not any(part.skipped for part in parts) and sum(len(part.records) for part in parts) == len(lines) > 1000
    for one in [one for part in parts for one in part.all][::7]:
        assert from_json(json.loads(json.dumps(to_json(one)))) == one  # and again as of schema 2


def test_a_record_older_than_a_key_is_of_cells_measured_in_the_same_way() -> None:
    document = of_schema_1()
    document["config"].pop("algorithms", None)
    conditions = from_json(document).cell.conditions
    assert conditions.algorithms == "timed" and conditions.arithmetic == "tf32, contiguous, timed algorithms"
    document["config"]["algorithms"] = "heuristic"
    assert from_json(document).cell.conditions.arithmetic == "tf32, contiguous"


COURSE = {"ms": [0.0, 1.0, 2.0], "warps": [10.0, 30.0]}
COUNTED = {"value": 0.3, "source": "counters", "reason": None}


@pytest.mark.parametrize(
    ("losses", "tolerance", "status", "error"),
    [
        ([2.0, 1.6, 1.2], 5.0, "ok", 0.2),  # eager's go from 2.0 to 1.5
        ([2.0, 2.0, 2.0], 5.0, "unchecked", None),  # nothing was updated, which a bound of 5 lets pass
        ([2.0, 2.0, 2.0], 0.9, "ok", 1.1),
    ],
)
def test_a_step_that_updates_nothing_is_told_by_its_loss(
    losses: list[float], tolerance: float, status: str, error: float | None
) -> None:
    part = {
        "correct": True,
        "reason": None,
        "relative_error": 1.1,
        "rounding": 1.0,
        "tolerance": tolerance,
        "steps": 3,
        "losses": losses,
        "eager_losses": [2.0, 1.5, 1.2],
    }
    read = from_json(of_schema_1(correctness=part))
    assert read.status == status and read.correctness is not None
    assert (read.correctness.is_correct, read.correctness.is_checked) == ((status == "ok",) * 2)
    assert error is None or read.correctness.relative_error == pytest.approx(error)


@pytest.mark.parametrize(
    ("system", "part", "value", "source"),
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
    system: dict[str, Any], part: dict[str, Any], value: float | None, source: str | None
) -> None:
    warps = from_json(of_schema_1(system, active_warps=part)).active_warps
    assert warps is not None and (warps.value, warps.source) == (value, source)
    assert (warps.estimated_course is not None) == ("estimated_course" in part)
    assert value == part["value"] or "profiled call" in (warps.reason or "")


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
    rewriting: dict[str, Any], limits: dict[str, Any], critical_path_ms: float | None
) -> None:
    schedule = older()["schedule"] | {"rewriting": rewriting}
    read = from_json(of_schema_1(schedule=schedule, limits=limits)).limits
    assert read is not None and read.critical_path_ms == critical_path_ms and read.macs == 3
    assert critical_path_ms is not None or "rewritten" in (read.reason or "")


def test_a_profiler_before_the_rounds_is_a_warning() -> None:
    part = {"value": 0.5, "source": "estimated", "reason": None}
    kinds = [[w.kind for w in from_json(of_schema_1(sm_efficiency=p)).warnings] for p in (part, part | {"when": "later"})]
    assert "profiled_before_timing" in kinds[0] and "profiled_before_timing" not in kinds[1]


@pytest.mark.parametrize(
    "warning",
    [
        Warning("latency_scatters", {"spread": 0.25}),
        Warning("differs_in_rounds", {"ratio": 1.25}),
        Warning("not_alone", {"process": 12, "mebibytes": 512}),
        Warning("throttled", {"reasons": "power cap, heat"}),
        Warning("no_ratio", {"status": "timeout", "reason": "it took (more than) 5 s"}),
        Warning("notice", {"text": "a sentence of nobody's"}),
    ],
    ids=lambda warning: warning.kind,
)
def test_the_sentences_of_older_warnings_are_their_kinds(warning: Warning) -> None:
    """Which is done once, in older.py: what sentences say, records of schema 2 hold as data."""
    assert from_json(of_schema_1(warnings=[warning.sentence])).warnings[0] == warning


def test_a_warning_has_a_sentence_and_what_fills_it() -> None:
    with pytest.raises(ValueError, match="no warning is of the kind 'odd'"):
        Warning("odd")
    for kind, sentence in SENTENCES.items():
        if "{" in sentence:
            with pytest.raises(ValueError, match=f"of the kind {kind} lacks"):
                Warning(kind)


def test_titles_and_file_names_of_older_versions_name_cells() -> None:
    ios = named("system", "ios", r=1, s=3)
    one = cell_of_title("inception_v3, ios (r=1, s=3), batch 8, fp16, channels_last, cuda")
    assert (one.model.label, one.system.key, one.conditions) == (
        "inception_v3",
        ios,
        Conditions(8, "cuda", "fp16", "channels_last"),
    )
    file = cell_of_schedule_file("inception_v3@ios (r=1, s=3)@b32.schedule.json", "cuda")
    assert (file.model.label, file.system.key, file.batch) == ("inception_v3", ios, 32)
    for bad in ("inception_v3", "a, b, c"):
        with pytest.raises(ValueError, match="names no cell"):
            cell_of_title(bad)
    with pytest.raises(ValueError, match="no schedule of a cell"):
        cell_of_schedule_file("schedule.json", "cuda")


# What is no record

WRONG = (None, True, 3, -1.5, "x", [], ["x"], {}, {"x": 1})


def paths(document: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a document; of a list its first entry alone."""
    entries = (
        document.items() if isinstance(document, dict) else enumerate(document[:1]) if isinstance(document, list) else ()
    )
    for key, value in entries:
        yield (*before, key)
        yield from paths(value, (*before, key))


@pytest.mark.parametrize("schema", [1, 2])
@pytest.mark.parametrize("sweep", ["overview", "reductions"])  # of the latter the system rewrites the model
def test_a_damaged_document_is_a_record_or_is_told_in_a_line(sweep: str, schema: int) -> None:
    """Each field removed, and of each wrong type: no exception but NotARecord."""
    whole = older("nimble", sweep)
    whole = whole if schema == 1 else json.loads(json.dumps(to_json(from_json(whole))))
    refused = 0
    for path in list(paths(whole)):
        for wrong in ("removed", *WRONG):
            document = copy.deepcopy(whole)
            place = document
            for key in path[:-1]:
                place = place[key]
            if wrong == "removed":
                del place[path[-1]]
            else:
                place[path[-1]] = wrong
            try:
                from_json(document)
            except NotARecord as error:
                refused += 1
                assert str(error) and "\n" not in str(error) and len(str(error)) < 300
    assert refused > 100


@pytest.mark.parametrize("key", ["id", "cell", "environment", "status", "when"])
def test_a_document_without_what_every_record_has_is_none(key: str) -> None:
    document: dict[str, Any] = json.loads(json.dumps(to_json(record())))
    del document[key]
    with pytest.raises(NotARecord, match=key):
        from_json(document)


def test_a_key_that_is_no_field_is_told() -> None:
    document = dict(to_json(record()))
    with pytest.raises(NotARecord, match="beauty"):
        from_json(document | {"beauty": 1})


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


def test_speedup_is_the_median_over_rounds_of_ratios_within_a_round() -> None:
    eager = record("eager", comparison=rounds("g", [4.0, 4.0, 9.0], [8.0, 8.0, 8.0], [2.0, 2.0]))
    nimble = record("nimble", comparison=rounds("g", [2.0, 2.0, 2.0], [2.0, 2.0], [2.0, 1.0, 2.0]))
    measured = speedup(nimble, eager)
    assert measured is not None and measured.ratio == pytest.approx(2.0)  # of 2, 4 and 1
    assert (measured.low, measured.high) == median_interval([2.0, 4.0, 1.0])
    inverse = speedup(eager, nimble)
    assert inverse is not None and inverse.ratio == pytest.approx(0.5)


ROUND = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


def test_rounds_after_a_profiler_give_way_to_latencies_alone() -> None:
    """In the process that a profiler was in, eager took twice as long as before."""
    profiled = (Warning("profiled_before_timing"),)
    eager = record("eager", comparison=rounds("g", [8.0], [8.0]), latency=latency(4.0, 4.0, 9.0), warnings=profiled)
    nimble = record("nimble", comparison=rounds("g", [2.0], [2.0]), latency=latency(2.0, 2.0), warnings=profiled)
    measured = speedup(nimble, eager)
    assert measured is not None and measured.ratio == 2.0 and measured.low <= 2.0 <= measured.high
    assert not measured.is_in_turn
    measured = speedup(replace(nimble, warnings=()), replace(eager, warnings=()))
    assert measured is not None and measured.ratio == 4.0 and measured.is_in_turn


@settings(deadline=None)
@given(st.lists(st.tuples(ROUND, ROUND), min_size=1, max_size=8), st.floats(0.01, 100))
def test_speedup_of_any_rounds(pairs: list[tuple[list[float], list[float]]], factor: float) -> None:
    slow, fast = (record(s, comparison=rounds("g", *(p[i] for p in pairs))) for i, s in enumerate(("eager", "nimble")))
    ratio = speedup(fast, slow)
    assert ratio is not None
    ratios = [median(a) / median(b) for a, b in pairs]
    assert ratio.ratio == pytest.approx(median(ratios))
    assert ratio.low <= ratio.ratio * 1.001 and ratio.ratio * 0.999 <= ratio.high
    if len(ratios) == 1 or len(ratios) >= FEW:
        assert min(ratios) * 0.999 <= ratio.low and ratio.high <= max(ratios) * 1.001
    else:
        assert (ratio.low, ratio.high) == median_interval(ratios)
    same = speedup(slow, slow)
    assert same is not None and same.ratio == same.low == same.high == 1.0
    # A machine that is slower for a round, by any factor, slows both sides and leaves the ratio.
    slower = [
        record(s, comparison=rounds("g", *([x * factor for x in p[i]] for p in pairs)))
        for i, s in enumerate(("eager", "nimble"))
    ]
    again = speedup(slower[1], slower[0])
    assert again is not None and again.ratio == pytest.approx(ratio.ratio)


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
def test_no_speedup_without_shared_rounds(other: Any) -> None:
    mine = record(comparison=rounds("g", [2.0]))
    assert speedup(mine, other) is None and speedup(other, mine) is None


# Labels


def test_labels_are_what_a_person_would_write() -> None:
    assert choose("system", "nimble_fused").label == "nimble_fused" and choose("system", "ios", r=1).label == "ios (r=1)"
    assert choose("system", "nimble", multi_stream=False).label == "nimble (multi_stream=false)"
    assert chosen("system", "of_an_older_version", option=3).label == "of_an_older_version (option=3)"
    assert Choice.of("eager", {"name": "eager", "gone": False}, {"name": "eager"}).label == "eager"
    assert Choice.of("eager", {"name": "eager", "gone": 0.5}, {"name": "eager"}).label == "eager (gone=0.5)"


def test_choices_of_several_versions_have_one_key() -> None:
    now, before = (
        choose("system", "ios", r=1),
        Choice.of("ios", {"name": "ios", "r": 1, "s": 8}, {"name": "ios", "r": 3, "s": 8}),
    )
    assert now != before and now.key == before.key == named("system", "ios", r=1) and now.key.label == now.label
    assert choose("system", "ios").key == named("system", "ios") != now.key


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({"name": "nimble", "multi_stream": False}, "nimble_single_stream"),
        ({"name": "ios", "strategy": "greedy"}, "greedy"),
        ({"name": "ios", "r": 1}, "ios (r=1)"),
        ({"name": "of_an_older_version", "option": 3}, "of_an_older_version (option=3)"),
    ],
)
def test_an_older_record_has_the_choice_that_comes_nearest(options: dict[str, Any], label: str) -> None:
    assert from_json(of_schema_1(options)).cell.system.label == label


def test_a_budget_is_told_only_where_it_is_spent() -> None:
    """A default that has changed does not give another name to records in which it had no effect."""
    assert choose("system", "tvm", budget_s=1234.0).label == "tvm"
    assert choose("system", "tvm_tuned", budget_s=1234.0).label == "tvm_tuned (budget_s=1234.0)"
    assert choose("system", "torch_compile", budget_s=1234.0).label == "torch_compile"
    assert "budget_s=1234.0" in choose("system", "torch_compile_best", budget_s=1234.0).label
    assert CONDITIONS.arithmetic == "tf32, contiguous"
