"""Records, their documents of every version, and what tells two apart."""

import copy
import gzip
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from drawing import examples
from hypothesis import HealthCheck, given
from made_records import CONDITIONS, ENVIRONMENT, arbitrary_records, cell, chosen, record

from results.cell import Choice, Conditions, choose, named
from results.document import NotARecord, cell_from_json, cell_to_json, from_json, to_json
from results.environment import Environment
from results.older import cell_of_schedule_file, cell_of_title
from results.pack import documents_of
from results.record import identity
from results.store import Store
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


@examples(150, suppress_health_check=[HealthCheck.too_slow])
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


@pytest.mark.slow
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


@pytest.mark.parametrize("schema", [pytest.param(1, marks=pytest.mark.slow), 2])
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


def test_a_newer_schema_is_told_before_what_it_may_mean() -> None:
    with pytest.raises(NotARecord, match="its schema is 99, not 2"):
        from_json({"schema": 99, "status": "postponed"})


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
