"""The report's page as a browser shows it."""

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Run
from reports import VERDICT, made, records

from results.selection import by_setting
from scripts import report
from scripts.charts import style
from scripts.page import content

pytestmark = pytest.mark.slow


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

    def command(self, name: str, parameters: dict[str, Any]) -> Any:
        """A command of Chromium's own protocol."""
        return self.ask("/goog/cdp/execute", {"cmd": name, "params": parameters})

    def press(self, key: str) -> None:
        """Press a key and let it go. key: as WebDriver writes it, Tab is U+E004 and Enter U+E007."""
        strokes = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self.ask("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})

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
        " return [f.dataset.chart, box.width, box.height, f.querySelectorAll('svg :is(path, text, use)').length]; });"
    )
    assert [name for name, *_ in shown] == [figure.name for figure in section.figures]
    assert all(width > 500 and height > 100 and paths > 20 for _, width, height, paths in shown), shown
    assert browser.run("return document.querySelectorAll('#setting-1 table')[0].tBodies[0].rows.length") == len(records())
    operators = browser.run("return document.querySelectorAll('svg.schedule .stream > path').length")
    assert operators == 7 and browser.run(
        "return document.querySelector('svg.schedule').getBoundingClientRect().height > 50"
    )
    assert browser.run(
        "return document.documentElement.scrollWidth <= window.innerWidth"
    )  # wide tables scroll by themselves
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    assert [entry for entry in browser.ask("/se/log", {"type": "browser"}) if entry["level"] == "SEVERE"] == []


MOST_BYTES = 5e6  # of a report
LONG = "a_name_without_a_blank_" * 20
WIDTHS = """
document.querySelectorAll('details').forEach((one) => { one.open = true; });
return [window.innerWidth, document.documentElement.scrollWidth, document.querySelectorAll('.scroll, figure').length];
"""


def show(browser: Browser, width: int = 1280, scheme: str = "light") -> None:
    """A window of a width in pixels, whose person likes a colour scheme."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.command("Emulation.setDeviceMetricsOverride", size)
    browser.command("Emulation.setEmulatedMedia", {"features": features})


def check_widths(browser: Browser, page: Path) -> None:
    """The page has no sideways scrolling in a window of usual width; what is wider scrolls in its own box."""
    browser.ask("/url", {"url": page.as_uri()})
    for width in (1300, 1024, 390):
        show(browser, width)
        inner, whole, boxes = browser.run(WIDTHS)
        assert inner == width and whole <= inner and boxes > 5
    show(browser, 1280)


def test_no_page_scrolls_sideways(browser: Browser, tmp_path: Path) -> None:
    page, (schedule,) = made(), made().schedules
    (section,) = page.sections
    long = [replace(section, title=LONG, environment=[("host", LONG)], refused={"latency": LONG})]
    page = replace(page, title=LONG, sections=long, schedules=[replace(schedule, title=LONG)])
    (tmp_path / "report.html").write_text(page.html(), encoding="utf-8")
    check_widths(browser, tmp_path / "report.html")


NARROW = """
const high = () => Math.max(...[...document.querySelectorAll('#verdicts tbody tr')].map((row) => row.offsetHeight));
document.querySelectorAll('nav details').forEach((one) => { one.open = true; });
const closed = high();
document.querySelectorAll('#verdicts td details').forEach((one) => { one.open = true; });
const boxes = [...document.querySelectorAll('nav a')].map((link) => link.getClientRects().length);
const captions = [...document.querySelectorAll('caption span')].map((one) => one.getBoundingClientRect().right);
return [boxes, closed, high(), Math.max(...captions)];
"""


def test_a_narrow_window_shows_links_whole_and_rows_of_little_height(browser: Browser, tmp_path: Path) -> None:
    """Each link is one box, in which no other begins; a long reason is short until it is opened, and scrolls then."""
    page = made()
    (section,) = page.sections
    titles = [f"NVIDIA H200, torch 2.11.0, fp16, new_tokens=64, prompt_tokens={i}" for i in range(5)]
    verdict = replace(VERDICT, reason="inception_v3: ios (schedule=inception_v3@ios@b32) over sequential. " * 16)
    page = replace(page, sections=[replace(section, title=title) for title in titles])
    page = replace(page, verdicts=report.verdict_table([verdict]))
    (tmp_path / "report.html").write_text(page.html(), encoding="utf-8")
    show(browser, 390)
    browser.ask("/url", {"url": (tmp_path / "report.html").as_uri()})
    boxes, closed, opened, right = browser.run(NARROW)
    show(browser)
    assert len(boxes) > 5 and set(boxes) == {1}
    assert closed < 100 < opened < 250
    assert right <= 390


def test_the_page_of_all_committed_records_does_not_scroll_sideways(browser: Browser, tmp_path: Path, script: Run) -> None:
    reference, page = ROOT / "results" / "reference", tmp_path / "report.html"
    folders = sorted(reference.glob("h200/*.jsonl.gz"))
    schedules = sorted(reference.glob("**/*.schedule.json.gz"))[::10]
    done = script("report", "--results", *map(str, folders), "--schedules", *map(str, schedules), "--output", str(page))
    assert done.returncode == 0, done.stderr
    assert page.stat().st_size < MOST_BYTES
    check_widths(browser, page)


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


TAB, ENTER, SPACE = "\ue004", "\ue007", " "
FOCUS = """
const one = document.activeElement, style = getComputedStyle(one), heading = one.closest('th');
return [one.tagName, style.outlineStyle, parseFloat(style.outlineWidth), heading && heading.textContent,
        heading && heading.getAttribute('aria-sort')];
"""


def test_keys_alone_sort_a_table_and_show_where_they_are(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(made().html(), encoding="utf-8")
    browser.ask("/url", {"url": file.as_uri()})
    for _ in range(20):
        browser.press(TAB)
        tag, outline, width, heading, _ = browser.run(FOCUS)
        assert outline != "none" and width >= 2, tag
        if heading == "latency, ms":
            break
    assert (tag, heading) == ("BUTTON", "latency, ms")
    times = """
    return [...document.querySelectorAll('#answer tbody tr')].map((row) => parseFloat(row.cells[arguments[0]].textContent));
    """
    (section,) = made().answered
    assert section.answer is not None
    column = [column.heading for column in section.answer.table.columns].index("latency, ms")
    before = browser.run(times, column)
    assert before != sorted(before)
    for key, order, down in ((ENTER, "ascending", False), (SPACE, "descending", True)):
        browser.press(key)
        assert browser.run(FOCUS)[3:] == ["latency, ms", order]  # and the focus stays
        assert browser.run(times, column) == sorted(before, reverse=down)


def test_a_number_sorts_by_itself_or_by_what_it_was_rounded_from(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(made().html(), encoding="utf-8")
    browser.ask("/url", {"url": file.as_uri()})
    values = """
    return [...arguments].map(([text, value]) => {
      const cell = document.createElement('td');
      cell.textContent = text;
      if (value !== null) cell.dataset.value = value;
      return valueOf(cell) ?? null;
    });
    """
    entries = [["0.25", None], ["12", None], ["1.3", "1.32"], ["1.3 [1.2, 1.4]", None], ["nimble", None], ["", None]]
    assert browser.run(values, *entries) == ["0.25", "12", "1.32", None, None, None]


def test_the_page_opens_with_the_answer(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(made().html(), encoding="utf-8")
    for width in (1280, 390):
        show(browser, width)
        browser.ask("/url", {"url": file.as_uri()})
        first, top = browser.run("const s = document.querySelector('main > section'); return [s.id, s.offsetTop]")
        assert first == "answer" and top < 450
    show(browser)


ALIGNED = """
return [...document.querySelectorAll('tbody td')].map((cell) => {
  const heading = cell.closest('table').tHead.rows[0].cells[cell.cellIndex];
  return [getComputedStyle(cell).textAlign, getComputedStyle(heading).textAlign, cell.hasAttribute('data-missing')];
});
"""


def test_an_entry_stands_below_its_heading_also_where_it_is_missing(browser: Browser, tmp_path: Path) -> None:
    """Where a model has no limits the answer lacks words, what bounds it, and a number, how far it is from that."""
    file = tmp_path / "report.html"
    some_without = [replace(r, limits=None) if r.cell.model.name == "bert" else r for r in records()]
    html = report.make(by_setting(some_without, style.order), "eager", [], [], [], [VERDICT], "pictures").html()
    file.write_text(html, encoding="utf-8")
    browser.ask("/url", {"url": file.as_uri()})
    seen = {tuple(entry) for entry in browser.run(ALIGNED)}
    assert {(cell, is_missing) for cell, _, is_missing in seen} >= {("left", True), ("right", True), ("right", False)}
    assert all(cell == heading for cell, heading, _ in seen), seen


CONTRASTS = """
const light = (colour) => {
  const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
    .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (one) => {
  const colour = getComputedStyle(one).backgroundColor;
  return one === document.documentElement || !colour.endsWith(', 0)') ? colour : behind(one.parentElement);
};
const words = 'h1, h2, nav a, p, td, th button, caption, dt, dd, summary, figcaption';
const ratios = [...document.querySelectorAll(words)].map((one) => {
  const [a, b] = [light(getComputedStyle(one).color), light(behind(one))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
});
return [light(behind(document.body)), Math.min(...ratios), ratios.length];
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_in_either_colour_scheme(browser: Browser, tmp_path: Path, scheme: str) -> None:
    file = tmp_path / "report.html"
    file.write_text(made().html(), encoding="utf-8")
    show(browser, scheme=scheme)
    browser.ask("/url", {"url": file.as_uri()})
    page, least, texts = browser.run(CONTRASTS)
    show(browser)
    assert (page > 0.5) == (scheme == "light")
    assert texts > 50 and least >= 4.5  # WCAG 2.1, AA


def test_pointing_at_an_operator_keeps_its_stream_in_colour(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(made().html(), encoding="utf-8")
    browser.ask("/url", {"url": file.as_uri()})
    script = """
    const streams = [...document.querySelectorAll('svg.schedule .stream')];
    streams[0].querySelector('path').dispatchEvent(new MouseEvent('mouseover', { bubbles: true }));
    return streams.map((stream) => getComputedStyle(stream).opacity);
    """
    first, *others = browser.run(script)
    assert (first, set(others)) == ("1", {"0.25"})
