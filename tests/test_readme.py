"""The pages: the first one's table and picture, commands that run, figures beside their commands, and links."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sentences import FIGURE, cells_of, pages, prose, sections

from scripts import best_tables, readme
from scripts.charts.names import written

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
# Of the README's commands those that a test of minutes cannot run, and why.
NOT_RUN = {
    "python run.py -m model=nasnet,googlenet": "torch_compile and two searches take an hour on a CPU",
    "make ": ".ci/run calls it",
}
# The reader's own package, in the README's words.
FACTORY = """
import torch


def make(batch):
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), (torch.randn(batch, 8),)
"""


@pytest.mark.slow
def test_table_and_chart_are_what_the_results_give() -> None:
    run = subprocess.run(
        [sys.executable, "scripts/readme.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_first_page_is_short_and_begins_with_the_two_commands() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.encode()) <= 12_288 and len(text.splitlines()) <= 250
    assert "make bench" in text[:1500] and "make test" in text[:1500]
    (table,) = re.findall(r"(?:^\|[^\n]*over fastest compiler[^\n]*\n)(?:\|[^\n]*\n)+", text, flags=re.MULTILINE)
    assert (
        table.strip() == best_tables.front(readme.read(readme.BEST)).markdown() and 1 <= len(cells_of(table.strip())) <= 10
    )


def test_the_picture_of_the_first_page_is_of_its_table() -> None:
    """The same networks, each system over the CUDA Graph in the rounds that they shared."""
    assert f"]({readme.FRONT.relative_to(ROOT)})" in README.read_text(encoding="utf-8")
    svg = readme.FRONT.read_text(encoding="utf-8")
    rows = cells_of(best_tables.front(readme.read(readme.BEST)).markdown())
    for row in rows:
        ratio = float(row["cuda_graph"]) / float(row["nimble"])
        drawn = [float(number) for number in re.findall(r">(\d\.\d\d)<", svg)]
        assert written(row["model"]) in svg and any(abs(ratio - number) < 0.03 * ratio for number in drawn), row["model"]
    assert "measured alone" not in svg


DEFINING = ("results/FORMAT.md", "results/README.md", "runners/README.md", "results/reference/README.md")  # rules, examples
CODE = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)
COMMAND = re.compile(r"(?<![\w-])(?:python3?|pytest|make)\s+\S")


def figures_without_command(page: Path) -> list[str]:
    """The sentences with a measured figure, tables apart, in sections that name no command."""
    lacking = []
    for _, text in sections(page):
        if any(COMMAND.search(code) for code in CODE.findall(text)):
            continue
        lacking += [sentence.strip() for sentence in re.split(r"(?<=[.:])\s", prose(text)) if FIGURE.search(sentence)]
    return lacking


def test_a_figure_without_a_command_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One\nIt takes 3.1 ms. They make `it` so.\n## Two\nIt is 2.5x as fast: `python run.py`.\n| 3 ms |\n"
        "## Three\n| 3 ms |\n"
    )
    assert figures_without_command(page) == ["It takes 3.1 ms."]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_measured_figure_stands_beside_the_command_that_prints_it(page: Path) -> None:
    name = str(page.relative_to(ROOT))
    assert name in DEFINING or not figures_without_command(page)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> list[tuple[Path, str]]:
    """The file and anchor of each link to the project's own files; an anchor is empty where there is none."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose))
    parted = (target.partition("#") for target in targets if not target.startswith("http"))
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in parted]


def broken(page: Path) -> list[str]:
    """The links that lead nowhere."""
    return [
        f"{target}#{anchor}"
        for target, anchor in links(page)
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert not broken(page)


def test_a_link_to_nothing_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One title\n[a](page.md#one-title) [b](page.md#two) [c](none.md) [d](http://none)\n")
    assert broken(page) == [f"{page}#two", f"{tmp_path / 'none.md'}#"]


@pytest.mark.parametrize(
    ("page", "heading"),
    [
        ("models/README.md", "Add a model to the zoo"),
        ("systems/README.md", "Add a scheduler"),
        ("scripts/README.md", "Reproduce an exhibit"),
        ("results/FORMAT.md", "Record"),
        ("systems/weave/README.md", "weave"),
    ],
)
def test_what_a_newcomer_looks_for_is_two_clicks_away(page: str, heading: str) -> None:
    first = {target for target, _ in links(README)}
    second = {target for one in first if one.suffix == ".md" for target, _ in links(one)}
    assert (ROOT / page) in first | second
    assert re.search(rf"^#+ {heading}$", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)


def commands() -> list[str]:
    """The README's commands, without their comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_each_command_that_no_test_runs_is_still_there() -> None:
    assert all(any(command.startswith(start) for command in commands()) for start in NOT_RUN)


@pytest.mark.slow
def test_the_commands_of_the_first_page_run(tmp_path: Path) -> None:
    """Those that end within minutes, in their order, as a newcomer types them; records and pages go elsewhere."""
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "mymodule.py").write_text(FACTORY, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    records, report = tmp_path / "runs", tmp_path / "report.html"
    elsewhere = {
        "run.py": [f"results={records}"],
        "scripts/reproduce.py": [f"results={records}", "--output", str(tmp_path / "exhibits")],
        "scripts/report.py": ["--output", str(report)],
    }
    ran = []
    for command in commands():
        if command.startswith(tuple(NOT_RUN)):
            continue
        program, script, *arguments = command.split()
        assert program == "python", command
        arguments = [str(records) if part == "results/runs" else part for part in arguments]
        whole = [sys.executable, script, *arguments, *elsewhere[script]]
        run = subprocess.run(whole, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
        assert run.returncode == 0, (command, run.stdout[-2000:], run.stderr[-2000:])
        ran.append(script)
    assert set(ran) == set(elsewhere) and len(ran) + len(NOT_RUN) == len(commands()) - 1  # two begin with make
    assert report.stat().st_size > 10_000 and (tmp_path / "exhibits" / "nimble-figure7-small" / "verdict.json").exists()
