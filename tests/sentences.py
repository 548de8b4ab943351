"""The hand-written text of the project's pages, and the rows of the tables that are made between its markers."""

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from conftest import ROOT

REFERENCE = ROOT / "results" / "reference"
H200 = REFERENCE / "h200"
PERCENT, US = 100, 1000
N = r"([+-]?\d[\d,]*(?:\.\d+)?)"  # a figure of a sentence
# A number with a unit of measuring, as "0.31 ms", "1.25x", "16.6 times", "98.8 %", "2.23 M rows".
FIGURE = re.compile(
    r"(?<![\w.])\d[\d,.]*(?: ?(?:ms|µs|us|%|s|GB/s|TB/s|TFLOP/s|tokens/s|M rows\S*)(?![\w/])|x(?!\w)| times\b)"
)


def pages() -> list[Path]:
    """Every page of the project."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in listed]


def sections(page: Path) -> list[tuple[str, str]]:
    """The headings of a page, each with the text up to the next one; what is generated is left out."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^<!-- ([^:\n]+): python .*?^<!-- end of \1 -->", "", text, flags=re.DOTALL | re.MULTILINE)
    parts = re.split(r"^#+ (.*)$", "# \n" + text, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def prose(text: str) -> str:
    """The sentences of a section in one line, without commands in blocks and without tables."""
    lines = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
    return " ".join(" ".join(line.strip() for line in lines if not line.startswith("|")).split())


def cells_of(table: str) -> list[dict[str, str]]:
    """The rows of a Markdown table, each by the names of its columns."""
    head, _, *rows = ([cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines())
    return [dict(zip(head, row, strict=True)) for row in rows]


@cache
def part(page: Path, name: str) -> tuple[dict[str, str], ...]:
    """The rows of the table that scripts/readme.py makes of the committed records into a part of a page."""
    text = page.read_text(encoding="utf-8")
    (made,) = re.findall(rf"^<!-- {re.escape(name)}: python .*?-->\n\n(.*?)\n\n", text, flags=re.DOTALL | re.MULTILINE)
    return tuple(cells_of(made))


def numbers(text: str) -> list[float]:
    """Those of a cell of a table: [0.0479, 0.0432, 0.0526] of "+0.0479 [+0.0432, +0.0526]"."""
    return [float(number.replace(",", "")) for number in re.findall(r"[+-]?\d[\d,]*(?:\.\d+)?", text)]


@dataclass(frozen=True)
class Said:
    """A sentence of a page: a pattern whose groups are its figures, and what is printed of them."""

    page: str
    words: str
    printed: Callable[[], Sequence[float]]
