"""The report: what it holds, its page and its Markdown."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_records import cell, throughput
from made_records import record as made_record
from reports import REFERENCE, TIMELINE, VERDICT, made, records

from results.cell import named
from results.quantity import Measured, Quantity
from results.record import Record
from results.selection import Selection, by_setting, read
from results.timeline import COMPUTE, MEMORY, Bar, to_trace
from results.verdict import VERDICTS, read_verdicts, write_verdicts
from scripts import report
from scripts.charts.style import order
from scripts.page import content, timelines
from scripts.page.answer import fastest
from scripts.table import DASH


class Page(HTMLParser):
    """What stands in a page: every start tag with its attributes, and the text of tables' cells, row by row."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside &= tag not in ("td", "th", "tr")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.tables[-1][-1][-1] += data


def test_the_page_needs_nothing_but_itself() -> None:
    page = Page(made().html())
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "action", "data"):
            if (target := attributes.get(name)) is not None:
                assert target.startswith("#"), (tag, target)
        assert tag not in ("link", "iframe", "object", "embed", "img", "base")
    html = made().html()
    assert "@import" not in html and not re.search(r"url\((?!#)", html) and "fetch(" not in html
    (policy,) = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'")
    ids = [a["id"] for _, a in page.tags if a.get("id")]
    assert len(set(ids)) == len(ids)
    targets = {a["href"] or "" for tag, a in page.tags if tag == "a"} | set(re.findall(r'(?:href="|url\()#([^")]+)', html))
    assert {target.removeprefix("#") for target in targets} <= set(ids)


def test_numbers_stand_under_their_heading() -> None:
    """At its right end: by the class of the cell, by the value that it sorts by, or since it is missing and has no class."""
    right: list[bool] = []  # of each column of the table that is being read
    seen = 0
    for tag, attributes in Page(made().html()).tags:
        if tag == "thead":
            right = []
        elif tag == "th":
            right.append(attributes.get("class") == "number")
        elif tag == "tr":
            column = 0
        elif tag == "td":
            is_plain_gap = "data-missing" in attributes and "class" not in attributes
            is_right = attributes.get("class") == "number" or "data-value" in attributes or is_plain_gap
            assert is_right == right[column], column
            seen, column = seen + right[column], column + 1
    assert seen > 100


def test_every_cell_is_in_the_table_and_an_incorrect_one_has_no_speed() -> None:
    (section,) = made().sections
    (cells,) = section.cells.values()
    assert len(cells.rows) == len(records())
    headings = [column.heading for column in cells.columns]
    rows = {tuple(entry.text for entry in row[:3]): dict(zip(headings, row, strict=True)) for row in cells.rows}
    for record in records():
        cell = record.cell
        row = rows[cell.model.label, str(cell.batch), cell.system.label]
        assert row["status"].text == record.status
        numbers = [row[name].text for name in headings[4:]]
        if not record.is_ok:
            assert set(numbers) == {DASH}
        else:
            assert record.memory is not None and record.sm_efficiency is not None
            assert row["latency, ms"].value == record.host_ms
            assert row["MiB"].value == record.memory.peak_bytes / 2**20
            source = "SM, counted" if record.sm_efficiency.source == "counters" else "SM, estimated"
            share = record.sm_efficiency.value
            if share is not None:
                assert row[source].value == pytest.approx(100 * share)
            assert sum(row[name].missing for name in ("SM, counted", "SM, estimated")) == (1 if share is not None else 2)
    remarks_by_cell = {(row[0].text, row[2].text, row[3].text): row[4].text for row in section.remarks.rows}
    assert remarks_by_cell["bert", "nimble", "incorrect"] == "relative error 1.0e+00 exceeds <the> tolerance"
    assert remarks_by_cell["nasnet", "torchscript", "unsupported"] == "no compiler | here"
    html = made().html()
    assert "exceeds &lt;the&gt; tolerance" in html and "<the>" not in html


def test_a_schedule_is_told_by_its_name_and_a_ratio_not_in_turn_has_a_mark() -> None:
    ios, alone = (Selection(read([REFERENCE / f"{name}.jsonl.gz"])) for name in ("ios", "overview"))
    calls = content.cells(ios, named("system", "sequential"))[content.CALLS]
    systems = {row[2].text: row[2].title for row in calls.rows}
    path = "results/exhibits/ios-specialization/inception_v3@ios@b1.schedule.json"
    assert systems["ios (schedule=inception_v3@ios@b1)"] == f"ios (schedule={path})" and systems["ios"] == ""
    for selection, baseline in ((alone, "cuda_graph"), (ios.only(systems=["sequential", "ios"]), "sequential")):
        table = content.cells(selection, named("system", baseline))[content.CALLS]
        (column,) = [i for i, heading in enumerate(table.columns) if heading.heading == f"over {baseline}"]
        ratios = [row[column].text for row in table.rows if not row[column].missing and row[2].text != baseline]
        assert ratios and all(text.endswith("] *") == (selection is alone) for text in ratios)


def test_what_a_served_model_measures_has_tables_of_its_own() -> None:
    """Every cell stands in a table with all of its quantities, and no table has a column of another's."""
    records = read([REFERENCE / "serving.jsonl.gz"])
    there = {
        (record.cell.model.label, record.cell.system.label, f"{measurement}.{quantity.name}")
        for record in records
        for measurement, measured in record.described.items()
        for quantity in measured.quantities
        if quantity.value is not None
    }
    shown = set()
    for selection in by_setting(records).values():
        tables = content.cells(selection, named("system", "orca"))
        for name, table in tables.items():
            quantities = [column.meaning.partition(";")[0] for column in table.columns]
            assert {q.partition(".")[0] for q in quantities if "." in q} <= {name}
            for row in table.rows:
                about = row[0].text, row[2].text
                shown |= {(*about, q) for q, entry in zip(quantities, row, strict=True) if "." in q and not entry.missing}
    assert {name.partition(".")[0] for _, _, name in there} >= {"engine", "serving"} and shown == there


def test_what_was_measured_of_calls_stands_with_what_describes_itself() -> None:
    energy = Quantity("per_call", "energy of a call", "mJ", 5.0)
    one = made_record("eager", throughput=throughput(10.0, 11.0), measured={"energy": Measured((energy,))})
    ((name, table),) = content.cells(Selection([one]), named("system", "eager")).items()
    assert name == content.CALLS and {"samples/s", "energy of a call, mJ"} <= {column.heading for column in table.columns}


def test_the_environment_says_where() -> None:
    (section,) = made().sections
    facts = dict(section.environment)
    assert facts["GPU"] == "NVIDIA H200" and facts["driver, CUDA, cuDNN"] == "580.159.04, 13.0, 9.19.0"
    assert "torch 2.11.0" in facts["libraries"] and facts["SM clock when measured"].endswith("1980 MHz")
    count = len(records())
    assert facts["records"] == f"1 incorrect, {count - 2} ok, 1 unsupported"
    one = records()[0]
    settings = {"OMP_NUM_THREADS": "1", "CUDA_LAUNCH_BLOCKING": "0"}
    machines = [one, replace(one, environment=replace(one.environment, driver="999", settings=settings))]
    facts = dict(content.environment(Selection(machines)))
    assert facts["driver, CUDA, cuDNN"] == "580.159.04, 999, 13.0, 9.19.0"
    assert facts["settings of the shell"] == "OMP_NUM_THREADS=1 CUDA_LAUNCH_BLOCKING=0"


def test_the_charts_and_what_could_not_be_drawn_are_there() -> None:
    (section,) = made().sections
    names = {figure.name for figure in section.figures}
    assert {"speedup-b1", "throughput", "latency-b1", "memory-b1", "search-b1", "limits-b1"} <= names
    assert {"sm_efficiency-counters-b1", "sm_efficiency-estimated-b1"} <= names and not section.refused
    assert all(figure.svg.startswith("<svg ") and figure.svg.endswith("</svg>") for figure in section.figures)
    few = [r for r in records() if r.cell.batch == 1]
    (other,) = report.make(by_setting(few, order), "eager", [], [], [], [], "pictures").sections
    assert list(other.refused) == ["throughput"]


def test_markdown_says_the_same_and_its_pictures_are_there(tmp_path: Path) -> None:
    made().write_pictures(tmp_path)
    text = made().markdown()
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        assert (tmp_path / picture).read_text().startswith("<svg ")
    assert len(re.findall(r"!\[", text)) == len(made().sections[0].figures) + 2  # a schedule, and timelines
    assert "no compiler \\| here" in text and "22.34 times" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    for head in (i for i, line in enumerate(lines) if line.startswith("|---")):
        width = len(re.findall(r"(?<!\\)\|", lines[head]))
        assert len(re.findall(r"(?<!\\)\|", lines[head - 1])) == len(re.findall(r"(?<!\\)\|", lines[head + 1])) == width
    assert sum(line.startswith(("| bert |", "| nasnet |", "| randwire |")) for line in lines) >= len(records())


def test_verdicts_come_back_and_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.json"
    write_verdicts(file, [VERDICT])
    assert read_verdicts(file) == [VERDICT] and VERDICT.verdict in VERDICTS
    table = made().verdicts
    assert table is not None and "8 of 12" in made().html() and "8 of 12" in made().markdown()
    assert table is not None and all(column.words for column in table.columns if column.heading in ("published", "measured"))
    first = [entry.text for entry in table.rows[0]]
    assert first[:5] == [VERDICT.exhibit, VERDICT.verdict, "8 of 12", VERDICT.claim, "22.34x"]
    for broken in ({}, [{}], [vars(VERDICT) | {"verdict": "maybe"}], [vars(VERDICT) | {"more": "x"}]):
        file.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match="verdict"):
            read_verdicts(file)


def test_timelines_of_models_on_the_page_are_found_beside_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the same machine, torch and arithmetic; a file that holds none is left out with a warning."""
    settings = by_setting(records(), order)
    (setting,) = settings
    machine = f"{setting.place}, torch {setting.torch}"
    arithmetic = {key: getattr(setting, key) for key in ("precision", "layout", "algorithms")}
    known = replace(TIMELINE.cell.conditions, **arithmetic)
    own = replace(TIMELINE, cell=replace(TIMELINE.cell, conditions=known), machine=machine)
    elsewhere = replace(own, machine="another GPU, torch 1.0")
    unmeasured = replace(own, cell=replace(own.cell, conditions=replace(known, batch=77)))
    other_arithmetic = replace(own, cell=replace(own.cell, conditions=replace(known, precision="fp16")))
    (tmp_path / "nasnet").mkdir()
    trace = to_trace([own, elsewhere, unmeasured, other_arithmetic])
    (tmp_path / "nasnet" / f"x{timelines.ENDING}").write_text(json.dumps(trace))
    (tmp_path / "nasnet" / f"y{timelines.ENDING}").write_text("{}")
    monkeypatch.setattr(timelines, "FOLDERS", (tmp_path,))
    assert timelines.beside(settings) == [own]
    assert f"y{timelines.ENDING} is left out: " in capsys.readouterr().err


def test_a_timeline_is_drawn_where_it_unfolds() -> None:
    (drawn,) = made().timelines
    assert drawn.title == "nasnet, batch 1, a GPU, torch 1.0, tf32" and drawn.summary == "nimble 1.500 ms"
    for page in (made().html(), made().markdown()):
        assert "Timelines" in page and drawn.summary in page
    assert '<details class="timeline">' in made().html() and drawn.file in made().markdown()


def test_bars_that_follow_each_other_at_once_are_one_where_a_page_draws_them() -> None:
    """Of one stream and one kind; what ran when stays as it was."""
    bars = [Bar(0, "a", 0.0, 1.0, COMPUTE), Bar(0, "b", 1.0001, 1.0, COMPUTE), Bar(0, "c", 2.0001, 1.0, MEMORY)]
    bars += [Bar(0, "d", 4.0, 1.0, MEMORY), Bar(1, "e", 5.0, 5.0, MEMORY)]
    (one,) = timelines.joined([replace(TIMELINE, bars=tuple(reversed(bars)))])
    shown = [(bar.stream, bar.name, bar.start, round(bar.end, 9), bar.kind) for bar in one.bars]
    assert shown == [
        (0, "", 0.0, 2.0001, COMPUTE),
        (0, "c", 2.0001, 3.0001, MEMORY),
        (0, "d", 4.0, 5.0, MEMORY),
        (1, "e", 5.0, 10.0, MEMORY),
    ]


def test_many_settings_are_folded_at_the_top_of_the_page() -> None:
    (section,) = made().sections
    for number, is_folded in ((3, False), (4, True)):
        top = replace(made(), sections=[section] * number).html().partition("</nav>")[0]
        assert (f"<summary>{number} settings</summary>" in top) == is_folded
        assert top.count('href="#setting-') == number


def test_a_system_whose_name_records_alone_have_is_told_of() -> None:
    before = named("system", "checkout", runs="nimble")
    own = replace(made_record(), cell=cell().under(replace(before, choice="nimble_fused_before")))
    rows = dict(content.environment(Selection([own, made_record("eager")])))
    assert rows["systems without a file of conf/system"] == "nimble_fused_before (checkout of nimble)"
    assert "systems without a file of conf/system" not in dict(content.environment(Selection([made_record("eager")])))


def test_the_answer_names_the_fastest_and_what_is_level_with_it() -> None:
    selection = Selection([record for record in records() if record.cell.runner.name == "bench"])
    rows = fastest(selection, named("system", "eager"))
    assert len(rows) > 3
    for one in rows:
        timed = {r.cell.system.label: r.latency.host for r in records() if r.is_ok and r.latency and _row(r) == one.row}
        assert one.systems == len(timed) and timed[one.system.label].median == one.latency.host.median
        if one.not_in_turn is None:
            continue  # rounds decide
        assert one.latency.host.median == min(host.median for host in timed.values())
        for label, host in timed.items():
            is_level = host.ci95[0] <= 1.1 * one.latency.host.ci95[1] and label != one.system.label
            assert is_level == (label in [system.label for system in one.level])
    assert "bert nimble b1" not in {f"{one.row[0]} {one.system.label} b{one.row[1]}" for one in rows}  # it is incorrect
    shown = made().answered[0].answer
    assert shown is not None and len(shown.table.rows) == len(rows)
    assert shown.sentence in made().markdown().replace("\\", "") and shown.sentence in made().html()


def _row(record: Record) -> tuple[str, int]:
    return record.cell.model.label, record.cell.batch
