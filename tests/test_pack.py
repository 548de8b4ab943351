"""A sweep's records in one compressed file: read as a folder is, packed and unpacked without a loss."""

import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from conftest import ROOT
from drawing import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from made_records import ENVIRONMENT, arbitrary_records, latency, record, rounds
from packs import read_committed_once

from results.cell import named
from results.document import NotARecord, to_json
from results.files import write_json
from results.pack import documents_of, packed, read_pack
from results.record import Record, identity
from results.selection import NoResults, Selection, read
from results.store import Store, read_record
from scripts import cells, readme

SYSTEMS = ("eager", "nimble", "opara")


def measured(system: str, ms: float = 1.0, when: str = "2026-01-01") -> Record:
    one = record(system, latency=latency(ms), when=when)
    return replace(one, id=identity(one.cell, one.environment))


def pack(file: Path, *records: Record) -> Path:
    file.write_bytes(packed(map(to_json, records)))
    return file


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/pack.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def folder_of(tmp_path: Path) -> Path:
    folder = tmp_path / "sweep"
    Store(folder).make()
    for system in SYSTEMS:
        Store(folder).write(measured(system))
    return folder


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(arbitrary_records, max_size=4, unique_by=lambda one: one.id))
def test_any_line_is_read_as_a_file_of_its_own(tmp_path: Path, records: list[Record]) -> None:
    """Also what no run writes, which is told in the same words."""
    lines = read_pack(pack(tmp_path / "a.jsonl.gz", *records))
    records_of_files: list[Record] = []
    reasons = {}
    for number, one in enumerate(records, start=1):
        try:
            records_of_files.append(read_record(write_json(tmp_path / "one.json", to_json(one))))
        except NotARecord as error:
            reasons[number] = str(error)
    assert lines.records == records_of_files and lines.reasons_by_line == reasons


@pytest.mark.slow
def test_a_folder_and_its_pack_are_read_alike_and_back(tmp_path: Path) -> None:
    folder, file, again = folder_of(tmp_path), tmp_path / "a.jsonl.gz", tmp_path / "again"
    (folder / "verdicts.json").write_text("[]")
    (folder / "below").mkdir()
    os.rename(folder / measured("opara").file_name, folder / "below" / "any.json")
    done = run(folder, file)
    assert done.returncode == 2 and "verdicts.json is no record: not a JSON object" in done.stderr and not file.exists()
    (folder / "verdicts.json").write_text('{"name": "x"}')
    done = run(folder, file)
    assert done.returncode == 0 and "verdicts.json: it has no status" in done.stderr, done.stderr
    assert done.stdout.startswith(f"{file}: 3 records, ") and f"{round(file.stat().st_size / 1e3)} kB" in done.stdout
    assert Store(file).read().records == Store(folder).read().records and len(read([file])) == 3
    assert run(file, again).returncode == 0
    assert {f.name: json.loads(f.read_text()) for f in again.iterdir()} == {
        r.file_name: json.loads(json.dumps(to_json(r))) for r in map(measured, SYSTEMS)
    }
    bytes_before = file.read_bytes()
    assert run(again, file).returncode == 0 and file.read_bytes() == bytes_before  # the same records, the same bytes


@pytest.mark.parametrize("damage", ["cut", "copy", "other", "packed", "empty", "target"])
def test_what_would_lose_a_record_is_refused_in_a_line(damage: str, tmp_path: Path) -> None:
    folder, file = folder_of(tmp_path), tmp_path / "a.jsonl.gz"
    one = folder / measured("eager").file_name
    match damage:
        case "cut":
            one.write_text(one.read_text()[:-20])
        case "copy":
            (folder / "copy.json").write_text(one.read_text())
        case "other":
            pack(file, measured("ios"))
        case "packed":
            pack(folder / "inner.jsonl.gz", measured("ios"))
        case "empty":
            folder = tmp_path / "nothing"
            folder.mkdir()
        case "target":
            file = tmp_path / "a.gz"
    before = file.read_bytes() if file.exists() else None
    done = run(folder, file)
    assert done.returncode == 2 and done.stderr.startswith("pack.py: ") and done.stderr.count("\n") == 1, done.stderr
    assert (file.read_bytes() if file.exists() else None) == before


@pytest.mark.slow
def test_unpacking_writes_nothing_where_a_line_is_damaged_or_files_lie(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    whole = gzip.decompress(packed(map(to_json, map(measured, SYSTEMS))))
    for content in (whole + b"{\n", whole + whole, whole + b'{"status": "fine"}\n'):
        file.write_bytes(gzip.compress(content))
        done = run(file, tmp_path / "out")
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "out").exists(), done.stderr
    file.write_bytes(gzip.compress(whole))
    done = run(file, folder_of(tmp_path))
    assert done.returncode == 2 and "is not empty" in done.stderr
    done = run(tmp_path / "none.jsonl.gz", tmp_path / "out")
    assert done.returncode == 2 and "none.jsonl.gz is not there" in done.stderr
    done = run(tmp_path / "none", file)
    assert done.returncode == 2 and "none is not there: results are in a folder" in done.stderr


def test_a_sweep_finds_its_cell_in_a_pack_of_its_folder_and_a_file_before_it(tmp_path: Path) -> None:
    old, new = measured("eager", 2.0), measured("eager", 1.0)
    pack(tmp_path / "a.jsonl.gz", measured("nimble"), old)
    store = Store(tmp_path)
    assert store.find(old.id) == old and store.find("0" * 16) is None
    store.write(new)
    assert store.find(old.id) == new and store.read().records[old.id] == new
    other = replace(old, cell=replace(old.cell, conditions=replace(old.cell.conditions, seed=5)))
    pack(tmp_path / "a.jsonl.gz", other)  # under an id that stands for another cell
    (tmp_path / new.file_name).unlink()
    assert store.find(old.id) is None


def test_of_one_id_the_newest_counts_and_those_of_other_rounds_are_read_too(tmp_path: Path) -> None:
    first, second = (replace(measured("eager", when=f"2026-01-0{n}"), comparison=rounds(f"g{n}", [1.0])) for n in (1, 2))
    pack(tmp_path / "b.jsonl.gz", first)
    pack(tmp_path / "a.jsonl.gz", second)
    assert Store(tmp_path).read().records == {first.id: second}
    assert sorted(one.when for one in read([tmp_path])) == [first.when, second.when]


@pytest.mark.slow
def test_rounds_of_another_sweep_are_kept_beside_a_cells_record_until_it_is_measured_again(tmp_path: Path) -> None:
    """Two sweeps with one cell in common: each has its ratio, in the folder and in its pack."""
    store = Store(tmp_path / "r")
    store.make()
    sweeps = {"g1": ("eager", "opara"), "g2": ("eager", "nimble"), "g3": ("eager", "opara")}
    for group, systems in sweeps.items():
        for system in systems:
            store.write(replace(measured(system), comparison=rounds(group, [1.0])))
    eager = store.find(measured("eager").id)
    assert eager is not None and eager.comparison is not None and eager.comparison.group == "g3"
    kept = [record.comparison.group for record in store.of_measurement(eager) if record.comparison is not None]
    assert kept[0] == "g3" and sorted(kept) == ["g1", "g2", "g3"]
    file, again = tmp_path / "a.jsonl.gz", tmp_path / "again"
    assert run(store.folder, file).returncode == 0 and run(file, again).returncode == 0
    assert {f.name for f in again.iterdir()} == {f.name for f in store.folder.iterdir()}
    for place in (store.folder, file, again):
        selection = Selection(read([place]))
        for system in ("opara", "nimble"):
            ratio = selection.over(("nasnet", 1), named("system", system), named("system", "eager"))
            assert ratio is not None and ratio.processes == (2 if system == "opara" else 1)
    (first,) = [one for one in store.of_measurement(eager) if one.comparison is not None and one.comparison.group == "g1"]
    store.write(replace(first, preparation_s=1.0))  # as a sweep that goes on with its own rounds
    assert len(store.of_measurement(first)) == 3 and len(store.read().all) == 6
    assert run(store.folder, tmp_path / "b.jsonl.gz").returncode == 0
    assert run(tmp_path / "b.jsonl.gz", tmp_path / "b").returncode == 0
    store.write(measured("eager", when="2026-02-01"))
    assert len(store.of_measurement(measured("eager", when="2026-02-01"))) == 1
    assert not list(store.folder.glob("*eager*-g?.json"))


def test_a_write_that_is_cut_off_loses_no_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    of_group = {group: replace(measured("eager"), comparison=rounds(group, [1.0])) for group in ("g1", "g2")}
    for one in of_group.values():
        store.write(one)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(before) == 2

    def killed(file: Path, document: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("results.store.write_json", killed)
    for one in (of_group["g1"], measured("eager", when="2026-02-01")):
        with pytest.raises(KeyboardInterrupt):
            store.write(one)
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_line_that_readers_could_not_rely_on_is_none(tmp_path: Path) -> None:
    lines = read_pack(pack(tmp_path / "a.jsonl.gz", replace(measured("eager"), when="once"), measured("nimble")))
    assert lines.records == [measured("nimble")] and lines.reasons_by_line == {1: "when: 'once' is no time"}


def test_what_is_neither_a_folder_nor_a_pack_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, what in (("file", "a file"), ("none", "not there"), ("none.jsonl.gz", "not there")):
        with pytest.raises(NoResults, match=f"{name} is {what}: results are in a folder, or in a file"):
            read([tmp_path / name])


def test_a_sweep_writes_into_no_pack(tmp_path: Path) -> None:
    file = pack(tmp_path / "a.jsonl.gz", measured("eager"))
    command = [sys.executable, "run.py", "model=squeezenet", "device=cpu", f"results={file}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "cannot be written" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert len(documents_of(file)) == 1


@pytest.mark.slow
def test_the_table_of_cells_is_what_the_records_give() -> None:
    text = cells.table(readme.RESULTS)
    assert text == readme.CELLS.read_text(encoding="utf-8")
    assert len(text.splitlines()) == 1 + sum(len(part.records) for part in Store(readme.RESULTS).parts())


def test_the_page_says_what_every_column_is() -> None:
    page = (readme.REFERENCE / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| \S.* \|$", page.partition("| column | |")[2], flags=re.MULTILINE)
    assert re.findall(r"\w+", " ".join(rows)) == [field.name for field in fields(cells.Row)]


def test_a_changed_record_changes_its_row() -> None:
    one = measured("eager", 1.23456789)
    one = replace(one, environment=replace(ENVIRONMENT, commit="0123456789abcdef", modified=True))
    (row,) = cells.rows("a", [one])
    assert (row.quantity, row.unit, row.value, row.commit, row.modified) == (
        "latency",
        "ms",
        "1.2346",
        "0123456789ab",
        "true",
    )
    (other,) = cells.rows("a", [replace(one, latency=latency(1.24))])
    assert other != row and other.value == "1.24"
    (empty,) = cells.rows("a", [replace(one, latency=None, status="failed")])
    assert (empty.quantity, empty.value, empty.low, empty.status) == ("", "", "", "failed")


@pytest.mark.parametrize(("number", "text"), [(None, ""), (0.0, "0"), (1234567.0, "1234600"), (1.2345678e-5, "0.000012346")])
def test_numbers_have_no_exponent(number: float | None, text: str) -> None:
    assert cells.shown(number) == text


def test_tests_share_the_records_of_a_committed_pack_and_of_no_other(tmp_path: Path) -> None:
    committed = ROOT / "results" / "reference" / "h200" / "reductions.jsonl.gz"
    (tmp_path / "a.jsonl.gz").write_bytes(committed.read_bytes())
    kept, copied = ([Store(file).read() for _ in range(2)] for file in (committed, tmp_path / "a.jsonl.gz"))
    for first, second in (kept, copied):
        assert first.all == second.all and first.all
    assert all(a is b for a, b in zip(kept[0].all, kept[1].all, strict=True))
    assert not any(a is b for a, b in zip(copied[0].all, copied[1].all, strict=True))
    read_committed_once(committed).records.clear()  # a reader's own list
    assert read_committed_once(committed).records == [*kept[0].all]
