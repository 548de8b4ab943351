"""The exhibits that committed records can tell of, for a page: a picture, the verdict, the command."""

import io
from pathlib import Path

import matplotlib.pyplot as plt

from scripts.charts import style

from . import judgement
from .pictures import pictures
from .preset import Preset, names
from .recorded import recorded


def gallery(folder: Path, page: Path) -> tuple[str, dict[Path, str]]:
    """Every exhibit with a measured figure: its first chart, one for each batch where it has several.

    Args:
        folder: where the pictures belong.
        page: the folder of the page, to which its paths are relative.

    Returns:
        Markdown, and the pictures that it shows, SVG by file.
    """
    parts, files, missing, without_files = [], {}, list[str](), list[str]()
    for name in names():
        preset = Preset.read(name)
        best, *others = recorded(preset)
        if not best.tells:
            (without_files if preset.needs == "files" else missing).append(name)
            continue
        verdict = best.verdict
        further = [one for one in others if one.tells and one.evidence.measured]  # schedules alone are every folder's
        elsewhere = "".join(f"\n- By the records of `{one.sweep}`: {one.verdict.reason}." for one in further)
        charts, _ = pictures(preset, best.evidence, best.findings)
        kind = next(iter(charts)).partition("-")[0]
        shown = []
        for key, chart in charts.items():
            if key.partition("-")[0] == kind:
                file = folder / f"{name.replace('/', '-')}{key.removeprefix(kind)}.svg"
                files[file] = _svg(chart.figure)
                shown.append(f"![{chart.title}]({file.relative_to(page).as_posix()})")
            plt.close(chart.figure)
        parts += [
            f"## {preset.title} ({verdict.verdict}: {verdict.extent} figures)",
            *shown,
            f"- {preset.source}: {preset.claim}\n- Here{_place(preset)}: {verdict.reason}.{elsewhere}",
            f"```sh\n{verdict.command}\n```",
        ]
        if behind := judgement.explanation(best.evidence.measured):
            lines = "\n".join(f"- {line}" for line in behind)
            parts.append(f"<details><summary>Kernels and latencies behind it</summary>\n\n{lines}\n\n</details>")
    if missing:
        names_missing = ", ".join(f"`{name}`" for name in missing)
        parts.append(f"Presets without records of this machine yet, which the same command runs: {names_missing}.")
    if without_files:
        names_missing = ", ".join(f"`{name}`" for name in without_files)
        parts.append(f"Presets of tables that nobody may pass on, which run with `model.path=` of yours: {names_missing}.")
    return "\n\n".join(parts), files


def _place(preset: Preset) -> str:
    return ", which takes no GPU" if preset.needs == "nothing" else ""


def _svg(figure: plt.Figure) -> str:
    out = io.StringIO()
    with style.house():
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
