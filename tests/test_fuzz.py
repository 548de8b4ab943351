"""Nothing that a file holds ends a report, a comparison, a table, a chart or a sweep: it is read, or a line says why not."""

import gzip
import io
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import matplotlib.pyplot as plt
import pytest
from conftest import ROOT
from made_records import latency
from mutations import mutated
from reports import VERDICT
from rich.console import Console

from results.cell import Cell, Conditions, choose
from results.document import NotARecord, from_json, to_json
from results.files import read_json
from results.pack import MOST_LINES, documents_of, packed, read_pack
from results.quantity import Measured, Quantity
from results.record import Record
from results.regression import METRICS, changes
from results.schedule_file import ScheduleFile
from results.selection import Selection
from results.siblings import siblings
from results.store import Store, read_record
from results.timeline import KINDS, Bar, Timeline, from_trace, to_trace
from results.verdict import read_verdicts
from runners.cell.messages import Answer, Command, Done, Learn, Learned, Measure
from runners.request.request import Request, SweepOptions
from runners.sweep.cell_process import CellProcess
from runners.sweep.summary import print_summary
from runners.sweep.sweep import Sweep
from scripts import best_tables, compare, report, tables, timeline
from scripts.charts.style import order
from scripts.page import content
from scripts.page.answer import answer
from scripts.page.pictures import inlined
from scripts.page.schedule_graph import ScheduleGraph
from scripts.plot import CHARTS, draw_all

REFERENCE = ROOT / "results" / "reference"
# Records that differ in what they hold: rewriting, tuning, a search, stages, training, counters; some measured in turn.
CORPUS = (
    *(
        "overview/nasnet-eager-b1-",
        "overview/nasnet-cuda_graph-b1-",
        "overview/nasnet-nimble-b1-",
        "ios/inception_v3-ios-b1-",
    ),
    *("best/bert-nimble_fused-b1-", "best/bert-torch_compile_best-b1-", "tuned/googlenet-tvm-b1-"),
    *("turns/googlenet-nimble-b32-", "figure5/bert-opara-b1-", "opara/googlenet-opara-b1-"),
)
ENERGY = Measured((Quantity("joules_per_call", "energy a call", "J", 1.25, 1.2, 1.3, source="NVML"),), {"J": (1.2, 1.3)})
STRANGE = "$\\frac{$ [/b] <b> | `{x}` __a__"
SEEDS = 100
CHOICES = ("model", "squeezenet"), ("system", "eager"), ("runner", "latency")


def older_document(sweep: str, name: str) -> dict[str, Any]:
    """The first of a pack whose file's name would begin so."""
    lines: list[Any] = documents_of(REFERENCE / "h200" / f"{sweep}.jsonl.gz")
    return next(document for document in lines if from_json(document).file_name.startswith(name))


@cache
def documents() -> list[dict[str, Any]]:
    """Real records of schema 1, and the same of schema 2 with a measurement that describes itself; one has odd names."""
    older = [older_document(*place.split("/")) for place in CORPUS]
    newer = [to_json(replace(from_json(document), measured={"energy": ENERGY})) for document in older]
    copies: list[dict[str, Any]] = json.loads(json.dumps(newer))
    for group in ("model", "system"):
        copies[0]["cell"][group]["choice"] = STRANGE
    return [*older, *copies]


@pytest.fixture(scope="module", params=[SEEDS, pytest.param(3 * SEEDS, marks=pytest.mark.slow)])
def damaged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of whole records, mutated ones, and names that are no files."""
    folder = tmp_path_factory.mktemp("damaged")
    for number, document in enumerate(documents()):
        (folder / f"whole-{number}.json").write_text(json.dumps(document))
    for seed in range(request.param):
        (folder / f"mutated-{seed}.json").write_bytes(mutated(documents()[seed % len(documents())], seed))
    (folder / "deep.json").write_text("[" * 200_000)
    (folder / "folder.json").mkdir()
    os.mkfifo(folder / "pipe\n\x1b[31m.json")
    (folder / "zero.json").symlink_to("/dev/zero")
    (folder / "nowhere.json").symlink_to("nowhere")
    return folder


@cache
def survivors(folder: Path) -> list[Record]:
    """The records of files that are still some, each under an id of its own."""
    records = []
    for file in sorted(folder.glob("*.json")):
        try:
            records.append(read_record(file))
        except NotARecord:
            continue
    return [replace(record, id=f"{number:016x}") for number, record in enumerate(records)]


def test_each_file_that_cannot_be_read_is_a_line_and_stays(damaged: Path) -> None:
    before = sorted(damaged.iterdir())
    contents = Store(damaged).read()
    assert len(contents.reasons_by_file) > SEEDS / 3 and contents.is_damaged
    names = {file.name for file in contents.reasons_by_file}
    assert {"deep.json", "folder.json", "pipe\n\x1b[31m.json", "zero.json", "nowhere.json"} <= names
    for line, file in zip(contents.skipped, contents.reasons_by_file, strict=True):
        assert line.isprintable() and len(line) < 1000 and (file.name in line or "pipe\\n" in line), line
    assert sorted(damaged.iterdir()) == before
    assert len(survivors(damaged)) > SEEDS / 3
    assert all(text.isprintable() for record in survivors(damaged) for text in (record.cell.label, record.reason or ""))


def test_each_line_that_cannot_be_read_is_a_line_and_costs_no_other(damaged: Path, tmp_path: Path) -> None:
    """The same documents as lines of a pack: each is read, or not, as its file is."""
    files = [file for file in sorted(damaged.glob("*.json")) if file.name.startswith(("whole", "mutated", "deep"))]
    lines = [file.read_bytes() for file in files]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines)))
    pack, contents = read_pack(tmp_path / "a.jsonl.gz"), Store(damaged).read()
    reasons = {number: contents.reasons_by_file[f] for number, f in enumerate(files, 1) if f in contents.reasons_by_file}
    assert pack.reason is None and len(pack.records) + len(reasons) == len(files) and reasons
    assert pack.reasons_by_line == reasons
    for line, number in zip(Store(tmp_path).read().skipped, reasons, strict=True):
        assert line.isprintable() and len(line) < 1000 and f"a.jsonl.gz, line {number}: " in line


def test_damaged_compressed_data_end_nothing_and_change_no_record(tmp_path: Path) -> None:
    """Of a pack with wrong bytes, or too few, each record is as it was written, or a line says why none is read."""
    file, whole = tmp_path / "a.jsonl.gz", packed(documents())
    known = read_pack(written(file, whole)).records
    assert len(known) == len(documents())
    refused = 0
    for seed in range(SEEDS):
        random, data = Random(seed), bytearray(whole)
        begin = random.randrange(len(data))
        match seed % 4:
            case 0:
                del data[begin:]
            case 1:
                data[begin] ^= 1 + random.randrange(255)
            case 2:
                data[begin : begin + 900] = random.randbytes(900)
            case _:
                data[begin:begin] = random.choice((b"\0", b"\x1f\x8b", whole[:begin]))
        pack = read_pack(written(file, bytes(data)))
        assert all(record in known for record in pack.records), seed
        assert pack.reason is None or "\n" not in pack.reason
        refused += pack.reason is not None
        assert len(Store(file).read().skipped) == (pack.reason is not None) + len(pack.reasons_by_line)
    assert refused > SEEDS / 2


def written(file: Path, data: bytes) -> Path:
    file.write_bytes(data)
    return file


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (gzip.compress(b""), "it is empty"),
        (b"no gzip", "Not a gzipped file"),
        (gzip.compress(b"\n" * (MOST_LINES + 1)), "more than 65,536 lines"),
        (gzip.compress(b"0" * 3_000_000), "it is larger than"),
        (gzip.compress(b"{}\n")[:-4], "it ends early"),
    ],
    ids=["empty", "no line", "text", "lines", "bomb", "cut"],
)
def test_a_file_that_is_no_pack_is_one_line(
    content: bytes, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("results.files.MOST_BYTES", 2**20)
    written(tmp_path / "a.jsonl.gz", content)
    (line,) = [line for line in Store(tmp_path).read().skipped if "line 1:" not in line]
    assert why in line and "a.jsonl.gz: " in line


def test_names_of_packs_that_are_no_files_are_a_line_each(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe\n\x1b[31m.jsonl.gz")
    (tmp_path / "folder.jsonl.gz").mkdir()
    (tmp_path / "zero.jsonl.gz").symlink_to("/dev/zero")
    (tmp_path / "nowhere.jsonl.gz").symlink_to("nowhere")
    skipped = Store(tmp_path).read().skipped
    assert len(skipped) == 4 and all(line.isprintable() for line in skipped)
    assert sum("no regular file" in line for line in skipped) == 2


def test_a_line_that_is_too_long_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps(document) for document in documents()[:3]]
    lines[1] = lines[1][:-1] + " " * 3 * max(map(len, lines)) + "}"
    monkeypatch.setattr("results.pack.MOST_LINE_BYTES", 2 * max(map(len, lines)) // 3)
    pack = read_pack(written(tmp_path / "a.jsonl.gz", gzip.compress("\n".join(lines).encode())))
    assert list(pack.reasons_by_line) == [2] and "longer than" in pack.reasons_by_line[2] and len(pack.records) == 2


def draw(records: list[Record]) -> None:
    """Every table and chart of a report, as if all had been measured in one setting: a chart of each takes seconds."""
    measured = Selection(records, order)
    eager = measured.system("eager")
    charts, _ = draw_all(measured, [*CHARTS, *measured.quantities()], eager, [])
    figures = [
        report.Figure(name, chart.title, chart.caption, inlined(chart, number), "a.svg")
        for number, (name, chart) in enumerate(charts.items())
    ]
    cells, remarks, where = content.cells(measured, eager), content.remarks(measured), content.environment(measured)
    gains = content.gains(measured)
    section = report.Section("all", answer(measured, eager), where, cells, gains, remarks, figures, {})
    page = report.Report("all", None, [section], [], [])
    page.html().encode()
    page.markdown().encode()


def summarize(records: list[Record]) -> None:
    console = Console(file=io.StringIO(), width=200, markup=False)
    print_summary(records, Path("folder"), console)
    for record in records:
        print_summary([record], Path("folder"), console)


def compare_all(records: list[Record]) -> None:
    whole = [from_json(document) for document in documents()]
    for metric, (one, other) in product(METRICS, ((records, whole), (whole, records), (records, records))):
        compared = changes(one, other, metric, "eager")
        Console(file=io.StringIO(), markup=False).print(compare.table(compared, metric, 0.05))
        assert all(change.verdict(0.05) for change in compared)


def tabulate(records: list[Record]) -> None:
    """The tables of the README."""
    groups = siblings(records)
    for make in (
        *(
            tables.overview,
            tables.turns,
            tables.compilers,
            best_tables.best,
            best_tables.front,
            best_tables.products,
            tables.reductions,
            tables.tuned,
        ),
        *(tables.training, tables.side_by_side, tables.launch_orders),
    ):
        make(groups).markdown()
    tables.stages(groups, groups).markdown()
    tables.algorithms([groups]).markdown()
    tables.measured_alone(groups, [tables.NIMBLE, tables.OPARA])
    tables.equal_to_eager(groups)


@pytest.mark.parametrize("use", [summarize, compare_all, tabulate])
def test_what_is_still_a_record_ends_nothing(damaged: Path, use: Callable[[list[Record]], None]) -> None:
    use(survivors(damaged))


def test_charts_and_pages_of_what_is_still_a_record_are_drawn(damaged: Path) -> None:
    records = survivors(damaged)
    odd = next(record for record in map(from_json, documents()) if record.cell.model.choice == STRANGE)
    draw([odd, *records[:: 10 if len(records) < SEEDS else 3]])  # a chart takes seconds


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a sweep runs whose locks are its own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / "runs"


def answered(_: CellProcess, command: Command, *rest: Any) -> Answer:
    """What a cell's process would say, without one."""
    match command:
        case Learn():
            return Learned(None)
        case Measure():
            parts: dict[str, Any] = {"latency": latency(1.0, 1.1), "measured": {"energy": ENERGY}}
            return Done(replace(command.record, status="ok", reason=None, **parts))
    raise AssertionError(f"nothing else is asked: {command}")


def test_a_sweep_over_a_damaged_record_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CellProcess, "__init__", lambda self, *_: setattr(self, "pid", 0))
    monkeypatch.setattr(CellProcess, "close", lambda self: None)
    monkeypatch.setattr(CellProcess, "ask", answered)
    cell = Cell(*(choose(*choice) for choice in CHOICES), Conditions(1, "cpu", "fp32"))
    sweep = Sweep(Request((cell,), SweepOptions(folder, False, 60, None, rounds=1, max_load=1.0, gpus=(0,), output=None)))
    assert sweep.run() == 0
    (file,) = folder.glob("*.json")
    document = json.loads(file.read_text())
    for seed in range(SEEDS):
        file.write_bytes(mutated(document, seed))
        assert sweep.run() in (0, 1), seed  # 1: a mutated status may say that it went wrong
    file.unlink()
    os.mkfifo(file)
    assert sweep.run() == 0 and read_record(file).is_ok


def schedule(file: Path) -> None:
    ScheduleGraph(ScheduleFile.read(file)).to_svg()


def trace(file: Path) -> None:
    timelines = from_trace(read_json(file))
    if any(one.bars for one in timelines):
        plt.close(timeline.draw(timelines))


def verdicts(file: Path) -> None:
    report.verdict_table(read_verdicts(file))


def made(use: Callable[[Path], None]) -> Any:
    """A whole document of a kind."""
    if use is schedule:
        files = REFERENCE.glob("**/*.schedule.json.gz")
        return read_json(min(files, key=lambda file: file.stat().st_size))
    cell = Cell(*(choose(*choice) for choice in CHOICES), Conditions(1, "cpu"))
    bars = tuple(Bar(stream, "conv", 1.0 * stream, 2.0, KINDS[stream], {"flops": 1}) for stream in range(3))
    return to_trace([Timeline(cell, "host", bars, 3)]) if use is trace else [asdict(VERDICT)]


@pytest.mark.parametrize("use", [schedule, trace, verdicts])
def test_schedules_traces_and_verdicts_are_read_or_told_in_a_line(use: Callable[[Path], None], tmp_path: Path) -> None:
    file, document, refused = tmp_path / "a.json", made(use), 0
    for seed in range(SEEDS if use is not trace else SEEDS // 2):
        file.write_bytes(mutated(document, seed))
        try:
            use(file)
        except ValueError as error:  # as NoSchedule and NotARecord are
            refused += 1
            assert "\n" not in str(error), error
    assert refused > SEEDS / 40
