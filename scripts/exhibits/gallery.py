"""The exhibits that committed records can tell of, for the README: a picture, the verdict, the command."""

import io
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import matplotlib.pyplot as plt

from results.finding import CANNOT, NOT_RUN, Finding
from results.record import Record
from results.store import Store
from results.verdict import Verdict
from scripts.charts import style

from . import judgement
from .evidence import Evidence
from .findings import findings
from .pictures import pictures
from .preset import OUTPUT, Preset, names
from .running import Run


def gallery(
    results: Path, schedules: Path, folder: Path, root: Path, others: Mapping[str, Sequence[Path]]
) -> tuple[str, dict[Path, str]]:
    """Every exhibit with a measured figure: its first chart, one for each batch where it has several.

    Args:
        results: the folder of the records.
        schedules: the folder of schedules and timelines, as scripts/reproduce.py writes them to `OUTPUT`.
        folder: where the pictures belong.
        root: what paths in the Markdown are relative to.
        others: further folders of records by exhibit, best first; they come before `results`.

    Returns:
        Markdown, and the pictures that it shows, SVG by file.
    """
    parts, files, missing, without_files = [], {}, list[str](), list[str]()
    records = {place: list(Store(place).read().records.values()) for place in {results, *chain(*others.values())}}
    for name in names():
        preset = Preset.read(name)
        judged = {place: _judged(preset, records[place], place, schedules) for place in (*others.get(name, ()), results)}
        places = [place for place, (_, _, of) in judged.items() if of.verdict not in (CANNOT, NOT_RUN)]
        if not places:
            (without_files if preset.needs == "files" else missing).append(name)
            continue
        evidence, figures, verdict = judged[places[0]]
        further = [place for place in places[1:] if judged[place][0].measured]  # schedules alone are every folder's
        elsewhere = "".join(f"\n- By the records of `{place.name}`: {judged[place][2].reason}." for place in further)
        charts, _ = pictures(preset, evidence, figures)
        kind = next(iter(charts)).partition("-")[0]
        shown = []
        for key, chart in charts.items():
            if key.partition("-")[0] == kind:
                file = folder / f"{name.replace('/', '-')}{key.removeprefix(kind)}.svg"
                files[file] = _svg(chart.figure)
                shown.append(f"![{chart.title}]({file.relative_to(root).as_posix()})")
            plt.close(chart.figure)
        parts += [
            f"### {preset.title} ({verdict.verdict}: {verdict.extent} figures)",
            *shown,
            f"- {preset.source}: {preset.claim}\n- Here{_place(preset)}: {verdict.reason}.{elsewhere}",
            f"```sh\n{verdict.command}\n```",
        ]
        if behind := judgement.explanation(evidence.measured):
            lines = "\n".join(f"- {line}" for line in behind)
            parts.append(f"<details><summary>Kernels and latencies behind it</summary>\n\n{lines}\n\n</details>")
    if missing:
        names_missing = ", ".join(f"`{name}`" for name in missing)
        parts.append(f"Presets without records of this machine yet, which the same command runs: {names_missing}.")
    if without_files:
        names_missing = ", ".join(f"`{name}`" for name in without_files)
        parts.append(f"Presets of tables that nobody may pass on, which run with `model.path=` of yours: {names_missing}.")
    return "\n\n".join(parts), files


def _judged(
    preset: Preset, records: Sequence[Record], place: Path, schedules: Path
) -> tuple[Evidence, list[Finding], Verdict]:
    evidence = Run(preset, {}, place, Path(OUTPUT), small=False, files=schedules).evidence(records)
    figures = findings(preset, evidence)
    return evidence, figures, judgement.judge(preset, evidence, figures, small=False)


def _place(preset: Preset) -> str:
    return ", which takes no GPU" if preset.needs == "nothing" else ""


def _svg(figure: plt.Figure) -> str:
    out = io.StringIO()
    with style.house():
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
