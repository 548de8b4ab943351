"""The report: what it holds, schedules as graphs, and the page as a browser shows it."""

import copy
import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from conftest import ROOT
from dags import as_networkx, dags
from hypothesis import given

from results.published.values import exhibit
from results.record import label
from results.verdict import VERDICTS, Verdict, read_verdicts, write_verdicts
from scripts import report
from scripts.charts.measured import Measured, by_setting, read
from scripts.page import content
from scripts.page.schedule_graph import NoSchedule, ScheduleGraph
from systems.nimble.stream_assignment import assign_streams
from systems.scheduling.operator_graph import OperatorGraph
from systems.scheduling.schedule import Schedule

REFERENCE = ROOT / "results" / "reference" / "h200"
VERDICT = Verdict(
    exhibit="nimble/figure7",
    claim="Nimble is up to 22.34 times as fast as PyTorch <NASNet-A mobile>",
    published="22.34x",
    measured="14.09x [12.86, 25.37]",
    verdict="holds in part",
    reason="The order of the models holds.",
    command="python scripts/reproduce.py nimble/figure7",
    place="NVIDIA H200",
)


def document(graph: OperatorGraph, schedule: Schedule) -> dict[str, Any]:
    return schedule.to_json(model="a model", batch=1, device="cpu")


@cache
def records() -> list[dict[str, Any]]:
    """A few of the reference's, with one that is incorrect although it holds measurements, and one that did not run."""
    found = [copy.deepcopy(r) for r in read([REFERENCE]) if r["config"]["model"]["name"] in ("nasnet", "bert", "randwire")]
    for record in found:
        config = record["config"]
        name = config["model"]["name"], config["system"]["name"], config["batch"]
        if name == ("bert", "nimble", 1):
            record |= {"status": "incorrect", "reason": "relative error 1.0e+00 exceeds <the> tolerance"}
        if name == ("nasnet", "torchscript", 1):
            record |= {"status": "unsupported", "reason": "no compiler | here", "latency": None, "comparison": None}
    return found


@cache
def made() -> report.Report:
    chain = OperatorGraph.from_edges(7, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (0, 5), (5, 6), (4, 6)])
    graph = ScheduleGraph(document(chain, assign_streams(chain)))
    return report.make(by_setting(records()), "eager", exhibit("nimble/figure7"), [graph], [VERDICT], "pictures")


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
        self.inside &= tag not in ("td", "th")

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
    targets = {a["href"] or "" for tag, a in page.tags if tag == "a"} | set(
        re.findall(r'(?:xlink:href="|url\()#([^")]+)', html)
    )
    assert {target.removeprefix("#") for target in targets} <= set(ids)


def test_every_cell_is_in_the_table_and_an_incorrect_one_has_no_speed() -> None:
    (section,) = made().sections
    assert len(section.cells.rows) == len(records())
    headings = [column.heading for column in section.cells.columns]
    rows = {tuple(entry.text for entry in row[:3]): dict(zip(headings, row, strict=True)) for row in section.cells.rows}
    for record in records():
        config = record["config"]
        row = rows[label(config["model"]), str(config["batch"]), label(config["system"])]
        assert row["status"].text == record["status"]
        numbers = [row[name].text for name in headings[4:]]
        if record["status"] != "ok":
            assert set(numbers) == {content.DASH}
        else:
            assert row["latency, ms"].value == record["latency"]["statistics"]["host"]["median"]
            assert row["MiB"].value == record["memory"]["peak_bytes"] / 2**20
            source = "SM, counted" if record["sm_efficiency"]["source"] == "counters" else "SM, estimated"
            assert row[source].value == pytest.approx(100 * record["sm_efficiency"]["value"])
            assert sum(row[name].missing for name in ("SM, counted", "SM, estimated")) == 1
    told = {(row[0].text, row[2].text, row[3].text): row[4].text for row in section.remarks.rows}
    assert told["bert", "nimble", "incorrect"] == "relative error 1.0e+00 exceeds <the> tolerance"
    assert told["nasnet", "torchscript", "unsupported"] == "no compiler | here"
    html = made().html()
    assert "exceeds &lt;the&gt; tolerance" in html and "<the>" not in html


def test_the_environment_says_where() -> None:
    (section,) = made().sections
    found = dict(section.environment)
    assert found["GPU"] == "NVIDIA H200" and found["driver, CUDA, cuDNN"] == "580.159.04, 13.0, 9.19.0"
    assert "torch 2.11.0" in found["libraries"] and found["SM clock when measured"].endswith("1980 MHz")
    count = len(records())
    assert found["records"] == f"1 incorrect, {count - 2} ok, 1 unsupported"
    machines = [copy.deepcopy(records()[0]) for _ in range(2)]
    machines[1]["environment"]["driver"] = "999"
    machines[1]["environment"]["settings"] = {"OMP_NUM_THREADS": "1", "CUDA_LAUNCH_BLOCKING": "0"}
    found = dict(content.environment(Measured(machines)))
    assert found["driver, CUDA, cuDNN"] == "580.159.04, 999, 13.0, 9.19.0"
    assert found["settings of the shell"] == "OMP_NUM_THREADS=1 CUDA_LAUNCH_BLOCKING=0"


def test_the_charts_and_what_could_not_be_drawn_are_there() -> None:
    (section,) = made().sections
    names = {figure.name for figure in section.figures}
    assert {"speedup-b1", "throughput", "latency-b1", "memory-b1", "search-b1", "limits-b1"} <= names
    assert {"sm_efficiency-counters-b1", "sm_efficiency-estimated-b1"} <= names and not section.refused
    assert all(figure.svg.startswith("<svg ") and figure.svg.endswith("</svg>") for figure in section.figures)
    few = [r for r in records() if r["config"]["batch"] == 1]
    (other,) = report.make(by_setting(few), "eager", [], [], [], "pictures").sections
    assert list(other.refused) == ["throughput"]


def test_markdown_says_the_same_and_its_pictures_are_there(tmp_path: Path) -> None:
    made().write_pictures(tmp_path)
    text = made().markdown()
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        assert (tmp_path / picture).read_text().startswith("<svg ")
    assert len(re.findall(r"!\[", text)) == len(made().sections[0].figures) + 1
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
    assert table is not None and all(column.words for column in table.columns if column.heading in ("published", "measured"))
    assert [entry.text for entry in table.rows[0]][:3] == [VERDICT.exhibit, VERDICT.claim, "22.34x"]
    for broken in ({}, [{}], [vars(VERDICT) | {"verdict": "maybe"}], [vars(VERDICT) | {"more": "x"}]):
        file.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match="verdict"):
            read_verdicts(file)


@given(dags(max_nodes=40))
def test_layers_and_lanes_are_those_of_the_happens_before(graph: OperatorGraph) -> None:
    schedule = assign_streams(graph)
    drawn = ScheduleGraph(document(graph, schedule))
    layer = drawn.layers()
    order = as_networkx(graph)
    order.add_edges_from(schedule.waits)
    members: dict[int, list[int]] = {}
    for operator in sorted(drawn.document["operators"], key=lambda o: o["position"]):
        members.setdefault(operator["stream"], []).append(operator["id"])
    for stream in members.values():
        order.add_edges_from(pairwise(stream))
    deepest = dict.fromkeys(order, 0)
    for v in nx.topological_sort(order):
        deepest[v] = max((deepest[u] + 1 for u in order.predecessors(v)), default=0)
    assert layer == deepest
    lane = drawn.lanes(layer)
    assert set(lane) == set(members)
    taken = [(lane[s], layer_) for s, vs in members.items() for layer_ in range(layer[vs[0]], layer[vs[-1]] + 1)]
    assert len(set(taken)) == len(taken)  # no two streams in one lane while both are alive
    assert drawn.to_svg().count('class="operator"') == len(graph)


def test_stages_follow_one_another_and_merges_are_framed() -> None:
    graph = OperatorGraph.from_edges(5, [(0, 1), (0, 2), (3, 4)])
    schedule = document(graph, assign_streams(graph))
    schedule |= {"stages": [[[0], [3]], [[1], [2], [4]]], "merges": [[1, 2]]}
    drawn = ScheduleGraph(schedule)
    layer = drawn.layers()
    assert max(layer[0], layer[3]) < min(layer[1], layer[2], layer[4])
    svg = drawn.to_svg()
    assert svg.count("in merge 1") == 2 and "stage 2" in svg and "2 stages, 1 merges" in drawn.summary


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("{", "s.json: "),
        ("[]", "it lacks model"),
        ('{"model": "m"}', "it lacks system"),
        ({"edges": [[0, 9]]}, "names the operator 9, which it does not have"),
        ({"edges": [[0]]}, "is no schedule: ValueError"),
        ({"operators": [{"id": 0}]}, "is no schedule: KeyError"),
    ],
)
def test_what_is_no_schedule_is_told(tmp_path: Path, broken: Any, told: str) -> None:
    graph = OperatorGraph.from_edges(2, [(0, 1)])
    file = tmp_path / "s.json"
    whole = document(graph, assign_streams(graph))
    file.write_text(broken if isinstance(broken, str) else json.dumps(whole | broken))
    with pytest.raises(NoSchedule) as raised:
        ScheduleGraph.read(file)
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_a_schedule_with_a_cycle_is_told() -> None:
    graph = OperatorGraph.from_edges(2, [(0, 1)])
    with pytest.raises(NoSchedule, match="has a cycle"):
        ScheduleGraph(document(graph, assign_streams(graph)) | {"waits": [[1, 0]]}).to_svg()


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "scripts/report.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--results", "nowhere"], "nowhere is not there"),
        (["--results", str(REFERENCE), "--schedules", "nowhere.json"], "nowhere.json"),
        (["--results", str(REFERENCE), "--verdicts", "nowhere.json"], "nowhere.json"),
        (["--results", str(REFERENCE), "--models", "vgg16", "--output", "/dev/null/x/r.html"], "cannot be written"),
        (["--results", str(REFERENCE), "--output", "tests"], "it is a folder"),
    ],
)
def test_a_bad_request_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["report.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        report.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and told in error and len(error.splitlines()) == 1, error


def test_what_cannot_be_written_is_told_before_anything_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("--results", str(REFERENCE), "--output", f"{tmp_path}/r.html", "--markdown", f"{tmp_path}/file/r.md")
    assert done.returncode == 2 and "is not a folder" in done.stderr and done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class Browser:
    """A headless Chromium, spoken to in WebDriver's protocol."""

    FLAGS = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update", "--window-size=1280,900"),
    )

    def __init__(self, driver: str, chromium: str, profile: Path):
        self.process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        port = next(match[1] for line in self.process.stdout if (match := re.search(r"successfully on port (\d+)", line)))
        self.address = f"http://127.0.0.1:{port}/session"
        options = {"binary": chromium, "args": [*self.FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.address += "/" + self.ask("", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def ask(self, what: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.address + what, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def run(self, script: str, *arguments: Any) -> Any:
        return self.ask("/execute/sync", {"script": script, "args": list(arguments)})

    def close(self) -> None:
        urllib.request.urlopen(urllib.request.Request(self.address, method="DELETE"), timeout=60).close()
        self.process.terminate()
        self.process.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("chromium-browser")
    if not driver or not chromium:
        pytest.skip("Chromium and its driver are not installed: apt-get install chromium chromium-driver")
    opened = Browser(driver, chromium, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


COLUMN = """
const table = document.querySelector('#setting-1 table'), name = arguments[0];
const column = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent === name);
if (arguments[1]) table.tHead.rows[0].cells[column].querySelector('button').click();
return [...table.tBodies[0].rows].map((row) => row.cells[column].textContent);
"""


def test_a_browser_shows_the_whole_page_from_a_file(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(made().html(), encoding="utf-8")
    browser.ask("/url", {"url": file.as_uri()})
    (section,) = made().sections
    shown = browser.run(
        "return [...document.querySelectorAll('figure.chart')].map((f) => {"
        " const box = f.querySelector('svg').getBoundingClientRect();"
        " return [f.dataset.chart, box.width, box.height, f.querySelectorAll('svg path').length]; });"
    )
    assert [name for name, *_ in shown] == [figure.name for figure in section.figures]
    assert all(width > 500 and height > 100 and paths > 20 for _, width, height, paths in shown), shown
    assert browser.run("return document.querySelectorAll('#setting-1 table')[0].tBodies[0].rows.length") == len(records())
    operators = browser.run("return document.querySelectorAll('svg.schedule .operator').length")
    assert operators == 7 and browser.run(
        "return document.querySelector('svg.schedule').getBoundingClientRect().height > 50"
    )
    assert browser.run(
        "return document.documentElement.scrollWidth <= window.innerWidth"
    )  # wide tables scroll by themselves
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    assert [entry for entry in browser.ask("/se/log", {"type": "browser"}) if entry["level"] == "SEVERE"] == []


@pytest.mark.parametrize("name", ["latency, ms", "over eager", "batch", "model", "status", "error"])
def test_tables_sort_in_a_browser(browser: Browser, tmp_path: Path, name: str) -> None:
    file = tmp_path / "report.html"
    file.write_text(made().html(), encoding="utf-8")
    browser.ask("/url", {"url": file.as_uri()})
    before = browser.run(COLUMN, name, False)

    def ordered(down: bool) -> list[str]:
        there = [text for text in before if text != content.DASH]
        number = name not in ("model", "status")
        there.sort(key=lambda text: float(text.split(" ")[0]) if number else text, reverse=down)
        return [*there, *(text for text in before if text == content.DASH)]

    def keys(texts: list[str]) -> list[str]:
        return [text.split(" ")[0] for text in texts]  # rows that are equal may stand in either order

    assert keys(browser.run(COLUMN, name, True)) == keys(ordered(down=False))
    assert keys(browser.run(COLUMN, name, True)) == keys(ordered(down=True))
    state = "return [...document.querySelectorAll('#setting-1 th[aria-sort]')].map((h) => h.getAttribute('aria-sort'));"
    assert browser.run(state)[0] == "descending"


def test_pointing_at_an_operator_keeps_its_stream_in_colour(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(made().html(), encoding="utf-8")
    browser.ask("/url", {"url": file.as_uri()})
    script = """
    const picture = document.querySelector('svg.schedule'), one = picture.querySelector('.operator');
    one.querySelector('rect').dispatchEvent(new MouseEvent('mouseover', { bubbles: true }));
    return [...picture.querySelectorAll('.operator')].map((o) => [o.dataset.stream, getComputedStyle(o).opacity]);
    """
    seen = browser.run(script)
    assert {opacity for stream, opacity in seen if stream == seen[0][0]} == {"1"}
    assert {opacity for stream, opacity in seen if stream != seen[0][0]} == {"0.25"}


def test_the_command_writes_both_pages(tmp_path: Path) -> None:
    schedule = tmp_path / "s.json"
    graph = OperatorGraph.from_edges(3, [(0, 1), (0, 2)])
    schedule.write_text(json.dumps(document(graph, assign_streams(graph))))
    page, text = tmp_path / "deep" / "r.html", tmp_path / "r.md"
    done = run(
        *("--results", str(REFERENCE), "--models", "nasnet,bert", "--batches", "1", "--schedules", str(schedule)),
        *("--output", str(page), "--markdown", str(text)),
    )
    assert done.returncode == 0 and done.stdout.split() == [str(page), str(text)], done.stderr
    assert "<!DOCTYPE html>" in page.read_text()[:20] and (tmp_path / "r_files" / "speedup.svg").exists()
    assert "![a model, nimble" in text.read_text()
