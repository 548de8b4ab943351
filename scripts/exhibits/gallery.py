"""The exhibits that committed records can tell of, for a page: a picture, the verdict, the command."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt

from results.finding import NOT_SHOWN
from scripts.charts import style
from scripts.table import DASH, Entry, Table, made, table

from . import judgement
from .behind import behind
from .pictures import pictures
from .preset import Preset, names
from .recorded import Recorded, recorded

NEEDS_FILES = "needs files of yours"


def gallery(folder: Path, page: Path) -> tuple[dict[str, str], dict[Path, str]]:
    """Tables of all exhibits, the papers' and our own, and of each paper those with a measured figure: the charts that its
    preset names, or else its first. One that is not shown has the reason alone.

    Args:
        folder: where the pictures belong.
        page: the folder of the pages, to which their paths are relative.

    Returns:
        Markdown by the name of its part ("verdicts", "own verdicts", "exhibits of nimble"), and the pictures that it shows,
        SVG by file.
    """
    sections: dict[str, list[str]] = {}
    rows, files = [], dict[Path, str]()
    for name in names():
        preset = Preset.read(name)
        paper = name.partition("/")[0]
        best, *others = recorded(preset)
        rows.append(_Row(name, preset, best))
        if not _has_section(best):
            continue
        verdict = best.verdict
        further = [one for one in others if one.tells and one.evidence.measured]  # schedules alone are every sweep's
        elsewhere = "; ".join(f"`{one.sweep}` ({one.verdict.verdict}, {one.verdict.extent_in_words})" for one in further)
        charts = pictures(preset, best.evidence, best.findings)[0] if best.tells else {}
        first = next(iter(charts), "").partition("-")[0]
        shown = []
        for key, chart in charts.items():
            if (kind := key.partition("-")[0]) in (first, *preset.charts):
                ending = key.removeprefix(kind) if kind == first else f"-{key}"
                file = folder / f"{name.replace('/', '-')}{ending}.svg"
                files[file] = style.svg(chart.figure)
                shown.append(f"![{chart.title}]({file.relative_to(page).as_posix()})")
            plt.close(chart.figure)
        sections.setdefault(paper, []).extend(
            [
                f"## {preset.title} ({verdict.verdict}: {verdict.extent_in_words})",
                *shown,
                f"{preset.source}: {preset.claim} Here{_place(preset)}: {_standing(preset, best)}",
                *([_figures(preset, best).markdown()] if best.tells else []),
                *([f"By other records: {elsewhere}."] if elsewhere else []),
                f"```sh\n{verdict.command}\n```",
            ]
        )
        if best.tells and (tables := behind(best.evidence.measured)):
            text = "\n\n".join(one.markdown() for one in tables)
            sections[paper].append(f"<details><summary>Kernels and latencies behind it</summary>\n\n{text}\n\n</details>")
    parts = {f"exhibits of {paper}": "\n\n".join(section) for paper, section in sections.items()}
    for part, are_own in (("verdicts", False), ("own verdicts", True)):
        parts[part] = _verdicts([row for row in rows if row.preset.is_own == are_own]).markdown()
    return parts, files


def _has_section(best: Recorded) -> bool:
    """Does a page say more of the exhibit than its row?"""
    return best.tells or best.verdict.verdict == NOT_SHOWN


@dataclass(frozen=True)
class _Row:
    name: str
    preset: Preset
    best: Recorded


def _verdicts(rows: Sequence[_Row]) -> Table:
    def title(row: _Row) -> Entry:
        return Entry(row.preset.title, page=f"{row.name.partition('/')[0].upper()}.md" if _has_section(row.best) else "")

    def standing(row: _Row) -> str:
        return NEEDS_FILES if row.preset.needs == "files" and not row.best.tells else row.best.verdict.verdict

    def sweep(row: _Row) -> str:
        return row.best.sweep if row.best.tells and row.best.evidence.measured else DASH

    columns = [
        made("exhibit", title, number=False),
        made("verdict", standing, number=False),
        made("figures", lambda row: row.best.verdict.extent if row.best.tells else f"0 of {row.best.verdict.figures}"),
        made("records", sweep, number=False),
        made("python scripts/reproduce.py", lambda row: row.name, number=False),
    ]
    return table(columns, rows)


def _standing(preset: Preset, best: Recorded) -> str:
    if not best.tells:
        return f"{best.verdict.reason}."
    tally = judgement.tally(best.findings)
    return " ".join(f"{sentence}." for sentence in (tally[0].lower() + tally[1:], *judgement.notes(preset, best.evidence)))


def _figures(preset: Preset, best: Recorded) -> Table:
    stands = judgement.stands(preset, best.evidence)
    columns = [
        made("figure", lambda finding: finding.what, number=False),
        made("paper", lambda finding: DASH if preset.is_own else judgement.published(finding)),
        made("here", judgement.interval),
        made("verdict", lambda finding: judgement.how_it_stands(finding, stands), number=False),
    ]
    return table(columns, best.findings)


def _place(preset: Preset) -> str:
    return ", which takes no GPU" if preset.needs == "nothing" else ""
