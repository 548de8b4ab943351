"""The report: what it holds, its page and its Markdown, and the command that writes them."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import ROOT, Run
from dags import from_edges
from made_records import cell, latency, rounds, throughput
from made_records import record as made_record
from reports import OVERVIEW, REFERENCE, TIMELINE, VERDICT, document, made, records

from results.cell import named
from results.limits import Limits
from results.quantity import Measured, Quantity
from results.record import Record
from results.selection import Selection, by_setting, read
from results.timeline import COMPUTE, MEMORY, Bar, to_trace
from results.verdict import VERDICTS, read_verdicts, write_verdicts
from results.warning import Warning
from scripts import report
from scripts.charts.style import order
from scripts.page import content, timelines
from scripts.page.answer import answer, fastest
from scripts.table import DASH
from systems.scheduling.plans.stream_assignment import assign_streams


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


def test_verdicts_of_an_older_form_are_left_out(script: Run, folder: Path) -> None:
    """Where the file was asked for, it is an error."""
    file = folder / "results" / "exhibits" / "verdicts.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps([{"exhibit": "nimble/figure7"}]))
    places = "--results", str(REFERENCE / "best.jsonl.gz"), "--models", "nasnet", "--output", str(folder / "r.html")
    done = script("report", *places, cwd=folder)
    assert done.returncode == 0 and done.stderr.startswith(
        "warning: results/exhibits/verdicts.json is left out: a verdict has"
    )
    assert len(done.stderr.splitlines()) == 1 and (folder / "r.html").exists()
    assert script("report", *places, "--verdicts", str(file), cwd=folder).returncode == 2


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


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "scripts/report.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--results", "nowhere"], "nowhere is not there"),
        (["--results", OVERVIEW, "README.md"], "README.md is a file: results are in a folder"),
        (["--results", "README.md", OVERVIEW], "README.md is a file: results are in a folder"),
        (["--results", "README.md/deeper"], "README.md/deeper is not there: results are in a folder"),
        (["--results", OVERVIEW, "--schedules", "nowhere.json"], "nowhere.json"),
        (["--results", OVERVIEW, "--verdicts", "nowhere.json"], "nowhere.json"),
        (["--results", OVERVIEW, "--timelines", "nowhere.json"], "nowhere.json: No such file"),
        (["--results", OVERVIEW, "--timelines", OVERVIEW], "no JSON"),
        (
            ["--results", OVERVIEW, "--models", "vgg16", "--output", "/dev/null/x/r.html"],
            "cannot be written",
        ),
        (["--results", OVERVIEW, "--output", "tests"], "it is a folder"),
        (["--results", OVERVIEW, "--output", "r.x", "--markdown", "./r.x"], "are both r.x"),
    ],
)
def test_a_bad_request_is_a_line(script: Run, arguments: list[str], message: str) -> None:
    done = script("report", *arguments)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_what_cannot_be_written_is_told_before_anything_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(
        "--results",
        OVERVIEW,
        "--output",
        f"{tmp_path}/r.html",
        "--markdown",
        f"{tmp_path}/file/r.md",
    )
    assert done.returncode == 2 and "is not a folder" in done.stderr and done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_command_writes_both_pages(tmp_path: Path) -> None:
    schedule = tmp_path / "s.json"
    graph = from_edges(3, [(0, 1), (0, 2)])
    schedule.write_text(json.dumps(document(graph, assign_streams(graph))))
    page, text = tmp_path / "deep" / "r.html", tmp_path / "r.md"
    done = run(
        *(
            "--results",
            OVERVIEW,
            "--models",
            "nasnet,bert",
            "--batches",
            "1",
            "--schedules",
            str(schedule),
        ),
        *("--output", str(page), "--markdown", str(text)),
    )
    assert done.returncode == 0 and done.stdout.split() == [str(page), str(text)], done.stderr
    assert "<!DOCTYPE html>" in page.read_text()[:20] and (tmp_path / "r_files" / "speedup.svg").exists()
    assert "![a model, nimble" in text.read_text()


def test_a_terminal_is_told_how_far_the_charts_are(script: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = REFERENCE / "level.jsonl.gz"
    arguments = "report", "--results", str(pack), "--models", "bert", "--output", str(folder / "r.html")
    assert not script(*arguments).stderr
    monkeypatch.setenv("FORCE_COLOR", "1")  # stands for a terminal, as rich has it
    assert "drawing" in script(*arguments).stderr


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


def test_the_answer_of_made_up_records_is_as_one_works_it_out() -> None:
    """Of three models nimble is the fastest of two. Two are level with it once: their intervals begin within nimble's. One
    is within what two processes may differ by. One more model has one system, so that there is nothing to compare."""
    milliseconds = {
        ("bert", "nimble"): (1.0, 1.0, 1.1, 1.2, 1.2),
        ("bert", "opara"): (1.15,) * 5,
        ("bert", "torchscript"): (1.18,) * 5,
        ("bert", "eager"): (2.2,) * 5,
        ("gpt2", "nimble"): (3.0,) * 5,
        ("gpt2", "opara"): (3.1,) * 5,
        ("t5", "opara"): (8.0,) * 5,
        ("t5", "nimble"): (9.5,) * 5,
        ("vgg16", "nimble"): (1.0,) * 5,
    }
    # Opara's kernels of bert take longer. What nimble rewrites gpt2 to has a shorter path, and takes longer to launch.
    limits = {
        ("bert", "nimble"): Limits(1.0, 2.0, sm_area_ms=0.25, traffic_ms=0.1, launch_ms=0.2),
        ("bert", "opara"): Limits(1.05, 2.0, sm_area_ms=1.04, traffic_ms=0.1, launch_ms=0.2),
        ("gpt2", "opara"): Limits(2.0, 2.0, launch_ms=0.5),
        ("gpt2", "nimble"): Limits(2.0, 2.0, launch_ms=0.5, rewritten=Limits(1.0, 2.0, sm_area_ms=1.5, launch_ms=0.1)),
    }
    records = [
        made_record(of=cell(system, model, device="cuda"), latency=latency(*times), limits=limits.get((model, system)))
        for (model, system), times in milliseconds.items()
    ]
    eager = named("system", "eager")
    by_model = {one.row[0]: one for one in fastest(Selection(records), eager)}
    assert {model: (one.system.label, one.systems) for model, one in by_model.items()} == {
        **{"bert": ("nimble", 4), "gpt2": ("nimble", 2), "t5": ("opara", 2)},
    }
    assert {model: [system.label for system in one.level] for model, one in by_model.items()} == {
        **{"bert": ["opara", "torchscript"], "gpt2": ["opara"], "t5": []},
    }
    assert {model: next(iter(one.bounds.items()), None) for model, one in by_model.items()} == {
        **{"bert": ("critical path", 1.0), "gpt2": ("SM area", 1.5), "t5": None},
    }
    assert [one.distance for one in by_model.values()] == [1.1, 2.0, None]
    assert by_model["bert"].bounds["SM area"] == 0.25
    said = answer(Selection(records), eager)
    assert said is not None and said.sentence == (
        "nimble is the fastest for 2 of 3 pairs of a model and a batch, opara for 1."
        " In 2 of 3 the fastest is level with another: two processes of one system may differ so."
        " 3 of 3 are decided without rounds, by latencies each measured alone: the systems did not take turns."
        " The fastest takes 1.10 to 2.00 times the bound of the operators that were profiled (median 1.55, 2 rows)."
    )


def test_what_lies_within_the_margin_of_two_processes_is_level() -> None:
    def levels(*again_ms: float) -> list[str]:
        records = [
            made_record(system, latency=latency(ms), comparison=rounds("g", *[[ms]] * 3))
            for system, ms in (("nimble", 1.0), ("opara", 1.03), ("ios", 1.2))
        ]
        first = records[0].comparison
        assert first is not None
        records[0] = replace(records[0], comparison=replace(first, again=tuple((ms,) for ms in again_ms) or None))
        (one,) = fastest(Selection(records), named("system", "eager"))
        return [system.label for system in one.level]

    assert levels(1.0, 1.0, 1.0) == [] and levels(1.04, 1.05, 1.04) == ["opara"] and levels(0.96, 0.95, 0.96) == ["opara"]
    assert levels() == ["opara"]  # nobody measured the margin here: it is that of others


def test_what_each_of_two_sets_of_rounds_shows_clearly_is_not_level() -> None:
    """Of two sets the common interval holds 1, whose ends Student's distribution of one degree of freedom gives."""

    def levels(*slower_by: float) -> list[str]:
        records = [
            made_record(
                system,
                latency=latency(1.0),
                comparison=replace(rounds(group, *[[ms]] * 5), when=f"2026-01-0{i + 1}"),
                when=f"2026-01-0{i + 1}",
            )
            for i, (group, times) in enumerate(zip("gh", slower_by, strict=True))
            for system, ms in (("nimble", 1.0), ("ios", times))
        ]
        ratio = Selection(records).over(("nasnet", 1), named("system", "nimble"), named("system", "ios"))
        assert ratio is not None and ratio.low < 1 < ratio.high and ratio.processes == 2
        (one,) = fastest(Selection(records), named("system", "eager"))
        return [system.label for system in one.level]

    assert levels(1.5, 3.0) == [] and levels(1.05, 3.0) == ["ios"]


def test_rounds_decide_what_is_the_fastest_and_not_latencies_alone() -> None:
    """Alone nimble is the fastest; in turn opara is, by a fifth of nimble's time and a third of eager's."""
    times_ms = {"nimble": (1.0, 1.25), "opara": (1.1, 1.0), "eager": (1.05, 1.5)}
    records = [
        made_record(system, latency=latency(alone), comparison=rounds("g", *[[in_turn]] * 3))
        for system, (alone, in_turn) in times_ms.items()
    ]
    (one,) = fastest(Selection(records), named("system", "eager"))
    assert (one.system.label, one.latency.host.median, one.level, one.not_in_turn) == ("opara", 1.1, (), None)


def test_older_rounds_do_not_overturn_what_newer_code_takes() -> None:
    """nimble was slower than ios by older code. By newer code it is twice as fast as that, and weave is level with it."""

    def measured(system: str, alone: float, in_turn: float, group: str, when: str) -> Record:
        return made_record(system, latency=latency(alone), comparison=rounds(group, *[[in_turn]] * 3), when=when)

    older = [measured(s, ms, ms, "old", "2026-01-01") for s, ms in (("nimble", 2.2), ("ios", 2.0))]
    newer = [measured(s, ms, t, "new", "2026-02-01") for s, ms, t in (("nimble", 1.0, 0.99), ("weave", 0.99, 1.0))]
    (one,) = fastest(Selection([*older, *newer]), named("system", "eager"))
    assert (one.system.label, one.not_in_turn) == ("nimble", None) and "ios" not in {s.label for s in one.level}
    (one,) = fastest(Selection([older[1], *newer[:1]]), named("system", "eager"))
    assert one.system.label == "nimble" and one.not_in_turn == "the systems did not take turns"
    (one,) = fastest(Selection([*older, *newer[:1]]), named("system", "eager"))
    assert one.system.label == "nimble" and one.not_in_turn == "the newest records are of two sweeps"


def test_the_answer_says_which_rows_the_rounds_do_not_decide() -> None:
    def said(*warnings: Warning) -> str:
        records = [
            made_record(
                of=cell(system, model, device="cuda"),
                latency=latency(milliseconds),
                limits=Limits(1.0, 2.0),
                comparison=rounds(model, [milliseconds], [milliseconds]),
                warnings=warnings if model == "bert" else (),
            )
            for model in ("bert", "gpt2")
            for system, milliseconds in (("nimble", 1.6), ("eager", 3.2))
        ]
        told = answer(Selection(records), named("system", "eager"))
        assert told is not None
        return told.sentence

    busy = Warning("busy_rounds", {"load": 0.76, "cores": 2})
    first, path = (
        "nimble is the fastest for 2 of 2 pairs of a model and a batch.",
        "times the bound of the operators that were profiled",
    )
    assert said() == f"{first} The fastest takes 1.60 {path} (2 rows)."
    assert said(busy) == (
        f"{first} 1 of 2 is decided without rounds, by latencies each measured alone:"
        f" other processes took 76% of the 2 cores during the rounds. The fastest takes 1.60 {path} (2 rows)."
    )


def _row(record: Record) -> tuple[str, int]:
    return record.cell.model.label, record.cell.batch
