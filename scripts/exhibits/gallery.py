"""The exhibits that committed records can tell of, for the README: a picture, the verdict, the command."""

import io
from pathlib import Path

import matplotlib.pyplot as plt

from results.finding import CANNOT
from results.store import Store
from scripts.charts import style

from . import judgement
from .pictures import pictures
from .preset import Preset, names
from .quantities import findings
from .running import Run


def gallery(results: Path, folder: Path, root: Path) -> tuple[str, dict[Path, str]]:
    """Markdown, and the pictures it shows by the file in `folder` that each belongs in. Paths in it are relative to `root`.

    An exhibit is shown by its first chart, and not at all where no figure of the paper's was measured for it.
    """
    parts, files, missing = [], {}, []
    records = list(Store(results).read().records.values())
    for name in names():
        preset = Preset.read(name)
        run = Run(preset, {}, results, folder, small=False)
        evidence = run.evidence(records)
        found = findings(preset, evidence)
        verdict = judgement.judge(preset, evidence, found, small=False)
        if verdict.verdict == CANNOT:
            missing.append(name)
            continue
        charts, _ = pictures(preset, evidence, found)
        first = next(iter(charts.values()))
        file = folder / f"{name.replace('/', '-')}.svg"
        files[file] = _svg(first.figure)
        for chart in charts.values():
            plt.close(chart.figure)
        parts += [
            f"### {preset.title} ({verdict.verdict})",
            f"![{first.title}]({file.relative_to(root).as_posix()})",
            f"- The paper: {preset.claim}\n- Here: {verdict.reason}.",
            f"```sh\n{verdict.command}\n```",
        ]
    if missing:
        told = ", ".join(f"`{name}`" for name in missing)
        parts.append(f"Presets without records of this machine yet, which the same command runs: {told}.")
    return "\n\n".join(parts), files


def _svg(figure: plt.Figure) -> str:
    out = io.StringIO()
    with style.house():
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
